"""Whether the training is over while its script goes on: the script has left the loop in which the last step was, nothing leads back into it, and nothing
that follows names what was called there, as a second stage in a loop of its own would.

Owns where that step was made. Places are those of the bytecode: frame by frame, what the code calls, and what can follow on it without an exception. It must
not know batches, epochs or orders.
"""

from __future__ import annotations

import bisect
import dis
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import TypeAlias

__all__ = ["LoopEnd"]

Place: TypeAlias = list[tuple[CodeType, int]]  # what is called where, the innermost first

_RETURN = frozenset({"RETURN_VALUE", "RETURN_CONST"})
_NEVER_GO_ON = _RETURN | {"RAISE_VARARGS", "RERAISE", "INTERPRETER_EXIT"}
_ALWAYS_JUMP = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"})
_BESIDE_THE_CALLED = frozenset({dis.opmap["EXTENDED_ARG"], dis.opmap["PUSH_NULL"], *dis.hasconst})  # the names of keywords are constants
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


class LoopEnd:
    """`stepped` runs in each step, on the thread that trains; `is_over` on any thread."""

    def __init__(self) -> None:
        self._last: Place = []
        self._thread = 0

    def stepped(self) -> None:
        """The update at hand is done."""
        last: Place = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            last.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        self._last, self._thread = last, threading.get_ident()

    def is_over(self) -> bool:
        """False also where that cannot be told: in an evaluation of the loop's, in a script that calls its training in a loop, or may call it again, after no
        step.
        """
        last, frame = self._last, sys._current_frames().get(self._thread)
        now: Place = []
        while frame is not None:
            now.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        now.reverse()
        names = set[str]()  # of what was called there, and around it: a function may call itself for the next stage
        for depth, ((code, then), (at, here)) in enumerate(zip(reversed(last), now, strict=False)):
            if code is not at:
                return False
            ways = _Ways(code)
            called = ways.called(then)
            if called is None:
                return False
            names.add(called)
            if ways.lead(here, then) or ways.name(here, names):
                return False
            if ways.at(here) != ways.at(then):
                return ways.end(here) and not any(_Ways(inner).name(where, names) for inner, where in now[depth + 1 :])
        return False


class _Ways:
    """What may follow on what, in one code."""

    def __init__(self, code: CodeType) -> None:
        self._instructions = list(dis.get_instructions(code))
        self._offsets = [one.offset for one in self._instructions]
        self._next: dict[int, list[int]] = {}
        for one, after in zip(self._instructions, [*self._instructions[1:], None], strict=True):
            nexts = [int(one.argval)] if one.opcode in _JUMPS else []
            if after is not None and one.opname not in _NEVER_GO_ON and one.opname not in _ALWAYS_JUMP:
                nexts.append(after.offset)
            self._next[one.offset] = nexts

    def at(self, lasti: int) -> int:
        """The instruction of that place: a frame that waits in a call of Python's may stand in the caches behind it."""
        return self._offsets[self._index(lasti)]

    def lead(self, here: int, there: int) -> bool:
        """Whether what follows on the call at `here` may come to that at `there`; of one and the same, whether it may come again."""
        return self.at(there) in self._following(here)

    def end(self, here: int) -> bool:
        """Whether what follows on `here` may come to an end: a rank that hangs may stand in a loop of its script's that has none."""
        return any(self._instructions[self._index(at)].opname in _RETURN for at in self._following(here))

    def name(self, here: int, names: set[str]) -> bool:
        """Whether what follows on the call at `here` may load what has one of the names, of whatever it is."""
        return any(names & _loaded(self._instructions[self._index(at)]) for at in self._following(here))

    def called(self, there: int) -> str | None:
        """The last name of what is called at `there`, `fit` of `trainer.fit(model)`: what starts where the call does, and ends before it. None: it has none."""
        index = self._index(there)
        call, called = self._instructions[index], None
        if not call.opname.startswith("CALL") or None in (start := _start(call)):
            return None
        for one in self._instructions[:index]:
            if _start(one) == start and _end(one) != _end(call) and one.opcode not in _BESIDE_THE_CALLED:
                called = one
        return next(iter(_loaded(called)), None) if called is not None else None

    def _index(self, lasti: int) -> int:
        return bisect.bisect_right(self._offsets, lasti) - 1

    def _following(self, here: int) -> Iterator[int]:
        seen, ahead = set[int](), list(self._next[self.at(here)])
        while ahead:
            at = ahead.pop()
            if at not in seen:
                seen.add(at)
                ahead += self._next[at]
                yield at


def _start(one: dis.Instruction) -> tuple[int | None, int | None]:
    return (one.positions.lineno, one.positions.col_offset) if one.positions else (None, None)


def _end(one: dis.Instruction) -> tuple[int | None, int | None]:
    return (one.positions.end_lineno, one.positions.end_col_offset) if one.positions else (None, None)


def _loaded(one: dis.Instruction) -> frozenset[str]:
    """From Python 3.13 on one instruction may load two; what a lambda or a comprehension loads counts from where it is made."""
    if isinstance(one.argval, CodeType):
        return frozenset().union(*map(_loaded, dis.get_instructions(one.argval)))
    if "LOAD" not in one.opname or one.opcode in dis.hasconst:
        return frozenset()
    return frozenset(name for name in (one.argval if isinstance(one.argval, tuple) else (one.argval,)) if isinstance(name, str))
