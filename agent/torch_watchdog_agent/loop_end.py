"""Whether the training is over while its script goes on: the script has left the loop in which the last step was, and nothing leads back into it.

Owns where that step was made. Places are those of the bytecode: frame by frame, what the code calls, and what can follow on it without an exception. It must
not know batches, epochs or orders.
"""

from __future__ import annotations

import bisect
import dis
import sys
import threading
from types import CodeType, FrameType
from typing import TypeAlias

__all__ = ["LoopEnd"]

Place: TypeAlias = list[tuple[CodeType, int]]  # what is called where, the innermost first

_NEVER_GO_ON = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "INTERPRETER_EXIT"})
_ALWAYS_JUMP = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"})
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
        """False also where that cannot be told: in an evaluation of the loop's, in a script that calls its training in a loop, after no step."""
        last, frame = self._last, sys._current_frames().get(self._thread)
        now: Place = []
        while frame is not None:
            now.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        for (code, then), (at, here) in zip(reversed(last), reversed(now), strict=False):
            if code is not at:
                return False
            ways = _Ways(code)
            if ways.lead(here, then):
                return False
            if ways.at(here) != ways.at(then):
                return True
        return False


class _Ways:
    """What may follow on what, in one code."""

    def __init__(self, code: CodeType) -> None:
        instructions = list(dis.get_instructions(code))
        self._offsets = [one.offset for one in instructions]
        self._next: dict[int, list[int]] = {}
        for one, after in zip(instructions, [*instructions[1:], None], strict=True):
            nexts = [int(one.argval)] if one.opcode in _JUMPS else []
            if after is not None and one.opname not in _NEVER_GO_ON and one.opname not in _ALWAYS_JUMP:
                nexts.append(after.offset)
            self._next[one.offset] = nexts

    def at(self, lasti: int) -> int:
        """The instruction of that place: a frame that waits in a call of Python's may stand in the caches behind it."""
        return self._offsets[bisect.bisect_right(self._offsets, lasti) - 1]

    def lead(self, here: int, there: int) -> bool:
        """Whether what follows on the call at `here` may come to that at `there`; of one and the same, whether it may come again."""
        seen, ahead, sought = set[int](), list(self._next[self.at(here)]), self.at(there)
        while ahead:
            at = ahead.pop()
            if at == sought:
                return True
            if at not in seen:
                seen.add(at)
                ahead += self._next[at]
        return False
