"""Why the newest batch gave a loss that is no number: said once, while the parameters are those that it was computed with.

Owns that it is said once. On the training thread; where in the model it began is `contract/inside.py`'s.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_watchdog_agent.rank import Rank

__all__ = ["NotFinite"]


class NotFinite:
    """One rank's."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._is_told = rank, False

    def look(self, value: float | None) -> None:
        """`value` of the newest loss; None where it is not known yet."""
        rank = self._rank
        if value is None or math.isfinite(value):
            if value is not None and rank.config.watch_modules:
                rank.guard.loss_is_finite()
            return
        if self._is_told:
            return
        from torch_watchdog_agent.checkpoint.rng import RngState

        self._is_told = True
        before = RngState.capture()
        try:
            found = rank.guard.not_finite_inside()
        finally:
            before.restore()
        if found is not None:
            rank.notice(replace(found, bundle=rank.rescuer.batches.write_bundle(rank.loop.step)))
