"""What kind of number a figure shows, and the claims a notebook makes, so that no two kinds get mixed.

counted: exact, from shapes and strides. measured: here and now. recorded: on the device that a file names.
modelled: by the device model, with the profile it names and that profile's error.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

KINDS = ("counted", "measured", "recorded", "modelled")
RESULT_MIME = "application/vnd.replay-copy.result+json"


def device_name(device: str | torch.device = "cpu") -> str:
    """The name of the processor behind a torch device, e.g. "NVIDIA H200" or "AMD EPYC (2 threads)"."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if (cpuinfo.exists())
        else []
    )
    name = models[0].partition(":")[2].strip() if models else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{name} ({threads} thread{'s' if threads > 1 else ''})"


def choose_device(device: str = "auto") -> str:
    """ "cuda" where there is one, else "cpu", for "auto"; any other value as it is.

    Raises:
        ValueError: for "cuda" without a CUDA or ROCm device, and for a value other than these three.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: expected auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected a CUDA or ROCm device for 'cuda', torch finds none")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def label(kind: str, on: str | None = None, torch_version: str | None = None, date: str | None = None) -> str:
    """The line under a figure: kind, device, torch version, date; here and now where nothing else is said."""
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
    date = date or datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"{kind} · {on or device_name()} · torch {torch_version or torch.__version__} · {date}"


def check(claim: str, holds: bool) -> None:
    """State a claim that the notebook made; raise AssertionError with its words where it does not hold."""
    if not holds:
        raise AssertionError(f"does not hold: {claim}")
    print(f"✓ {claim}")


def publish(name: str, value: Any, kind: str, note: str = "") -> None:
    """Show a result and leave it in the notebook's output for summary.json and report.html to pick up.

    value: a number, a string, or a list of dicts (a table).
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
    if isinstance(value, list) and not all(isinstance(row, dict) for row in value):
        raise ValueError(f"{name}: expected a table as a list of dicts, got {value!r:.80}")
    from IPython.display import display

    result = {"name": name, "value": value, "kind": kind, "note": note}
    shown = f"{name}: {len(value)} rows" if isinstance(value, list) else f"{name} = {value}"
    display({RESULT_MIME: result, "text/plain": f"{shown} ({kind}{', ' + note if note else ''})"}, raw=True)


def exercise(number: str, answer: Any, is_right: Callable[[Any], bool], hint: str) -> None:
    """Check a reader's answer; `...` stands for one not given yet, so that a batch run goes on.

    Raises:
        AssertionError: with the hint, for a wrong answer, one that `is_right` cannot even judge included.
    """
    if answer is ...:
        print(f"exercise {number}: not answered yet; replace the dots and run the cell again")
        return
    try:
        right = bool(is_right(answer))
    except Exception as error:
        raise AssertionError(f"exercise {number}: not yet ({error}). {hint}") from error
    if not right:
        raise AssertionError(f"exercise {number}: not yet. {hint}")
    print(f"exercise {number}: right")
