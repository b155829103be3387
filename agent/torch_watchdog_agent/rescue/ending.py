"""Whether the script ends by an exit with a bad status: known at interpreter exit, seconds before the process is gone.

Owns that question. No hook of Python's sees a SystemExit, and one that is raised may be caught. So something is hung on it that says when it is gone: while
the script's outermost frame still runs, it was caught; after that, it has ended the script. Holds neither the exception nor a frame of the training: what
these hold goes when the script says. But what is trained is held while such an exit is under way: a rescue may ask for it behind the script's frames.
"""

from __future__ import annotations

import builtins
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from torch_watchdog_agent.rescue.words import Words, innermost_own, words_of

__all__ = ["Ending", "hear_exits", "hear_ends_at_once"]


class Ending:
    """Of the script on whose thread this is made. `batches`: how many it has used so far; an exit after which it used more was caught."""

    def __init__(self) -> None:
        self._outermost: FrameType | None = _outermost(sys._getframe())
        self._asked: tuple[int, SystemExit, Words] | None = None
        self._has_ended_it = False
        self._held: object = None

    def exit_asked(self, status: object, *, batches: int, holding: Callable[[], object] = lambda: None) -> SystemExit | None:
        """The script calls for an exit. Returns what stands for it, where the status is a bad one. `holding`: gives what is to be there until `let_go`."""
        context, error = sys.exception(), SystemExit(status)
        self._asked = self._held = None
        if status is None or status == 0 or isinstance(context, KeyboardInterrupt):
            return None
        error.__context__ = context
        words = words_of(error)
        error.__context__ = None  # with its frames
        words.where = words.where or innermost_own(traceback.extract_stack())
        self._asked, self._held = (batches, error, words), holding()
        return error

    def gone(self, error: SystemExit) -> None:
        """The exit for which `error` stands is not under way any more."""
        if self._asked is None or self._asked[1] is not error:
            return
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._outermost:
            frame = frame.f_back
        self._has_ended_it = frame is None
        if not self._has_ended_it:
            self._asked = self._held = None

    def status(self) -> int:
        """Of the process, if the script's end is that of the exit under way; 0 where there is none."""
        if self._asked is None or not self._has_ended_it:
            return 0
        code = self._asked[1].code
        return code if isinstance(code, int) else 1

    def taken(self, *, batches: int) -> tuple[SystemExit, Words] | None:
        """At interpreter exit: the exit that has ended the script. Asked for once."""
        asked, has_ended_it = self._asked, self._has_ended_it
        self._outermost = self._asked = None
        return asked[1:] if asked is not None and has_ended_it and asked[0] == batches else None

    def forget(self) -> None:
        """An exception that is no exit has ended the script."""
        self._outermost = self._asked = self._held = None

    def let_go(self) -> None:
        """All that is to be saved has been."""
        self._held = None


class _WhenGone:
    """Hung on an exception: calls back once that is no more."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call()


def hear_exits(asked: Callable[[object], Callable[[], None] | None]) -> None:
    """`sys.exit`, and `exit` and `quit` of the builtins, say their status before they do what they do. What `asked` returns is called when that is over."""
    theirs, quitter = sys.exit, type(builtins.exit)

    @functools.wraps(theirs)
    def leave(status: Any = None, /) -> Any:
        with _said(asked(status)):
            theirs(status)

    sys.exit = leave
    if quitter.__module__ == "_sitebuiltins":  # not that of a shell
        quitter.__call__ = _saying(quitter.__call__, asked)  # type: ignore[method-assign]


def hear_ends_at_once(about_to: Callable[[], object]) -> None:
    """`os._exit` calls `about_to` first: no handler at interpreter exit runs behind it. Whatever comes of that, the process ends with its status."""
    theirs = os._exit

    @functools.wraps(theirs)
    def leave(status: int) -> NoReturn:
        try:
            about_to()
        finally:
            theirs(status)

    os._exit = leave


def _saying(theirs: Callable[..., Any], asked: Callable[[object], Callable[[], None] | None]) -> Any:
    @functools.wraps(theirs)
    def call(self: Any, code: Any = None) -> Any:
        with _said(asked(code)):
            return theirs(self, code)

    return call


@contextmanager
def _said(when_gone: Callable[[], None] | None) -> Iterator[None]:
    try:
        yield
    except SystemExit as error:
        if when_gone is not None:
            error.__dict__["_torch_watchdog"] = _WhenGone(when_gone)
        raise


def _outermost(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame
