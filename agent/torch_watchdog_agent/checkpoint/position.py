"""Where the training loop stands in its data: the part of a checkpoint that lets the order of the data go on exactly.

Owns the words and their form on disk; how a loader is brought there is the loader hook's business. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from torch_watchdog_agent.checkpoint.rng import RngState


@dataclass(slots=True, eq=False)
class Ending:
    """Of one pass, each counted in its batches: when the training had last made something of one, when its iterator was let go, and when its loop was seen to
    have done with it.

    `is_whole`: because there were no more. `usual`: what the pass before it came to, `used` and `over_at`, where its loop was done with that before its end,
    and with a batch that it did not use: at its next batch nobody sees then that this pass is over.
    """

    used: int = 0
    left_at: int | None = None
    over_at: int | None = None
    is_whole: bool = False
    usual: tuple[int, int] | None = None

    def behind(self, batches: int, *, left: bool = False) -> int | None:
        """When the loop was done with it, where it trained on nothing behind so many; None where the pass ends there by itself, or nobody knows. `left`: what
        let it go was its loop."""
        over_at = self.left_at if left else self.over_at
        if over_at is None and self.usual is not None and self.usual[0] == batches:
            return self.usual[1]
        is_certain = over_at is not None and self.used <= batches and not (self.is_whole and over_at <= batches)
        return over_at if is_certain else None


class Place(NamedTuple):
    """All but the generators of a `LoaderPosition`: noted at the start of every window, so it costs little. `ending`: of the pass, which comes later."""

    epoch: int
    batches: int
    rng_at_iter: RngState | None
    in_turn: bool = False
    count_at_iter: int | None = None
    ending: Ending | None = None
    sampler_epoch: int | None = None
    evaluates_first: bool = False

    def with_generators(self, rng: RngState, *, left: bool = False) -> LoaderPosition:
        """`left`: the loop itself has let go of the pass."""
        over_at = None if self.ending is None else self.ending.behind(self.batches, left=left)
        return LoaderPosition(
            epoch=self.epoch, batches=self.batches, rng_at_iter=self.rng_at_iter, rng=rng, in_turn=self.in_turn, count_at_iter=self.count_at_iter,
            over_at=over_at, sampler_epoch=self.sampler_epoch, evaluates_first=self.evaluates_first,
        )  # fmt: skip


START = Place(0, 0, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPosition:
    """`batches` of epoch `epoch` were consumed (by a committed or a vetoed update).

    `rng_at_iter`: what the generators, the loader's own among them, were when the epoch's iterator was made (the shuffle and the workers' seeds come from
    it), None where no loader was seen; `count_at_iter`: how many passes a loader that counts them had seen then. `rng`: what the generators are at the
    boundary, before the next batch is asked for. `in_turn`: the training took batches from another pass between those of this one, so that no single place
    tells how it goes on. `over_at`: behind this place the loop has trained on nothing of the pass, and had done with it once so many batches of it had come.
    `sampler_epoch`: what the sampler had been told by `set_epoch()` when the iterator was made. `evaluates_first`: the script had evaluated before it trained.
    """

    epoch: int
    batches: int
    rng_at_iter: RngState | None
    rng: RngState
    in_turn: bool = False
    count_at_iter: int | None = None
    over_at: int | None = None
    sampler_epoch: int | None = None
    evaluates_first: bool = False

    def to_parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split into (JSON-able dict, tensors by name)."""
        plain: dict[str, Any] = {"epoch": self.epoch, "batches": self.batches, "in_turn": self.in_turn, "rng_at_iter": None}
        plain |= {"count_at_iter": self.count_at_iter, "over_at": self.over_at, "sampler_epoch": self.sampler_epoch}
        plain["evaluates_first"] = self.evaluates_first
        plain["rng"], tensors = self.rng.to_parts("position.rng")
        if self.rng_at_iter is not None:
            plain["rng_at_iter"], more = self.rng_at_iter.to_parts("position.rng_at_iter")
            tensors |= more
        return plain, tensors

    @classmethod
    def from_parts(cls, plain: Mapping[str, Any], tensors: Mapping[str, Any]) -> Self:
        """The inverse of `to_parts`."""
        at_iter = plain["rng_at_iter"]
        return cls(
            epoch=plain["epoch"],
            batches=plain["batches"],
            rng_at_iter=None if at_iter is None else RngState.from_parts("position.rng_at_iter", at_iter, tensors),
            rng=RngState.from_parts("position.rng", plain["rng"], tensors),
            in_turn=plain.get("in_turn", False),
            count_at_iter=plain.get("count_at_iter"),
            over_at=plain.get("over_at"),
            sampler_epoch=plain.get("sampler_epoch"),
            evaluates_first=plain.get("evaluates_first", False),
        )
