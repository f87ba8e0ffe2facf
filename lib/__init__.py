"""The code behind the notebooks: copies into static buffers, their launches and their evidence."""

from lib.grouped_copy import grouped_foreach_copy_
from lib.strategies import STRATEGIES

__all__ = ["STRATEGIES", "grouped_foreach_copy_"]
