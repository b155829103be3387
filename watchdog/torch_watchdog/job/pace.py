"""Which rank left a batch out on its own: it got the batch, and ran no backward from it, while the others ran theirs.

Owns, for one attempt, the steps in which that was so. From then on the ranks average gradients of different steps, silently, until one is done and
the others wait for it. Leaving batches out may be meant: this is evidence for a failure, never a finding by itself. Pure.
"""

from __future__ import annotations

from torch_watchdog_proto.messages import StepBlock

__all__ = ["PaceWatch"]

_MAX_STEPS = 64  # of each rank: the first ones tell


class PaceWatch:
    """One attempt's batches without a backward."""

    def __init__(self) -> None:
        # Rank -> step -> batches; only ranks that have any: a job has thousands that have none.
        self._without: dict[int, dict[int, int]] = {}
        self._seen: dict[int, int] = {}  # rank -> newest step
        self._with: set[int] = set()  # ranks whose backwards are seen at all

    def see(self, block: StepBlock) -> None:
        """What a rank has reported. The loss of a batch is known where its backward was seen."""
        if not block.micro_of_step:
            return
        newest = max(block.micro_of_step)
        self._seen[block.rank] = max(newest, self._seen.get(block.rank, newest))
        if all(block.loss_known):
            self._with.add(block.rank)
            return
        without = self._without.get(block.rank, {})
        for row, (step, known) in enumerate(zip(block.micro_of_step, block.loss_known, strict=False)):
            if known:
                self._with.add(block.rank)
            elif _was_left_out(block, row) and (step in without or len(without) < _MAX_STEPS):
                without[step] = without.get(step, 0) + 1
                self._without[block.rank] = without

    def skipped(self) -> dict[int, int]:
        """The first step in which a rank left out more than another rank did that has been through it: rank -> step."""
        found = {}
        for rank, without in self._without.items():
            if rank not in self._with:
                continue
            first = min((step for step, count in without.items() if self._is_alone(rank, step, count)), default=None)
            if first is not None:
                found[rank] = first
        return found

    def _is_alone(self, rank: int, step: int, count: int) -> bool:
        others = (other for other in self._with if other != rank and self._seen[other] >= step)
        return any(self._without.get(other, {}).get(step, 0) < count for other in others)


def _was_left_out(block: StepBlock, row: int) -> bool:
    """Neither of an evaluation, nor one that the rank ended in: then its tensors are all that was recorded of it, without a time."""
    return not (block.evaluation and block.evaluation[row]) and bool(block.micro_time_ns and block.micro_time_ns[row])
