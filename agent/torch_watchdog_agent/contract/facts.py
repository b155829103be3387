"""What is known about one violation, and the line that says it; the causes are in causes.py.

Owns the evidence: what the tensor holds, what the batches before held, and the tokenizers of this process. Works after a failure only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_watchdog_agent.contract.findings import Past
from torch_watchdog_agent.contract.rules import Rule
from torch_watchdog_agent.living import instances
from torch_watchdog_proto.messages import BatchFact, BoundFact
from torch_watchdog_proto.names import spoken

__all__ = ["Facts", "needed_dtype", "range_words", "summary", "tokenizer_sizes", "usable_length"]

MANY = 1000  # one bad value in so many is a lone one


def usable_length(length: int, reached: int, last: int) -> int:
    """How long a sequence may be whose positions reach `reached` where the table ends at `last`: positions need not begin at 0."""
    return max(1, length - (reached - last)) if reached > last else last + 1


@functools.cache
def tokenizer_sizes() -> tuple[int, ...]:
    """Sizes of the tokenizers that live in this process: what the first failure finds counts."""
    found = instances("transformers.tokenization_utils_base", "PreTrainedTokenizerBase")
    return tuple(sorted({len(one) for one in found}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that is known about one violation."""

    kind: str
    fact: BatchFact
    bound: BoundFact | None
    leaves: Mapping[str, torch.Tensor]
    rule: Rule | None
    past: Past | None = None
    tokenizer_sizes: Callable[[], tuple[int, ...]] = tuple

    @property
    def tensor(self) -> torch.Tensor:
        return self.leaves[self.fact.key]

    @property
    def value(self) -> Any:
        return self.fact.value

    @property
    def name(self) -> str:
        """The last word of the path."""
        return self.fact.key.rpartition(".")[2].lower()

    @property
    def op(self) -> str:
        return self.bound.op if self.bound is not None else ""

    @property
    def module(self) -> str:
        return (self.bound.module or "") if self.bound is not None else ""

    @property
    def rows(self) -> int:
        """The length of the table."""
        return int(self.bound.high) + 1 if self.bound is not None and isinstance(self.bound.high, int) else 0

    @property
    def spoken(self) -> str:
        return spoken(self.fact.key)

    @property
    def cell(self) -> str:
        return self.spoken + (f"[{','.join(map(str, self.fact.element))}]" if self.fact.element else "")

    @property
    def needed(self) -> int:
        """Rows that would hold the largest value in the tensor."""
        return int(self.tensor.max()) + 1

    @property
    def outside(self) -> int:
        """How many values of the tensor are past the end of the range that the offending one is past; the other end may be none of this use's."""
        bound, value = self.bound, self.value
        if bound is None or not isinstance(bound.low, int) or not isinstance(value, int):
            return 0
        bad = self.tensor < bound.low if value < bound.low else self.tensor > bound.high
        for ignored in bound.ignored:
            bad &= self.tensor != ignored
        return int(bad.sum())

    @property
    def lone(self) -> bool:
        """Hardly a value of this batch is bad, and none was in the batches before."""
        return self.past is not None and self.past.batches > 1 and self.outside <= max(1, self.tensor.numel() // MANY)

    @property
    def evidence(self) -> str:
        """How many values are bad, and what the batches before had."""
        count = self.outside
        told = (
            f"{count} of {self.tensor.numel()} values {'is' if count == 1 else 'are'} outside {range_words(self.bound)}"
            if self.bound
            else ""
        )
        if self.past is not None:
            before = "the batch before" if self.past.batches == 1 else f"the {self.past.batches} batches before"
            told += f"; {before} held values {self.past.low}..{self.past.high}"
        return told

    def bad_cells(self) -> torch.Tensor:
        """Cells of the tensor that hold the offending value."""
        return self.tensor == self.value


def summary(facts: Facts) -> str:
    where = f"{facts.op}{f' ({facts.module})' if facts.module else ''}"
    fact, bound = facts.fact, facts.bound
    more = f" ({fact.count} cells)" if fact.count and fact.count > 1 else ""
    if facts.kind == "batch.not_finite":
        return f"{facts.cell} is {fact.value}{more}: not finite before the model has touched it"
    if facts.kind == "batch.dtype":
        return f"{facts.spoken} has dtype {fact.dtype}; {where} needs {needed_dtype(facts)}"
    if facts.kind == "batch.device":
        return f"{facts.spoken} is on device {fact.device}; {where or 'the training'} had it on {_usual(facts)}"
    if facts.kind == "batch.size_outlier":
        return f"{facts.spoken} {list(fact.shape)} has {facts.tensor.numel()} elements, the largest batch so far had {bound.high if bound else '?'}"
    if facts.kind == "batch.empty":
        return f"{facts.cell}: nothing is left for {where}"
    if fact.derived is not None and bound is not None:
        allowed = f", allowed {range_words(bound)}" if bound.low is not None or bound.high is not None else ""
        return f"{facts.cell} gives {fact.derived.expression} = {fact.derived.value}{more}{allowed} in {where}"
    taker = "as declared" if facts.op == "declared" else f"in {where}"
    return f"{facts.cell} = {fact.value}{more}, allowed {range_words(bound)} {taker}" if bound is not None else facts.cell


def range_words(bound: BoundFact) -> str:
    ignored = "".join(f" or {value}" for value in bound.ignored)
    return f"{bound.low}..{'' if bound.high is None else bound.high}{ignored}"


def _usual(facts: Facts) -> str:
    return facts.bound.learned_from.removeprefix("always ").removesuffix(" so far") if facts.bound is not None else "another one"


def needed_dtype(facts: Facts) -> str:
    return "a floating-point dtype" if "binary_cross_entropy" in facts.op or "bce" in facts.op else _usual(facts)
