"""The code behind the notebooks: copies into static buffers as data, their launches and their evidence."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's progress messages would fill notebooks

from lib.copies import Call, CopyPlan, ReplayCopies, StaticInput, grouped, grouped_foreach_copy_, run
