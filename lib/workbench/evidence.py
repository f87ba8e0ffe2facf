"""What kind of number a figure shows, and on what device, so that no two kinds get mixed.

counted: by PyTorch's rules, from shapes and strides. measured: here and now. recorded: on the device that a
file names. modelled: by the device model, with the profile it names and that profile's error.
"""

from __future__ import annotations

import datetime
import platform
import re
from pathlib import Path

import torch

KINDS = ("counted", "measured", "recorded", "modelled")
RESULT_MIME = "application/vnd.replay-copy.result+json"  # a published result, for summary.json and the report


def device_name(device: str = "cpu") -> str:
    """The name of the processor behind a torch device, e.g. "NVIDIA H200" or "AMD EPYC (2 threads)"."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    model = re.search(r"model name\s*: (.*)", text)
    name = model[1].strip() if model else platform.machine()
    threads = torch.get_num_threads()
    plural = "s" if threads > 1 else ""
    return f"{name} ({threads} thread{plural})"


def choose_device(device: str = "auto") -> str:
    """ "cuda" where there is one, else "cpu", for "auto"; the other two as they are.

    Raises:
        ValueError: for "cuda" without a CUDA or ROCm device, and for a value other than these three.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: expected auto, cpu or cuda, got {device!r}")
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise ValueError("device: expected a CUDA or ROCm device for 'cuda', torch finds none")
    if device == "auto":
        return "cuda" if found else "cpu"
    return device


def label(kind: str, on: str, torch_version: str | None = None, date: str | None = None) -> str:
    """The line under a figure: kind, device, torch version, date; this torch and today by default."""
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"{kind} · {on} · torch {torch_version or torch.__version__} · {date or today}"


def plain(text: object, longest: int = 160) -> str:
    """A name from outside as one line of text: no control characters, no terminal escapes, not endless."""
    letters = [letter if letter.isprintable() else " " for letter in str(text)]
    line = " ".join("".join(letters).split())
    if len(line) > longest:
        line = line[: longest - 1] + "…"
    return line
