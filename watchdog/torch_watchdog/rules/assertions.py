"""Device-side assertions: from the line that the CUDA runtime prints to what it means, and which element it was where the kernel's formula is known.

Owns the form of that line and of the catalogue (knowledge/kernel_asserts.tsv), and the small language of its formulas. Pure: texts in, words out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["Assertion", "Catalogue"]

_LINE = re.compile(
    r"(?P<file>\S+\.(?:cu|cuh|h|cpp|hip|cc)):(?P<line>\d+): (?P<function>.+?): block: \[(?P<block>\d+,\d+,\d+)\], "
    r"thread: \[(?P<thread>\d+,\d+,\d+)\] Assertion `(?P<text>.*?)` failed\."
)
_COLUMNS = 12
_TERM = re.compile(r"(block|thread)\.([xyz])(?:\*(\d+))?|(\d+)")
_STRIDE = re.compile(r"\s*\+\s*(?:\d+|T)\*k\b.*")  # one thread looks at several elements, one stride apart: the first is the least
_MAX_LINES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    file: str
    kernel: str
    assertion: str
    op: str
    meaning: str
    tensor: str
    valid: str
    element: str
    cause: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Assertion:
    """One assertion of one kernel. `position` is what the kernel's formula gives for the first line, `position_of` what it counts; None: not known.

    Not `exact`: that one, or one that comes a stride or more after it.
    """

    kernel: str
    text: str
    file: str
    line: int
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    num_lines: int
    meaning: str = "an assertion of a kernel that is not in the catalogue"
    op: str = ""
    tensor: str = "-"
    valid: str = "-"
    cause: str = ""
    fix: str = ""
    formula: str = ""
    position: int | None = None
    position_of: str = ""
    exact: bool = True

    def facts(self) -> dict[str, Any]:
        """For the incident's evidence."""
        return {
            "kernel": self.kernel, "expression": self.text, "source": f"{self.file}:{self.line}", "block": list(self.block),
            "thread": list(self.thread), "lines": self.num_lines, "op": self.op, "meaning": self.meaning, "tensor": self.tensor,
            "allowed": self.valid, "formula": self.formula, "element": self.position, "element_of": self.position_of,
            "exact": self.exact,
        }  # fmt: skip

    @property
    def element_text(self) -> str:
        later = "" if self.exact else " (or a stride after it)"
        return "" if self.position is None else f"; {self.position_of} {self.position} of {self.tensor}{later}"


class Catalogue:
    """The known assertions, most special first, as the file has them."""

    def __init__(self, entries: Sequence[_Entry] = ()) -> None:
        self._entries = entries

    @classmethod
    def from_text(cls, text: str) -> Self:
        rows = [line.split("\t") for line in text.splitlines()[1:] if line]
        return cls([_entry(row) for row in rows if len(row) == _COLUMNS])

    def read(self, log: str) -> Assertion | None:
        """The first assertion in what a rank printed, or None."""
        found = [match for line in log.splitlines()[:_MAX_LINES] if (match := _LINE.search(line))]
        if not found:
            return None
        first = found[0]
        kernel = kernel_name(first["function"])
        plain = Assertion(
            kernel=kernel, text=first["text"], file=first["file"], line=int(first["line"]), num_lines=len(found),
            block=_triple(first["block"]), thread=_triple(first["thread"]),
        )  # fmt: skip
        entry = next((entry for entry in self._entries if _is(entry, plain)), None)
        return plain if entry is None else _explained(plain, entry)


def kernel_name(function: str) -> str:
    """`void at::native::gather_kernel<long, 4>(...) [with ...]` -> `gather_kernel`; a lambda stays `operator()`."""
    plain = function.partition(" [with")[0]
    if "operator()" in plain:
        return "operator()"
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", plain)) != plain:
        plain = shorter
    return plain.split()[-1].rpartition("::")[2] if plain.split() else function


def _entry(row: Sequence[str]) -> _Entry:
    file, kernel, assertion, op, meaning, tensor, valid, element, cause, fix, _, _ = row
    return _Entry(
        file=file, kernel=kernel, assertion=assertion, op=op, meaning=meaning, tensor=tensor, valid=valid, element=element, cause=cause, fix=fix
    )  # fmt: skip


def _is(entry: _Entry, found: Assertion) -> bool:
    same_text = _matches(entry.assertion[3:], found.text) if entry.assertion.startswith("re:") else entry.assertion == found.text
    return same_text and _matches(entry.kernel, found.kernel) and _same_file(entry.file, found.file)


def _matches(pattern: str, text: str) -> bool:
    try:
        return re.fullmatch(pattern, text) is not None
    except re.error:
        return pattern == text


def _same_file(known: str, found: str) -> bool:
    """The printed path begins with that of the machine which built torch. A file that the catalogue does not tell fits all."""
    name = known.rpartition("/")[2]
    return not name.endswith((".cu", ".cuh", ".h")) or found.endswith(f"/{name}") or found == name


def _explained(plain: Assertion, entry: _Entry) -> Assertion:
    position, what = _position(entry.element, plain)
    return Assertion(
        kernel=plain.kernel, text=plain.text, file=plain.file, line=plain.line, block=plain.block, thread=plain.thread,
        num_lines=plain.num_lines, meaning=entry.meaning, op=entry.op, tensor=entry.tensor, valid=entry.valid, cause=entry.cause,
        fix=entry.fix, formula="" if entry.element == "-" else entry.element, position=position, position_of=what,
        exact=_STRIDE.search(entry.element.partition(";")[0]) is None,
    )  # fmt: skip


def _position(formula: str, found: Assertion) -> tuple[int | None, str]:
    """What the formula gives, where it needs nothing but block and thread. `block.x*1024 + thread.x; sample (row of the logits)`."""
    expression, _, what = formula.partition(";")
    total, divisor = 0, 1
    expression = _STRIDE.sub("", expression).strip()
    outer = re.fullmatch(r"\((?P<sum>[^()]+)\)(?:\s*//\s*(?P<by>\d+))?(?:\*(?P<times>\d+)\s*\+\s*(?P<plus>\d+))?", expression)
    if outer is not None:
        divisor = int(outer["by"] or 1)
    for term in (outer["sum"] if outer is not None else expression).split("+"):
        match = _TERM.fullmatch(term.strip())
        if match is None:
            return None, ""
        place = {"block": found.block, "thread": found.thread}.get(match[1] or "")
        total += int(match[4]) if place is None else place["xyz".index(match[2])] * int(match[3] or 1)
    total //= divisor
    if outer is not None and outer["times"]:
        total = total * int(outer["times"]) + int(outer["plus"])
    return total, re.split(r"[(;,]", what)[0].strip() or "position"


def _triple(text: str) -> tuple[int, int, int]:
    x, y, z = map(int, text.split(","))
    return x, y, z
