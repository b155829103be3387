"""What a rank leaves behind by itself when it ends badly: the stacks of a crash in native code, and exceptions of its other threads.

Owns the two hooks and the file of stacks. Both leave what the script has set up as it is.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["hear_threads", "keep_stacks"]


def keep_stacks(run_dir: Path, rank: int) -> None:
    """A fault in native code writes every thread's Python stack into a file of ours, unless the script has it written elsewhere."""
    if faulthandler.is_enabled():
        return
    path = run_dir / "logs" / f"rank-{rank}.stacks"
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.enable(file=fd, all_threads=True)


def hear_threads(note: Callable[[str, BaseException], None]) -> None:
    """An exception that ends a thread is noted before the script's own hook sees it."""
    theirs = threading.excepthook

    def hook(args: threading.ExceptHookArgs, /) -> None:
        if args.exc_value is not None:
            note(args.thread.name if args.thread is not None else "?", args.exc_value)
        theirs(args)

    threading.excepthook = hook
