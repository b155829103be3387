"""The newest that is known of each rank: what a status shows.

Owns per-rank counters of one attempt; decides nothing. Pure: `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch_watchdog.rules.named import named
from torch_watchdog_proto.envelopes import RankStatus, ShownPhase, ShownPolicy
from torch_watchdog_proto.messages import (
    Abandon,
    Ack,
    Commit,
    Finished,
    Order,
    Phase,
    Prepare,
    RankEvent,
    RankHello,
    RankMessage,
    Saving,
    StepBlock,
)
from torch_watchdog_proto.rescue_words import Failed
from torch_watchdog_proto.sentences import and_then
from torch_watchdog_proto.stop.events import Closed
from torch_watchdog_proto.stop.rescue import Ended

__all__ = ["RankState", "awaited", "way_out", "with_the_stopped", "with_the_stopped_ones"]

_MAX_LEFT_OUT = 1000
_MAX_AHEAD = 64  # steps that Python may be ahead of its device: a launch queue holds fewer


@dataclass(slots=True, kw_only=True)
class RankState:
    """`seen_step`: the newest step of which a batch was reported; `last_step`: the newest that passed its gate.

    `updates_applied` counts on from the checkpoint that the launch resumed, `began_at_update` is what that held: known where the first step was seen.
    """

    rank: int
    node: str
    pid: int
    local_rank: int | None = None
    phase: Phase = "start"
    alive: bool = True
    exited: bool = False  # its end was seen, not only its silence
    left: bool = False  # by our own order
    raised: bool = False  # it has told a failure
    ends_well: bool = False  # it has told its end, and no failure
    stopped: bool = False  # its process is (SIGSTOP)
    asked: bool = False  # an order waits for its promise
    last_step: int | None = None
    seen_step: int | None = None
    loss: float | None = None
    losses: dict[int, tuple[float, int]] = field(default_factory=dict)  # sum and number, from the newest step that has ended on
    step_time_s: float | None = None
    last_seen_s: float | None = None
    updates_applied: int | None = None
    began_at_update: int | None = None
    failed_in: tuple[int, int] | None = None  # the step, and the updates before it, by its own word
    left_out: set[int] = field(default_factory=set)  # the newest steps without an update: reported so, or ordered so and not yet reported

    def hear(self, message: RankMessage, now: float) -> None:
        """A control message is a sign of life, and tells the phase."""
        self.last_seen_s = now
        match message:
            case RankHello():
                self.pid, self.local_rank, self.alive = message.pid, message.local_rank, True
                self.raised = self.ends_well = False
            case Ack():
                self.phase, self.asked = message.phase, False
            case Saving():
                self.phase, self.asked = "saving", False
            case Finished():
                self.phase, self.ends_well = "end", not self.raised
            case Failed():
                self.raised, self.failed_in = True, (message.step, message.updates_applied)
            case _:
                pass

    def record(self, block: StepBlock, now: float) -> None:
        """What one block says of the rank. The order of blocks is that of the ring."""
        self.last_seen_s = now
        if block.step:
            self._count_updates(block)
            self.last_step = max(block.step)
            self.phase = self.phase if self.phase == "end" else "train"  # whatever it answered last: it has passed a gate since
        if block.step_ns:
            self.step_time_s = block.step_ns[-1] / 1e9
        if block.micro_of_step:
            self.seen_step = max(block.micro_of_step)
        self._count_losses(block)

    def _count_losses(self, block: StepBlock) -> None:
        """The mean of the newest step that has ended, as reports have it; where none ends, the newest of all. A loss may come after its step's end."""
        evaluation = block.evaluation or (False,) * len(block.loss)
        newest_first = zip(
            reversed(block.micro_of_step), reversed(block.loss), reversed(block.loss_known), reversed(evaluation), strict=False
        )
        ended: int | None = None
        newest: float | None = None
        for step, loss, known, evaluated in newest_first:
            if not known or evaluated:
                continue
            if ended is not None and step < ended:
                break  # of steps that end in milliseconds a report has hundreds
            ended = step if self.last_step is not None and step <= self.last_step else None
            newest = loss if newest is None else newest
            total, number = self.losses.get(step, (0.0, 0))
            self.losses[step] = (total + loss, number + 1)
        ended = max((step for step in self.losses if self.last_step is not None and step <= self.last_step), default=None)
        if ended is not None:
            total, number = self.losses[ended]
            self.loss = total / number
            self.losses = {step: sums for step, sums in self.losses.items() if step >= ended}
        elif newest is not None:
            self.loss = newest

    def _count_updates(self, block: StepBlock) -> None:
        if len(block.updates_applied) != len(block.step):  # an older version did not count them
            return
        first_vetoed = bool(block.vetoed) and block.vetoed[0]
        if block.step[0] == 0:
            self.began_at_update = block.updates_applied[0] - (not first_vetoed)
        self.updates_applied = block.updates_applied[-1]
        if self.left_out or any(block.vetoed):
            self.left_out -= set(block.step)
            self._leave_out(step for step, vetoed in zip(block.step, block.vetoed, strict=False) if vetoed)

    def _leave_out(self, steps: Iterable[int]) -> None:
        self.left_out.update(steps)
        if len(self.left_out) > _MAX_LEFT_OUT:
            self.left_out = set(sorted(self.left_out)[-_MAX_LEFT_OUT:])

    def updates_before(self, step: int | None) -> int | None:
        """How many updates the model had when that step began, a step that is not far from the newest."""
        if self.last_step is None and self.failed_in is not None and step == self.failed_in[0] == 0:
            return self.failed_in[1]
        if step is None or self.updates_applied is None or self.last_step is None:
            return None
        reported = self.last_step + 1
        low, high = min(step, reported), max(step, reported)
        updates = high - low - sum(low <= left_out < high for left_out in self.left_out)
        return self.updates_applied + (updates if step > reported else -updates)

    def step_on_device(self, updates: int | None) -> int | None:
        """Which step a device was in that had done so many updates, Python being ahead of it; None where that is not known. In none whose batch had not
        been handed over: a device that fails may count the update behind its failure, too.
        """
        if updates is None or self.last_step is None:
            return None
        newest = self.last_step if self.seen_step is None else self.seen_step
        newest_first = range(newest, max(-1, newest - _MAX_AHEAD), -1)
        return next((step for step in newest_first if (self.updates_before(step) or 0) <= updates), None)

    def gone(self) -> None:
        self.alive, self.phase = False, "end"

    def seen(self, event: RankEvent) -> None:
        """By its node."""
        if event.kind == "state":
            self.stopped = event.text == "T"

    def told(self, order: Order) -> None:
        """What it was sent."""
        if isinstance(order, Prepare | Commit | Abandon):
            self.asked = isinstance(order, Prepare)
        if isinstance(order, Commit) and order.veto is not None:
            self._leave_out((order.veto,))

    def status(self, *, late: bool = False) -> RankStatus:
        waited_for: ShownPhase | None = "stopped" if self.stopped else "asked" if self.asked else "late" if late else None
        phase = (self.alive and waited_for) or self.phase
        return RankStatus(
            rank=self.rank, node=self.node, pid=self.pid, phase=phase, alive=self.alive, last_step=self.last_step, loss=self.loss,
            step_time_s=self.step_time_s, last_seen_s=self.last_seen_s, updates_applied=self.updates_applied,
            began_at_update=self.began_at_update,
        )  # fmt: skip


