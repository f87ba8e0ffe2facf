"""The code behind the notebooks: copies into static buffers, their launches and their evidence."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's progress messages would fill notebooks

from lib.grouped_copy import CopyPlan, grouped_foreach_copy_
from lib.strategies import STRATEGIES

__all__ = ["STRATEGIES", "CopyPlan", "grouped_foreach_copy_"]
