"""What run_all.sh and run_grid.py share: options, files written whole, processes that work side by side."""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from end_with_parent import end_with

ROOT = Path(__file__).resolve().parents[1]
SPELLED = {"true": True, "false": False, "null": None, "none": None}


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

    A tuple becomes a list, as in JSON. Raises ValueError for a literal that JSON cannot hold.
    """
    if text.lower() in SPELLED:
        return SPELLED[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        raise ValueError(f"expected a number, text, true, false, null or a list; got {value!r}") from None


def resolve_paths(parameters: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Relative paths among the values made absolute: they count from `folder`, a kernel runs elsewhere.

    A path is what a parameter named `..._path` holds, and a text with a slash that names an existing file.
    """
    resolved = dict(parameters)
    for name, value in parameters.items():
        if isinstance(value, str) and value:
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
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def start_worker() -> None:
    """Leave Ctrl-C and a closed terminal to the parent, and end with it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with(multiprocessing.parent_process().pid)


def run_here(function: Callable, tasks: Iterable[tuple], jobs: int, done: Callable[[Any], None]) -> None:
    """Call `function(*task)` in processes, `jobs` at a time, and `done` here with each result as it comes.

    An error, or Ctrl-C, ends the tasks in progress with all that they have started.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, start_worker) as pool:
        try:
            for future in as_completed([pool.submit(function, *task) for task in tasks]):
                done(future.result())
        except BaseException:
            import psutil

            for worker in multiprocessing.active_children():
                with suppress(psutil.Error):  # it has ended
                    for process in psutil.Process(worker.pid).children(recursive=True):
                        process.kill()
                worker.kill()
            raise


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run a script whose end by SIGTERM, or with its terminal, is that by Ctrl-C, in any locale."""
    if sys.getfilesystemencoding() == "ascii":  # UTF-8 holds all that ASCII does
        os.environ["PYTHONUTF8"] = "1"  # for kernels
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