def with_the_stopped(closed: Closed, ranks: Iterable[RankState]) -> Closed:
    """An order that came to nothing because ranks could not answer says so."""
    stopped = [rank for rank in ranks if rank.alive and rank.stopped]
    if closed.outcome == "done" or not stopped:
        return closed
    who = ", ".join(f"rank {rank.rank} (`kill -CONT {rank.pid}` on {rank.node})" for rank in stopped)
    return replace(closed, reason=f"{closed.reason}; stopped processes: {who}")


def with_the_stopped_ones(ended: Ended, ranks: Iterable[RankState]) -> Ended:
    """A rescue that saved nothing, or waited in vain for what they hold, says so, too. They end soon, by the launcher's SIGKILL."""
    stopped = [rank for rank in ranks if rank.stopped and rank.rank not in ended.freed]
    if ended.checkpoint is not None or not stopped:
        return ended
    one = len(stopped) == 1
    who = f"{named([rank.rank for rank in stopped])} {'is' if one else 'are'} stopped"
    means = f"{'it' if one else 'they'} could neither answer nor save, and what {'it holds' if one else 'they hold'} is lost"
    return replace(ended, reason=f"{ended.reason}; {who} (state T: by SIGSTOP, a shell's Ctrl-Z or a scheduler that suspends): {means}")


def awaited(ranks: Sequence[RankStatus], standstill: str, policy: ShownPolicy) -> str:
    """For whom an order waits, as far as it is known yet, and what a person can do."""
    silent = [rank for rank in ranks if rank.phase in ("asked", "stopped")]
    if standstill:
        words = standstill
    elif silent:
        words = f"it waits for an answer of {named([rank.rank for rank in silent])}"
    else:
        words = "it waits until every rank has come to the end of its step; `watchdog status` says who is late once that is known"
    way = way_out(ranks, policy)
    return and_then(words, way) if way else words


def way_out(ranks: Iterable[RankStatus], policy: ShownPolicy) -> str:
    """What a person can type where ranks are late; empty where none is."""
    stopped = next((rank for rank in ranks if rank.phase == "stopped"), None)
    if stopped is not None:
        return f"`kill -CONT {stopped.pid}` on {stopped.node} lets rank {stopped.rank} go on"
    late = next((rank for rank in ranks if rank.phase == "late"), None)
    if late is None:
        return ""
    saves = "" if policy == "observe" else ": the ranks that wait save what they hold, as after a failure"
    return (
        f"if that does not end by itself, `kill -9 {late.pid}` on {late.node} ends rank {late.rank}, SIGTERM to the launch ends all{saves}"
    )
