"""Profiler traces in, device profiles and modelled timelines out."""

from lib.profiles.bursts import between, burst_copies, find_copy_bursts, findings, lanes, of_range
from lib.profiles.device import FIGURES, DeviceProfile, Figure, fit_profile, validate
from lib.profiles.simulate import AHEAD, WAITS, device_us, simulate, what_if_grouped
from lib.profiles.traces import DEVICE_KINDS, HOST_KINDS, from_profiler, load_trace, to_chrome_trace
