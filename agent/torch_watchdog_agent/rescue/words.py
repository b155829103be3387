"""What an exception says of a failure: which of its chain was the failure, and where in the user's code it arose.

Owns that judgement over one exception object; knows no rank, no socket and no torch.
"""

from __future__ import annotations

import re
import signal
import sysconfig
import traceback
from collections.abc import Sequence
from opcode import opmap
from pathlib import Path
from types import TracebackType

from torch_watchdog_agent.errors import text_of
from torch_watchdog_agent.rescue.stores import is_of_own_store

__all__ = ["Words", "innermost_own", "is_interrupt", "words_of"]

MAX_CHAIN = 12
MAX_TEXT = 500
_ASK_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Raised to be caught: a failure that comes while one of these is handled is the first, not the second.
_BENIGN = (StopIteration, StopAsyncIteration, GeneratorExit, KeyError, AttributeError, IndexError, ImportError, FileNotFoundError)
_INSTALLED = (*(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")), str(Path(__file__).parent.parent))
# torch raises in the rank what a worker of its loader (or a replica) has raised, with that one's traceback as the text.
_IN_WORKER = re.compile(r"\W?Caught \w+ in (?P<worker>[^\n]+?)\.?(?:\n|$)")
_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_INSTALLED_ELSEWHERE = re.compile(r"/(site|dist)-packages/")  # PYTHONPATH, an environment on top of another
_OF_TORCH = ("torch", __name__.partition(".")[0])  # ours stand between the script and torch
_OF_DATA = "torch.utils.data."  # what calls a data set


class Words:
    """`text`: the exception that was the failure; `chain`: it and those that followed from it; `where`: `file:line` of the user's code; `by_itself`: as in
    Failed."""

    __slots__ = ("by_itself", "chain", "text", "where")

    def __init__(self, errors: list[BaseException]) -> None:
        self.chain = tuple(_line(error) for error in errors)
        self.text, self.where = self.chain[0], _where(errors[0])
        self.by_itself = _is_by_itself(errors[0]) or is_of_own_store(errors[0])
        if isinstance(errors[0], KeyboardInterrupt) and not is_interrupt(errors[0]):
            self.text = f"a {self.text} that the script itself raised"


def words_of(error: BaseException) -> Words:
    """The first failure is the innermost: what is raised while another is handled, or in a `finally`, follows from that one."""
    errors, current = [error], _behind(error)
    while current is not None and current not in errors and len(errors) < MAX_CHAIN:
        errors.insert(0, current)
        current = _behind(current)
    return Words(errors)


def is_interrupt(error: BaseException) -> bool:
    """Whether it is the KeyboardInterrupt of a SIGINT, as far as is known: not one that a `raise` of the script's own has made, where nothing else in it
    hears of signals."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    one: BaseException | None = error
    for _ in range(MAX_CHAIN):
        if isinstance(one, KeyboardInterrupt) and not _is_raised_by_script(one):
            return True
        one = None if one is None else one.__cause__ or one.__context__
    return any(_is_the_scripts(signal.getsignal(number)) for number in _ASK_TO_END)


def _is_raised_by_script(error: BaseException) -> bool:
    """Python's handler of a signal raises wherever that comes, which is at no `raise`."""
    at = _innermost(error)
    if at is None or _is_installed(at.tb_frame.f_code.co_filename):
        return False
    return at.tb_frame.f_code.co_code[at.tb_lasti] == opmap["RAISE_VARARGS"]


def _is_the_scripts(handler: object) -> bool:
    by = getattr(handler, "__module__", None) or ""
    return callable(handler) and handler is not signal.default_int_handler and not by.startswith(__name__.partition(".")[0])


def _is_by_itself(error: BaseException) -> bool:
    """Whether torch has not raised it: neither in Python nor in C++, which raises in the frame that called it, and by torch's or Python's own types only."""
    kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__ if kind not in Exception.__mro__}
    at = _innermost(error)
    if at is None or "torch" in kinds:
        return at is None and isinstance(error, SystemExit)  # one that is only asked for, by the script
    module = str(at.tb_frame.f_globals.get("__name__"))
    if module.partition(".")[0] in _OF_TORCH and not module.startswith(_OF_DATA):
        return False
    return type(error).__module__ != "builtins" or at.tb_frame.f_code.co_code[at.tb_lasti] == opmap["RAISE_VARARGS"]


def _innermost(error: BaseException) -> TracebackType | None:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at


def _is_installed(path: str) -> bool:
    return path.startswith((*_INSTALLED, "<")) or _INSTALLED_ELSEWHERE.search(path) is not None


def _behind(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None:
        return error.__cause__
    context = error.__context__
    return None if isinstance(context, _BENIGN) else context


def _line(error: BaseException) -> str:
    lines = text_of(error).strip().splitlines()
    if lines and (caught := _IN_WORKER.match(lines[0])) is not None:
        return f"{_first_of_its_own(lines) or type(error).__name__} (in {caught['worker']})"[:MAX_TEXT]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:MAX_TEXT].rstrip(": ")


def _first_of_its_own(lines: Sequence[str]) -> str:
    """Of a text that ends with a traceback: the line behind its last frame, with which the exception's own words begin. They may have lines of their own."""
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    own = (line.strip() for line in lines[frames[-1] + 1 if frames else 1 :] if not line.startswith(" "))
    return next(own, lines[-1].strip() if len(lines) > 1 else "")


def _where(error: BaseException) -> str:
    text = text_of(error)
    if _IN_WORKER.match(text):
        theirs = [traceback.FrameSummary(found["file"], int(found["line"]), "") for found in _FRAME.finditer(text)]
        if theirs:
            return innermost_own(theirs)
    return innermost_own(traceback.extract_tb(error.__traceback__))


def innermost_own(frames: Sequence[traceback.FrameSummary]) -> str:
    """`file:line` of the innermost frame that is not of an installed library; of the innermost of all where there is none."""
    own = [frame for frame in frames if not _is_installed(frame.filename)]
    last = next(iter(reversed(own or frames)), None)
    return "" if last is None else f"{last.filename}:{last.lineno}"
