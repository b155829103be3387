"""Why the newest batch gave a loss that is no number: said once, while the parameters are those that it was computed with.

Owns that it is said once. On the training thread; where in the model it began is `contract/inside.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch_watchdog_agent.errors import of_a_signal
from torch_watchdog_proto.messages import KEPT_BATCH, BatchFact, Violation

if TYPE_CHECKING:
    from torch_watchdog_agent.rank import Rank

__all__ = ["NotFinite"]

MAX_SAMPLES = 64  # of a batch, that are told


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
            return
        try:
            kept = self._kept()
        except Exception as error:  # a full disk, a dtype that the format does not know: the training goes on
            if of_a_signal(error):
                raise
            rank.say(f"the batch of a loss that is not finite could not be kept ({type(error).__name__}: {error})")
        else:
            if kept is not None:
                rank.notice(kept)

    def _kept(self) -> Violation | None:
        """The batch itself and its samples, for the incident of this loss; None where it is not certain that the loss is this batch's doing: a scaler
        may find its way, the loop is ahead of its steps, or the weights are broken, by another rank's batch.
        """
        rank = self._rank
        if rank.history.scale_is_known or rank.guard.ahead or not rank.history.loss_is_of_newest or _are_broken(rank.subjects.models()):
            return None
        origin = rank.guard.handed
        samples = [index for index in (origin.indices if origin is not None else None) or () if isinstance(index, int)]
        bundle = rank.rescuer.batches.write_held(rank.loop.step)
        if not samples and not bundle:
            return None
        fact = BatchFact(key="", also=({"samples": samples[:MAX_SAMPLES]},))
        return Violation(kind=KEPT_BATCH, summary="", cause="", fix="", batch=fact, severity="warning", repairable=False, bundle=bundle)


def _are_broken(models: Iterable[Any]) -> bool:
    """Whether any weight that lies here is not finite. Of a sharded one what this rank holds: what goes through a collective would hang the others."""
    import torch

    with torch.no_grad():
        for model in models:
            for weight in model.parameters():
                own = getattr(weight, "_local_tensor", weight)
                if own.is_floating_point() and own.untyped_storage().size() and not bool(torch.isfinite(own).all()):
                    return True
    return False
