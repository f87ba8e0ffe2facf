"""What the cells of a notebook need, so that they can hold the argument: `lab = notebook.start(...)`."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from html import escape
from pathlib import Path

import ipywidgets
import pandas as pd
import torch
import yaml
from IPython.display import display
from matplotlib.figure import Figure
from tqdm.auto import tqdm

from lib.profiles import load_trace, to_chrome_trace
from lib.workbench import plots, recordings, timing
from lib.workbench.evidence import KINDS, RESULT_MIME, choose_device, device_name, label, plain
from lib.workbench.step import Range
from lib.workbench.timing import Timing, Way

ROOT = Path(__file__).resolve().parents[2]
EXERCISES, TRACES = ROOT / "notebooks" / "exercises.yml", ROOT / "data" / "traces"
ADMITTED = {  # parameter -> a range of whole numbers, the choices, or a type
    "device": ("auto", "cpu", "cuda"),
    "quick": (True, False),
    "live": (None, True, False),
    "batch_size": range(1, 65),
    "topk": range(1, 9),
    "num_steps": range(2, 7),
    "preset": ("tiny", "llama3-8b", "qwen3-8b", "deepseek-v3"),
    "layout": ("2026-06", "2026-10", "int32_seq_lens"),
    "recording": str,
    "trace_path": str,
    "perfetto_path": str,
    "min_copies": range(1, 1001),
}


class ParameterError(ValueError):
    """A parameter that a notebook does not admit; Jupyter shows its one line and no traceback."""

    def _render_traceback_(self) -> list[str]:  # asked for by IPython
        return [f"ParameterError: {self}"]


def check_parameter(name: str, value: object, admitted: range | tuple | type) -> None:
    """Raises ParameterError for a value that is not admitted; 2.0 and True are no whole numbers."""
    if isinstance(admitted, range):
        fits = type(value) is int and value in admitted
        expected = f"a whole number from {admitted[0]} to {admitted[-1]}"
    elif isinstance(admitted, tuple):
        fits = any(type(value) is type(choice) and value == choice for choice in admitted)
        expected = "one of " + ", ".join(str(choice) for choice in admitted)
    else:
        fits = isinstance(value, admitted)
        expected = "a text" if admitted is str else f"a {admitted.__name__}"
    if not fits:
        raise ParameterError(f"{name}: expected {expected}, got {plain(repr(value))}")


def start(admit: dict[str, range | tuple | type] | None = None, **parameters: object) -> Lab:
    """Check a notebook's parameters, seed, and choose the device.

    admit: what a parameter admits, where that is not what ADMITTED says.

    Raises:
        ParameterError: names the parameter, what it admits and what came.
    """
    known = ADMITTED | (admit or {})
    for name, value in parameters.items():
        check_parameter(name, value, known[name])
    try:
        device = choose_device(parameters.get("device", "auto"))
    except ValueError as error:
        raise ParameterError(error) from None
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the one thread that launches; tiny models are too small to share
    pd.set_option("display.max_colwidth", None)
    return Lab(device, parameters)


class Lab:
    """A notebook's device and evidence, and what its cells do.

    device: "cpu" or "cuda". on: its name. quick: fewer samples. live: somebody can move a control.
    recording: the one that the parameter of this name chooses, or None.
    """

    def __init__(self, device: str, parameters: dict[str, object]) -> None:
        self.device = device
        self.on = device_name(device)
        self.quick = bool(parameters.get("quick"))
        self.live = parameters.get("live")
        if self.live is None:  # a Jupyter server or an editor runs the kernel, which papermill is not
            self.live = not os.environ.keys().isdisjoint(("JPY_SESSION_NAME", "VSCODE_PID"))
        self.recording = recordings.choose(parameters.get("recording", "none"), self.on)
        self.tries: Counter = Counter()

    def few(self, full: int, quick: int) -> int:
        """The second number in a quick run."""
        return quick if self.quick else full

    def race(self, ways: dict[str, Way], rounds: int = 40, calls: int = 20) -> dict[str, Timing]:
        """Time ways against each other, as serving code runs: without autograd. See `timing.measure`."""
        rounds = self.few(rounds, max(rounds // 4, 5))
        with torch.no_grad(), tqdm(total=rounds, desc="rounds", leave=False) as bar:
            return timing.measure(ways, rounds, calls, device=self.device, on_round=bar.update)

    def label(self, evidence: object) -> str:
        """Evidence in words: of "measured", "counted", a profile or recording, a ready text, or a list."""
        if isinstance(evidence, list):
            return "\n".join(self.label(part) for part in evidence)
        if isinstance(evidence, pd.DataFrame):
            return evidence.attrs["label"]
        if hasattr(evidence, "label"):
            return evidence.label()
        on = {
            "measured": self.on,
            "counted": "by PyTorch's rules, for any CUDA device",
        }
        return label(evidence, on[evidence]) if evidence in on else evidence

    def show(self, fig: Figure, name: str, alt: str, evidence: object = "measured") -> None:
        plots.show(fig, name, alt, self.label(evidence))

    def trace(self, name: str, python: bool = False) -> pd.DataFrame:
        """A trace by its path, or one of data/traces/ by its name, with its evidence.

        Raises:
            ParameterError: it cannot be read, and why.
        """
        path = TRACES / name if (TRACES / name).is_file() else Path(name)
        try:
            trace = load_trace(path, python)
        except OSError as error:
            raise ParameterError(f"trace_path: {plain(path)}: {error.strerror}") from None
        except ValueError as error:
            raise ParameterError(f"trace_path: {plain(error, 400)}") from None
        on, kind = trace.attrs["device"] or "GPU not named", trace.attrs["evidence"]
        shapes = "shapes recorded, which slows the host" if (trace.inputs != "").any() else ""
        public = "a public trace, see data/README.md" if path.resolve().parent == TRACES else ""
        about = [path.name, public, shapes]
        trace.attrs["label"] = f"{kind} · {plain(on)} · {plain(', '.join(filter(None, about)))}"
        return trace

    def save_trace(self, trace: pd.DataFrame, path: str) -> None:
        """Write a trace as Chrome JSON.

        Raises:
            ParameterError: it cannot be written, or would overwrite the file that it was read from.
        """
        try:
            to_chrome_trace(trace, path)
        except OSError as error:
            raise ParameterError(f"perfetto_path: {plain(path)}: {error.strerror}") from None
        except ValueError as error:
            raise ParameterError(f"perfetto_path: {plain(error, 400)}") from None

    def table(self, rows: object, evidence: object, digits: int = 1) -> None:
        """Show a DataFrame, a dict of rows or a list of them, with its evidence below."""
        frame = pd.DataFrame(rows)
        if isinstance(rows, dict):
            frame = frame.T.convert_dtypes()
        frame = frame.map(lambda cell: plain(cell) if isinstance(cell, str) else cell)
        frame, below = frame.round(digits), self.label(evidence)
        frame = frame.astype(object).where(frame.notna(), "")  # pandas writes <NA> into some, whatever na_rep
        html = f"{frame.to_html()}<small>{escape(below)}</small>"
        html = f'<div class="tex2jax_ignore mathjax_ignore">{html}</div>'  # `$` in a name is a dollar
        display({"text/html": html, "text/plain": f"{frame}\n{below}"}, raw=True)

    def publish(self, name: str, value: object, kind: str, note: str = "") -> None:
        """Leave a result for summary.json and the report: a number, a text, or a list of dicts (a table)."""
        if kind not in KINDS:
            raise ValueError(f"{name}: expected one of {KINDS}, got {kind!r}")
        result = {"name": name, "value": value, "kind": kind, "note": note}
        shown = "a table" if isinstance(value, list) else value
        display({RESULT_MIME: result, "text/plain": f"{name}: {shown} ({kind})"}, raw=True)

    def claim(self, words: str, holds: bool | Range) -> None:
        """State what the notebook showed; a range has to lie above zero, and across zero there is no claim.

        Raises:
            AssertionError: it does not hold.
        """
        if isinstance(holds, Range) and not holds.clear:
            print(f"no claim: {words}")
        elif holds.low > 0 if isinstance(holds, Range) else holds:
            print(f"✓ {words}")
        else:
            raise AssertionError(f"does not hold: {words}")

    def exercise(self, number: str, answer: object, **names: object) -> None:
        """Print what an answer gives, and a hint where that is not what was asked for; `...` is no answer.

        names: what the cases of the exercise in notebooks/exercises.yml use besides `f`, the answer.
        """
        if answer is ...:
            print(f"exercise {number}: not answered yet; replace the dots and run the cell again")
            return
        task = yaml.safe_load(EXERCISES.read_text(encoding="utf-8"))[number]
        scope = {"f": answer, "answer": answer, "torch": torch, "raises": raises} | names
        for case, wanted in task["cases"].items():
            if str(wanted).startswith("="):
                wanted = eval(wanted[1:], dict(scope))
            try:
                got = eval(case, dict(scope))
                right = same(got, wanted)
                outcome = f"gave {plain(repr(got))}"
            except Exception as error:
                right = False
                outcome = f"raised {plain(repr(error))}"
            if not right:
                print(f"exercise {number}: {case} {outcome}, expected {wanted!r}")
                self.tries[number] += 1
                vague, near = task["hints"]
                print("hint:", vague if self.tries[number] == 1 else near)
                return
        print(f"exercise {number}: right")

    def panel(self, draw: Callable[..., object], **controls: object) -> None:
        """Controls for the arguments of `draw`; where nobody can move them, one call with its defaults.

        controls: a (lowest, highest) pair for a slider, a list for a menu, a bool for a box.
        """
        if not self.live:
            draw()
            return
        widget = ipywidgets.interactive(draw, **controls)
        for control in widget.children[:-1]:
            control.continuous_update = False
        display(widget)


def raises(function: Callable, *arguments: object) -> str:
    """The name of the error that a call raises, or "nothing"."""
    try:
        function(*arguments)
    except Exception as error:
        return type(error).__name__
    return "nothing"


def same(got: object, wanted: object) -> bool:
    """Whether an answer is the one wanted: sequences and tensors by value, a float within 2 %."""
    if hasattr(got, "tolist"):
        got = got.tolist()
    if isinstance(wanted, list | tuple):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    if isinstance(wanted, float):
        return math.isclose(got, wanted, rel_tol=0.02)
    return bool(got == wanted)
