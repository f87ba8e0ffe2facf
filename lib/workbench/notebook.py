"""What the cells of a notebook need, so that they can hold the argument: `lab = notebook.start(...)`."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from math import isclose
from operator import methodcaller
from pathlib import Path

import msgspec
import pandas as pd
import torch
import yaml
from IPython.display import display
from matplotlib.figure import Figure

from lib.profiles import load_trace, to_chrome_trace
from lib.workbench import plots, recordings, timing
from lib.workbench.evidence import RESULT_MIME, choose_device, device_name, label, plain
from lib.workbench.timing import Range, Timing, Way

ROOT = Path(__file__).resolve().parents[2]
EXERCISES = ROOT / "notebooks" / "exercises.yml"
TRACES = ROOT / "data" / "traces"
ADMITTED = {  # parameter -> its choices; names and paths, which are not listed, may be any text
    "device": ("auto", "cpu", "cuda"),
    "quick": (True, False),
    "live": (None, True, False),
    "batch_size": range(1, 65),
    "preset": ("tiny", "llama3-8b", "qwen3-8b", "deepseek-v3"),
}


class ParameterError(ValueError):
    """A parameter that a notebook does not admit; Jupyter shows its one line and no traceback."""

    def _render_traceback_(self) -> list[str]:  # asked for by IPython
        return [f"ParameterError: {self}"]


@contextmanager
def blamed(parameter: str) -> Iterator[None]:
    """An error about a file becomes one line that names the parameter."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ParameterError(parameter + plain(error, 400)) from None


def start(admit: dict | None = None, **parameters: object) -> "Lab":
    """Check a notebook's parameters and seed. admit: what ADMITTED does not say. Raises ParameterError."""
    for name, admitted in (ADMITTED | (admit or {})).items():
        value = parameters.get(name, admitted[0])
        expected = "one of " + ", ".join(map(str, admitted))
        if isinstance(admitted, range):
            expected = f"a whole number from {admitted[0]} to {admitted[-1]}"
        if not (value in admitted and type(value) in map(type, admitted)):  # 2.0, True: no numbers
            raise ParameterError(f"{name}: expected {expected}, got {plain(repr(value))}")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the one thread that launches; tiny models are too small to share
    pd.set_option("display.max_colwidth", None)
    return Lab(**parameters)


