"""What kind of number a figure shows, and on what device, so that no two kinds get mixed."""

import datetime
import platform
import re
from pathlib import Path

import torch

KINDS = ("counted", "measured", "recorded", "modelled")  # by rules; here, now; as a file says; by a profile
RESULT_MIME = "application/vnd.replay-copy.result+json"  # a published result, for summary.json and the report


def device_name(device: str = "cpu") -> str:
    """The name of the processor behind a torch device, e.g. "NVIDIA H200" or "AMD EPYC (threads: 2)"."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    name, *_ = [*re.findall(r"model name\s*: (.*\S)", text), platform.machine()]
    threads = torch.get_num_threads()
    return f"{name} (threads: {threads})"


def choose_device(device: str = "auto") -> str:
    """ "cpu" or "cuda" as asked for, ValueError without one; "auto": the latter where there is one."""
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise ValueError("device: expected a CUDA or ROCm device for 'cuda', torch finds none")
    return "cuda" if found and device != "cpu" else "cpu"


def label(kind: str, on: str) -> str:
    """The line under a figure made here and today: one of KINDS, device, torch version, date."""
    today = datetime.date.today()
    return f"{kind} · {on} · torch {torch.__version__} · {today}"


def listed(numbers: dict) -> str:
    """Numbers by name in words, for a claim or a caption: "fill 14, driver memcpy 16"."""
    texts = [f"{name} {number}" for name, number in numbers.items()]
    return ", ".join(texts)


def plain(text: object, longest: int = 160) -> str:
    """A name from outside as one line of text: no control characters, no terminal escapes, not endless."""
    letters = [letter if letter.isprintable() else " " for letter in str(text)]
    words = "".join(letters).split()
    line = " ".join(words)
    return line if len(line) <= longest else line[: longest - 1] + "…"
