"""What run_all.sh and run_grid.py share: options and their values, stopping a run, writing files whole."""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

ROOT = Path(__file__).resolve().parents[1]


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {plain(message)} (--help lists the options)\n")


def plain(text: object) -> str:
    """One line of text and nothing else: a terminal's escapes, and what is no character, are spelled out."""
    line = " ".join(str(text).split())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def parse_value(text: str) -> Any:
    """A Python literal where `text` is one (also true, false and null as in YAML), else the text itself.

    Raises ValueError for a literal that JSON cannot hold.
    """
    spelled = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in spelled:
        return spelled[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = text
    return to_json(value)


def to_json(value: Any) -> Any:
    """`value` as JSON keeps it, a tuple as a list; raises ValueError where JSON cannot hold it."""
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_json(item) for key, item in value.items()}
    is_finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    is_text = isinstance(value, str) and value == value.encode("utf-8", "ignore").decode("utf-8")
    if value is None or is_finite or is_text:
        return value
    raise ValueError(f"expected what JSON can hold: a number, text, true, false, null, a list; got {value!r}")


def resolve_paths(parameters: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Relative paths among the values made absolute: they count from `folder`, a kernel runs elsewhere.

    A path is what a parameter named `..._path` holds, and a text with a slash that names an existing file.
    """
    resolved = dict(parameters)
    for name, value in parameters.items():
        if not isinstance(value, str) or not value:
            continue
        path = folder / Path(value).expanduser()
        if name.endswith("_path") or ("/" in value and path.exists()):
            resolved[name] = os.path.normpath(path.absolute())
    return resolved


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file whole or not at all, whatever ends the process meanwhile. An OSError names the file."""
    if isinstance(data, str):  # a path in another encoding holds what UTF-8 cannot
        data = data.encode("utf-8", "backslashreplace")
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


class Stop:
    """Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt, but only inside `allowed`.

    Outside they are noted in `asked`, so that what is finished is written to its end. A signal that was
    ignored when the process started, as under nohup, stays ignored.
    """

    def __init__(self) -> None:
        self.asked = False
        self._at_once = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        self.asked = True
        if self._at_once:
            raise KeyboardInterrupt

    @contextmanager
    def allowed(self) -> Iterator[None]:
        self._at_once = True
        try:
            if self.asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._at_once = False


class _LastingStream:
    """A standard stream whose terminal or pipe may go away without ending the run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            # What is still buffered must not fail again when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def prepare_process() -> Stop:
    """Make this process one that a plain C locale, a closed terminal and a signal cannot harm."""
    if sys.getfilesystemencoding() == "ascii":  # UTF-8 holds all that ASCII does
        os.environ["PYTHONUTF8"] = "1"  # for kernels
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, _LastingStream(stream))
    return Stop()