class Lab:
    """What the cells of a notebook do, and share: device, "cpu" or "cuda"; recording, or None."""

    def __init__(self, device: str = "auto", recording: str = "none", quick=False, live=None, **_) -> None:
        with blamed(""):
            self.device = choose_device(device)
            self.recording = recordings.choose(str(recording))
        counted = label("counted", "by PyTorch's rules, for any CUDA device")
        self.words = {"measured": label("measured", device_name(self.device)), "counted": counted}
        self.quick = quick
        self.live = live
        if live is None:  # a Jupyter server or an editor runs the kernel, which papermill is not
            self.live = not os.environ.keys().isdisjoint(("JPY_SESSION_NAME", "VSCODE_PID"))
        self.tries = Counter()

    @torch.no_grad()
    def race(self, ways: dict[str, Way], rounds: int = 40, calls: int = 20) -> dict[str, Timing]:
        """Time ways against each other, as serving code runs: without autograd. See `timing.measure`."""
        rounds = max(rounds // 4, 5) if self.quick else rounds
        return timing.measure(ways, rounds, calls, device=self.device)

    def label(self, evidence: object) -> str:
        """Evidence in words: of "measured", "counted", a profile or recording, a ready text, or a list."""
        if isinstance(evidence, list):
            return "\n".join(map(self.label, evidence))
        if isinstance(evidence, str):
            return self.words.get(evidence, evidence)
        return evidence.attrs["label"] if isinstance(evidence, pd.DataFrame) else evidence.label()

    def show(self, fig: Figure, name: str, alt: str, evidence: object = "measured") -> None:
        """Display a figure. name: of its file in a report. alt: what it says, for who cannot see it."""
        about = {"name": name, "alt": plain(alt, 400), "evidence": self.label(evidence), "width": 800}
        data = {"image/png": plots.png(fig, about["evidence"]), "text/plain": about["alt"]}
        display(data, raw=True, metadata={"image/png": about})

    def trace(self, name: str, python: bool = False, perfetto_path: str = "") -> pd.DataFrame:
        """A trace by path, or one of data/traces/ by name, with its evidence. perfetto_path: where to write
        it as Chrome JSON, never over itself. Raises ParameterError."""
        public = TRACES / str(name)
        path = public if public.is_file() else Path(str(name))
        with blamed("trace_path: "):
            trace = load_trace(path, python)
        if perfetto_path:
            with blamed("perfetto_path: "):
                to_chrome_trace(trace, str(perfetto_path))
        about = [trace.attrs["evidence"], trace.attrs["device"] or "GPU not named", path.name]
        if path == public:
            about.append("a public trace, see data/README.md")
        if (trace.inputs != "").any():
            about.append("shapes recorded, which slows the host")
        trace.attrs["label"] = " · ".join(map(plain, about))
        return trace

    def table(self, rows: object, evidence: object, digits: int = 1) -> None:
        """Show a DataFrame, a dict of rows or a list of them, with its evidence below."""
        if isinstance(rows, dict):
            rows = pd.DataFrame(rows.values(), index=rows, dtype=object)
        frame, below = pd.DataFrame(rows, dtype=object), self.label(evidence)
        frame = frame.fillna("").map(lambda cell: plain(cell) if isinstance(cell, str) else cell)
        html = frame.to_html(float_format=f"{{:.{digits}f}}".format)
        html = f"{html}<small>{escape(below)}</small>"
        html = f'<div class="tex2jax_ignore mathjax_ignore">{html}</div>'  # `$` in a name is a dollar
        display({"text/html": html}, raw=True)

    def publish(self, name: str, value: object, kind: str, note: str = "") -> None:
        """Leave a number, a text or a list of dicts for summary.json and the report. kind: of KINDS."""
        result = {"name": name, "value": value, "kind": kind, "note": note}
        display({RESULT_MIME: result, "text/plain": f"{name}: {plain(value)} ({kind})"}, raw=True)

    def claim(self, words: str, holds: bool | Range) -> None:
        """State what was shown; a range has to lie above zero, and across zero there is no claim."""
        if isinstance(holds, Range):
            if not holds.clear:
                return print(f"no claim: {words}")
            holds = holds.low > 0
        if not holds:
            raise AssertionError(f"does not hold: {words}")
        print(f"✓ {words}")

    def exercise(self, number: str, answer: object, **names: object) -> None:
        """Say whether an answer, `f` in the cases of exercises.yml, is right, or what it gives, and hints."""
        if answer is ...:
            return print(f"exercise {number}: not answered yet; replace the dots and run the cell again")
        task = yaml.safe_load(EXERCISES.read_bytes())[number]
        scope = {"f": answer, "answer": answer, "torch": torch, "raises": raises} | names
        for case, wanted in task["cases"].items():
            if str(wanted).startswith("="):
                wanted = eval(wanted[1:], scope)
            try:
                got = eval(case, scope)
                text = msgspec.json.encode(got, enc_hook=methodcaller("tolist"))
                right = msgspec.json.decode(text) == wanted  # tuples and tensors as lists
                if isinstance(wanted, float):
                    right = isclose(got, wanted, rel_tol=0.02)
            except Exception as error:
                got, right = error, False
            if not right:
                print(f"exercise {number}: {case} gave {plain(repr(got))}, expected {wanted!r}")
                print("hint:", task["hints"][min(self.tries[number], 1)])
                self.tries[number] += 1
                return
        print(f"exercise {number}: right")

    def panel(self, draw: Callable[..., object], **controls: object) -> None:
        """Call `draw`, with controls where somebody can move them: (lowest, highest), a list, a bool."""
        if not self.live:
            return draw()
        from ipywidgets import interact  # slow to import, and only one notebook needs it

        interact(draw, **controls)


def raises(function: Callable, *arguments: object) -> str:
    """The name of the error that a call raises, or "nothing"."""
    try:
        function(*arguments)
    except Exception as error:
        return type(error).__name__
    return "nothing"
