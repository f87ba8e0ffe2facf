"""Ends a process when its parent is gone: killed, say, without a chance to tell.

Every kernel of a run loads this as an IPython extension. ipykernel's own watcher leaves behind what the
kernel has started, and waits for process 1 to be its parent, which that never becomes where a session manager
takes orphans in.
"""

import os
import signal
import threading
import time


def end_with(parent: int) -> None:
    """Watch the process `parent`, in a thread of its own; when it is no longer the parent, end at once."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if os.getpgrp() == os.getpid():  # a kernel leads its group: what it started ends too
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def load_ipython_extension(_shell: object) -> None:
    end_with(int(os.environ["JPY_PARENT_PID"]))
