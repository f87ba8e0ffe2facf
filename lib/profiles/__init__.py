"""Profiler traces in, device profiles and modelled timelines out."""

from lib.profiles.bursts import between, burst_copies, find_copy_bursts, findings, lanes, of_range
from lib.profiles.device import FIGURES, DeviceProfile, Figure, fit_profile, validate
from lib.profiles.simulate import AHEAD, WAITS, device_us, simulate, what_if_grouped
from lib.profiles.traces import DEVICE_KINDS, HOST_KINDS, from_profiler, load_trace, to_chrome_trace

__all__ = [
    "AHEAD",
    "DEVICE_KINDS",
    "FIGURES",
    "HOST_KINDS",
    "WAITS",
    "DeviceProfile",
    "Figure",
    "between",
    "burst_copies",
    "device_us",
    "find_copy_bursts",
    "findings",
    "fit_profile",
    "from_profiler",
    "lanes",
    "load_trace",
    "of_range",
    "simulate",
    "to_chrome_trace",
    "validate",
    "what_if_grouped",
]
