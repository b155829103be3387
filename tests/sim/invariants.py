"""P1 to P8 of the stop protocol, judged over a simulated job that has run to its end."""

from __future__ import annotations

from collections.abc import Iterator

from world import Attempt, SimRank, World

from torch_watchdog.job.first_failure import RankEnd, first_failure
from torch_watchdog_proto.stop.events import FromRank
from torch_watchdog_proto.stop.participant import Participant

__all__ = ["PROPERTIES", "violated"]

_PEER, _OWN = "Connection closed by peer", "BadBatchError: ids[2, 4] = 51"


def violated(world: World) -> str | None:
    """The first property that does not hold, in words; None where all do."""
    for judge in PROPERTIES:
        for problem in judge(world):
            return problem
    return None


def p1_no_vetoed_update_is_applied(world: World) -> Iterator[str]:
    for attempt in world.attempts:
        vetoes = {commit.veto for commit in attempt.register.values() if commit is not None and commit.veto is not None}
        for rank in attempt.ranks:
            if vetoes & set(rank.applied) and world.store_up:
                yield f"P1: rank {rank.number} applied {vetoes & set(rank.applied)}, whose veto stands in the register"
        stand_ins = {step for rank in attempt.ranks for step in rank.released}
        for rank in attempt.ranks:
            if stand_ins & set(rank.applied) and world.plan.coupled and world.store_up:
                yield f"P1: rank {rank.number} applied step {stand_ins & set(rank.applied)}, in which a stand-in was trained on"


def p2_who_stops_cleanly_has_applied_the_same(world: World) -> Iterator[str]:
    if not world.store_up:
        return
    for attempt in world.attempts:
        left = {rank.number: rank.saved_with for rank in attempt.ranks if rank.end == "left"}
        if len(set(left.values())) > 1:
            yield f"P2: ranks left with different updates: {left}"
        ends = {rank.end for rank in attempt.ranks}
        if (
            left
            and world.plan.coupled
            and ends <= {"left", "finished", "broken"}
            and len(ends) > 1
            and all(rank.line for rank in attempt.ranks)
        ):
            yield f"P2: some ranks left, others went on: {[(rank.number, rank.end) for rank in attempt.ranks]}"


def p3_nobody_waits_longer_than_its_timeout(world: World) -> Iterator[str]:
    for attempt in world.attempts:
        for rank in attempt.ranks:
            if rank.excess_wait > 1e-6:
                yield f"P3: rank {rank.number} waited {rank.excess_wait:.2f} s too long"
            if rank.end is None:
                yield f"P3: rank {rank.number} never came to an end: {rank.parked}"


def p4_a_healthy_job_is_not_delayed(world: World) -> Iterator[str]:
    if any(fault.kind in ("bad", "stop", "checkpoint", "leave") for fault in world.plan.faults):
        return
    for rank in world.attempts[-1].ranks:
        if rank.waited:
            yield f"P4: rank {rank.number} waited {rank.waited:.2f} s for nothing"
        if not world.plan.faults and (rank.end != "finished" or rank.applied != list(range(world.plan.steps))):
            yield f"P4: rank {rank.number} {rank.end} after {rank.applied}"


def p5_what_is_old_changes_nothing(world: World) -> Iterator[str]:
    """Everything that was ever said about an order that has ended is said again."""
    daemon, over = world.daemon, {closed.generation for closed in world.closed}
    if daemon is not None and daemon.state == "idle":
        for attempt, event in world.heard:
            generation = getattr(event.message, "generation", None) if isinstance(event, FromRank) else None
            if attempt == world.daemon_attempt and generation in over and daemon.handle(event, now=world.now):
                yield f"P5: {event} of an order that has ended changes something"
    for rank, order in world.said_to:
        if order.generation < _generation(rank.half):
            before = _promises(rank.half)
            if rank.half.handle(order, now=world.now) or _promises(rank.half) != before:
                yield f"P5: rank {rank.number} heeds {order}, which is older than its newest"


def _generation(half: Participant) -> int:
    return half._generation


def _promises(half: Participant) -> tuple[object, ...]:
    return half._prepared, half._commit, half._answer, set(half._unsure), dict(half._vetoes), dict(half._given_up)


def p6_every_order_ends(world: World) -> Iterator[str]:
    if world.daemon is not None and world.daemon.state != "idle":
        yield f"P6: an order has not ended: {world.daemon.state}"
    if any(not closed.reason for closed in world.closed):
        yield "P6: an order ended without a reason"


def p7_committed_only_where_every_part_is_whole(world: World) -> Iterator[str]:
    for attempt in world.attempts:
        if attempt.half_sealed:
            yield f"P7: order {attempt.half_sealed} was sealed before every part was whole"
        bad = {fault.kind for fault in world.plan.faults} & {"broken_save", "not_finite"}
        good = [generation for generation, is_good in attempt.sealed.items() if is_good]
        if good and bad:
            yield f"P7: order {good} was called good although there was {bad}"
    for closed in world.closed:
        if (
            closed.checkpoint is not None
            and closed.checkpoint.committed
            and closed.outcome == "done"
            and not _is_sealed(world.attempts, closed.generation)
        ):
            yield f"P7: order {closed.generation} is told as committed, and is not"


def _is_sealed(attempts: list[Attempt], generation: int) -> bool:
    return any(generation in attempt.sealed for attempt in attempts)


def p8_the_first_failure_is_the_one_named(world: World) -> Iterator[str]:
    for attempt in world.attempts:
        own = [rank for rank in attempt.ranks if rank.end in ("killed", "raised")]
        if not own or not world.plan.coupled:
            continue
        ends = [_end_of(rank) for rank in attempt.ranks]
        world.random.shuffle(ends)
        named, first = first_failure(ends), min(rank.ended_at for rank in own)
        if named is None or not {end.rank for end in named.culprits} & {rank.number for rank in own if rank.ended_at <= first + 0.002}:
            yield f"P8: {named and [end.rank for end in named.culprits]} is named, {[(rank.number, rank.end, rank.ended_at) for rank in attempt.ranks]}"


def _end_of(rank: SimRank) -> RankEnd:
    """As the daemon would have it, on one node."""
    text = {"raised": _OWN, "broken": _PEER}.get(rank.end or "", "")
    signal = 9 if rank.end == "killed" else None
    return RankEnd(
        rank=rank.number, node="n", pid=rank.number + 1, step=rank.entered, signal=signal, ended_ns=round(rank.ended_at * 1e9) + 1, text=text,
        finished=rank.end in ("finished", "left"),
    )  # fmt: skip


PROPERTIES = (
    p1_no_vetoed_update_is_applied,
    p2_who_stops_cleanly_has_applied_the_same,
    p3_nobody_waits_longer_than_its_timeout,
    p4_a_healthy_job_is_not_delayed,
    p5_what_is_old_changes_nothing,
    p6_every_order_ends,
    p7_committed_only_where_every_part_is_whole,
    p8_the_first_failure_is_the_one_named,
)
