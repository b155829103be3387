"""A rule: one use that one consumer makes of the batch, as learned over the traces. Owns when a rule may act alone.

A rule alone proves nothing before it has been right: it may act at hand-over when its limit is certain and nothing in the program looks at the
data first; else its alarm makes the step a traced one, where the consumer itself is checked before it is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_watchdog_agent.contract.bounds import BIG, LiveTable, Range
from torch_watchdog_agent.contract.consumers import Kind
from torch_watchdog_agent.contract.frames import Place
from torch_watchdog_agent.contract.recipe import Recipe
from torch_watchdog_agent.contract.sizes import Shapes, Size, resolved

__all__ = ["LOOKED_AT", "TRACES_FOR_DERIVED", "TRACES_FOR_DIRECT", "Rule"]

TRACES_FOR_DIRECT = 2
TRACES_FOR_DERIVED = 3
UNCONFIRMED_ALLOWED = 2
SELDOM_BATCHES = 1000
AMBIGUOUS_ALLOWED = 24
LOOKED_AT = "the program looks at the data first"


@dataclass(slots=True, kw_only=True, eq=False)
class Rule:
    """One learned limit. `opaque` says why it is not used, `doubt` why it may not act alone.

    `looks`: how the values are computed that the program looks at before the consumer; None where that is not known.
    """

    order: int
    op: str
    arg: str
    kind: Kind
    place: Place
    recipe: Recipe
    low: int
    ignored: int | None
    wraps: bool
    options: Mapping[str, Any]
    rows: Size | int
    live: LiveTable | None
    learned_from: str
    structures: set[Any] = field(default_factory=set)
    traces: int = 0
    unconfirmed: int = 0  # of late
    unconfirmed_at: int = 0
    ambiguous: int = 0
    widened: bool = False  # the recipe is the whole tensor: which part of it is used depends on data
    opaque: str | None = None
    doubt: str | None = None
    looks: tuple[Recipe, ...] | None = ()

    def allowed(self, shapes: Shapes) -> Range:
        """The legal values for a batch of these shapes; AmbiguousSizeError where the readings of the limit disagree."""
        return self.allowed_by(lambda size: resolved(size, shapes))

    def allowed_by(self, resolve: Callable[[Size], int]) -> Range:
        """The legal values where `resolve` says what a size is."""
        rows = self.live.rows() if self.live is not None else self.rows if isinstance(self.rows, int) else resolve(self.rows)
        if rows >= BIG:
            return Range(low=self.low, high=BIG, ignored=self.ignored)
        return Range(low=-rows if self.wraps else self.low, high=rows - 1, ignored=self.ignored)

    @property
    def usable(self) -> bool:
        return self.opaque is None

    @property
    def acts_alone(self) -> bool:
        """Whether its alarm needs no confirmation."""
        return not self.doubt and self._is_sure

    @property
    def acts_unseen(self) -> bool:
        """Whether its alarm needs no confirmation where all that the program looks at first is the same as for a legal batch."""
        return self.doubt == LOOKED_AT and bool(self.looks) and self._is_sure

    @property
    def _is_sure(self) -> bool:
        if self.opaque or self.unconfirmed or self.kind in ("agree", "sum", "reach"):
            return False  # (a program may correct lengths that do not add up before it uses them, and nobody sees it)
        if self.recipe.is_direct and self.live is not None:
            return self.traces >= 1
        if self.recipe.floats or (self.live is not None and not self.live.trained and not self.recipe.is_direct):
            return False  # (a module may make a table of positions longer when a longer batch comes)
        return self.traces >= (TRACES_FOR_DIRECT if self.recipe.is_direct else TRACES_FOR_DERIVED)

    def not_confirmed(self, batch: int) -> None:
        """Its alarm about that batch led to a traced step in which the consumer was content, or was not there. Seldom is no harm: a step costs little."""
        often = self.unconfirmed and batch - self.unconfirmed_at < SELDOM_BATCHES
        self.unconfirmed, self.unconfirmed_at = (self.unconfirmed + 1 if often else 1), batch
        if self.unconfirmed > UNCONFIRMED_ALLOWED:
            self.opaque = "its alarms were not confirmed"

    def not_settled(self, *, met: bool) -> None:
        """Its readings disagreed about a batch. A trace in which it did not even show up settles nothing: then it is soon given up."""
        self.ambiguous += 1 if met else AMBIGUOUS_ALLOWED // 3
        if self.ambiguous > AMBIGUOUS_ALLOWED:
            self.opaque = "its sizes could not be settled"
