"""Whether the script ends by an exit with a bad status: known at interpreter exit, seconds before the process is gone.

Owns that question. No hook of Python's sees a SystemExit, and one that is raised may be caught: that the script's outermost frame was left by an
exception, and not by its end, tells that it was not. Holds neither the exception nor a frame of the training: what these hold goes when the script says.
"""

from __future__ import annotations

import builtins
import functools
import opcode
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch_watchdog_agent.rescue.words import Words, innermost_own, words_of

__all__ = ["Ending", "hear_exits"]


class Ending:
    """Of the script on whose thread this is made. `batches`: how many it has used so far; an exit after which it used more was caught."""

    def __init__(self) -> None:
        self._outermost: FrameType | None = _outermost(sys._getframe())
        self._asked: tuple[int, SystemExit, Words] | None = None

    def exit_asked(self, status: object, *, batches: int) -> SystemExit | None:
        """The script calls for an exit. Returns what stands for it, where the status is a bad one."""
        context, error = sys.exception(), SystemExit(status)
        self._asked = None
        if status is None or status == 0 or isinstance(context, KeyboardInterrupt):
            return None
        error.__context__ = context
        words = words_of(error)
        error.__context__ = None  # with its frames
        words.where = words.where or innermost_own(traceback.extract_stack())
        self._asked = batches, error, words
        return error

    def taken(self, *, batches: int) -> tuple[SystemExit, Words] | None:
        """At interpreter exit: the exit that has ended the script. Asked for once."""
        frame, asked = self._outermost, self._asked
        self._outermost = self._asked = None
        if frame is None or asked is None or asked[0] != batches or _came_to_its_end(frame):
            return None
        return asked[1:]

    def forget(self) -> None:
        """An exception that is no exit has ended the script."""
        self._outermost = self._asked = None


def hear_exits(asked: Callable[[object], object]) -> None:
    """`sys.exit`, and `exit` and `quit` of the builtins, say their status before they do what they do."""
    theirs, quitter = sys.exit, type(builtins.exit)

    @functools.wraps(theirs)
    def leave(status: Any = None, /) -> Any:
        asked(status)
        theirs(status)

    sys.exit = leave
    if quitter.__module__ == "_sitebuiltins":  # not that of a shell
        quitter.__call__ = _saying(quitter.__call__, asked)  # type: ignore[method-assign]


def _saying(theirs: Callable[..., Any], asked: Callable[[object], object]) -> Any:
    @functools.wraps(theirs)
    def call(self: Any, code: Any = None) -> Any:
        asked(code)
        return theirs(self, code)

    return call


def _outermost(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _came_to_its_end(frame: FrameType) -> bool:
    return opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
