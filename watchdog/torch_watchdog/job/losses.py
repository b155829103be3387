"""Waits until it can be said which rank's loss was the first that is no number.

Owns what was reported of one attempt; the judgement is `rules/loss.py`. Fires once an attempt. Pure: `now` is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch_watchdog.rules.limits import LossLimits, limits_of
from torch_watchdog.rules.loss import Divergence, NotFinite, first_of, not_finite, patience_s, training_losses
from torch_watchdog_proto.messages import StepBlock

__all__ = ["LossWatch"]


class LossWatch:
    """One attempt's losses that are NaN or infinite. `rules`: thresholds that the launch changes."""

    def __init__(self, rules: Mapping[str, Any]) -> None:
        self._in_a_row = limits_of(LossLimits, rules).in_a_row
        self._found: list[NotFinite] = []
        self._since: float | None = None
        self._fired = False
        self._patience_s = patience_s(0)
        self._scaled: set[int] = set()  # ranks with a GradScaler
        self._rows: dict[int, list[NotFinite]] = {}  # rank -> losses that are no numbers, one after the other, under a GradScaler

    @property
    def deadline(self) -> float | None:
        return None if self._since is None or self._fired else self._since + self._patience_s

    def see(self, block: StepBlock, now: float) -> None:
        if block.scale and block.scale[-1] > 0:
            self._learn_of_scaler(block.rank)
        found = () if self._fired else not_finite(block) if block.rank not in self._scaled else self._that_stay(block)
        if found:
            # The earliest of each block is enough: a diverged training has nothing else to tell, for as long as it runs.
            self._found.append(min(found))
            self._since = now if self._since is None else self._since

    def _learn_of_scaler(self, rank: int) -> None:
        """Where losses come late, the first norms come before the word that a scaler will look at them: then they are its own matter."""
        if rank in self._scaled:
            return
        self._scaled.add(rank)
        self._found = [one for one in self._found if one.rank != rank]
        self._since = self._since if self._found else None

    def verdict(self, seen_steps: Mapping[int, int | None], *, now: float, at_end: bool) -> Divergence | None:
        """The first, once; None while an earlier one may still be reported. `seen_steps`: how far each rank has reported."""
        if self._since is None or self._fired:
            return None
        self._patience_s = patience_s(len(seen_steps))
        first = first_of(self._found, seen_steps=seen_steps, waited_s=self._patience_s if at_end else now - self._since)
        self._fired = first is not None
        return first

    def _that_stay(self, block: StepBlock) -> Sequence[NotFinite]:
        """Losses of which so many in a row are no numbers that the scaler will not find a way: from the first of that row on."""
        found: list[NotFinite] = []
        row = self._rows.setdefault(block.rank, [])
        if not row and math.isfinite(sum(block.loss)):
            return ()  # nearly all of them
        for loss in training_losses(block):
            if math.isfinite(loss.loss):
                row.clear()
            elif len(row) < self._in_a_row:
                row.append(loss)
            if len(row) == self._in_a_row:
                found = found or list(row)
        return found
