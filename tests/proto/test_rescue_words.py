"""The daemon's half of a rescue: who is freed, who saves, and that it ends whatever happens."""

from __future__ import annotations

import random

import pytest

from torch_watchdog_proto.messages import Committed, Leave, Saved, WriteCommitted
from torch_watchdog_proto.rescue_words import Free, Freed, Holds, Rescue
from torch_watchdog_proto.stop.events import FromRank, RankGone, Tell, Tick
from torch_watchdog_proto.stop.rescue import FREE_TIMEOUT_S, SETTLE_S, Effect, Ended, RankFailed, RescueCoordinator

GENERATION = 5


class Run:
    """A rescue with a hand-moved clock; `told` are the orders by rank."""

    def __init__(self, world: int = 3) -> None:
        self.rescue = RescueCoordinator(checkpoints_dir="/run/checkpoints", grace_s=60)
        self.now, self.told, self.ended = 100.0, dict[int, list[object]](), list[Ended]()
        for rank in range(world):
            self.rescue.rank_here(rank)

    def keep(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Tell):
                self.told.setdefault(effect.rank, []).append(effect.order)
            else:
                self.ended.append(effect)

    def fail(self, rank: int, *, victim: bool = False, waits: bool = False, why_not: str = "", updates: int = 0) -> None:
        failed = RankFailed(
            rank=rank, reason="it fell", generation=GENERATION, victim=victim, waits=waits, why_not=why_not, updates_applied=updates
        )  # fmt: skip
        self.keep(self.rescue.handle(failed, now=self.now))

    def out(self, rank: int) -> None:
        self.keep(self.rescue.handle(RankGone(rank=rank), now=self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.keep(self.rescue.handle(Tick(), now=self.now))

    def freed(self, rank: int, updates: int = 7, holds: Holds = "all", why: str = "", newest: str = "") -> None:
        word = Freed(rank=rank, generation=GENERATION, updates_applied=updates, holds=holds, why=why, newest=newest)
        self.keep(self.rescue.handle(FromRank(message=word), now=self.now))

    def freed_with_a_part(self, rank: int, part: int, *, parts: int = 2, updates: int = 7) -> None:
        word = Freed(rank=rank, generation=GENERATION, updates_applied=updates, holds="part", part=part, parts=parts, why="HSDP")
        self.keep(self.rescue.handle(FromRank(message=word), now=self.now))

    def saved(self, rank: int, *, updates: int = 7, error: str | None = None, finite: bool = True) -> None:
        path = f"/run/checkpoints/step-{updates}"
        word = Saved(rank=rank, generation=GENERATION, updates_applied=updates, path=path, format="dcp", finite=finite, error=error)
        self.keep(self.rescue.handle(FromRank(message=word), now=self.now))

    def committed(self, rank: int, error: str | None = None) -> None:
        self.keep(self.rescue.handle(FromRank(message=Committed(rank=rank, generation=GENERATION, error=error)), now=self.now))

    def kinds(self, rank: int) -> list[type]:
        return [type(order) for order in self.told.get(rank, [])]


def test_the_others_are_freed_one_saves_and_all_leave() -> None:
    run = Run()
    run.fail(1)
    assert (run.kinds(0), run.kinds(1), run.kinds(2)) == ([Free], [Leave], [Free])
    run.freed(2)
    run.freed(0)
    assert isinstance(run.told[0][-1], Rescue)
    run.saved(0)
    run.committed(0)
    assert (run.kinds(0), run.kinds(2)) == ([Free, Rescue, WriteCommitted, Leave], [Free, Leave])
    (ended,) = run.ended
    assert ended.checkpoint is not None
    assert (ended.checkpoint.committed, ended.checkpoint.saved_by, ended.updates_applied) == (True, (0,), 7)


def test_the_rank_with_the_fewest_updates_saves() -> None:
    run = Run()
    run.fail(1)
    run.freed(0, updates=8)
    run.freed(2, updates=7)
    assert (run.kinds(0), run.kinds(2)) == ([Free], [Free, Rescue])


def test_a_victim_that_speaks_first_is_freed_too() -> None:
    run = Run(world=2)
    run.fail(0, victim=True)
    assert (run.kinds(0), run.kinds(1)) == ([Free], [Free])
    run.fail(1)
    run.freed(0)
    assert run.kinds(0) == [Free, Rescue]


def test_a_silent_rank_is_waited_for_only_a_little_once_another_holds_all() -> None:
    run = Run()
    run.fail(1)
    run.freed(2)
    run.wait(SETTLE_S)
    assert run.kinds(2) == [Free, Rescue]


def test_ranks_that_hold_a_part_save_nothing_and_name_the_newest_checkpoint() -> None:
    run = Run()
    run.fail(1)
    run.freed(0, holds="part", why="FSDP shards the parameters", newest="/run/checkpoints/step-4")
    run.freed(2, holds="part", why="FSDP shards the parameters", newest="/run/checkpoints/step-40")
    (ended,) = run.ended
    assert (ended.checkpoint, ended.newest) == (None, "/run/checkpoints/step-40")
    assert ended.reason == "nothing was saved: FSDP shards the parameters"
    assert run.kinds(0)[-1] is Leave


def test_a_half_step_is_never_saved() -> None:
    run = Run(world=2)
    run.fail(1)
    run.freed(0, holds="nothing", why="its update was under way")
    assert run.kinds(0) == [Free, Leave]
    assert run.ended[0].reason == "nothing was saved: its update was under way"


def test_another_replica_saves_where_the_first_cannot() -> None:
    run = Run()
    run.fail(1)
    run.freed(0)
    run.freed(2)
    run.saved(0, error="the disk is full")
    assert run.kinds(2) == [Free, Rescue]
    run.out(2)
    assert run.ended[0].reason == "nothing was saved: rank 2 ended while it saved"


def test_no_second_rank_writes_under_the_name_that_a_slow_one_still_writes_under() -> None:
    run = Run()
    run.fail(1)
    run.freed(0)
    run.freed(2)
    run.wait(60)
    assert run.ended[0].reason == "nothing was saved: rank 0 did not save in time"
    assert Rescue not in run.kinds(2)


def test_a_state_with_nan_is_written_and_never_called_good() -> None:
    run = Run(world=2)
    run.fail(1)
    run.freed(0)
    run.saved(0, finite=False)
    assert run.told[0][-1] == WriteCommitted(generation=GENERATION, manifest=run.told[0][-1].manifest, good=False)  # type: ignore[attr-defined]
    run.committed(0)
    fact = run.ended[0].checkpoint
    assert fact is not None
    assert (fact.committed, fact.path) == (False, "/run/checkpoints/not-good.step-7")


@pytest.mark.parametrize(
    ("world", "why_not", "told"),
    [
        (1, "", "its process is gone"),
        (1, "had trained nothing yet", "it had trained nothing yet"),
        (2, "", "no healthy rank is left"),
        (2, "had trained nothing yet", "no healthy rank is left: the last one had trained nothing yet"),
    ],
)
def test_where_nobody_else_is_there_it_is_over_at_once(world: int, why_not: str, told: str) -> None:
    run = Run(world)
    for rank in range(world):
        run.fail(rank, why_not=why_not)
    assert run.kinds(world - 1)[-1] == Leave
    assert run.ended[0].reason == f"nothing was saved: {told}"


@pytest.mark.parametrize(
    ("failed", "first", "second", "why"),
    [
        (7, 9, 8, "rank 0 has applied 9 updates and rank 1 7"),  # the failed one has repeated its step
        (9, 7, 9, "rank 2 has applied 9 updates and rank 0 7"),  # another has
        (7, 8, 7, ""),  # it died behind the collective, in its own update
        (30, 26, 27, ""),  # its Python was ahead of its GPU
        (0, 9, 9, ""),  # it applies none, or has not said
    ],
)
def test_what_ranks_hold_that_were_not_in_the_same_steps_is_the_state_of_none(failed: int, first: int, second: int, why: str) -> None:
    run = Run(3)
    run.fail(1, updates=failed)
    run.freed(0, first)
    run.freed(2, second)
    if why:
        assert run.ended[0].reason == f"nothing was saved: {why}: they were not in the same steps, as where a script repeats one"
    else:
        assert not run.ended
        assert Rescue in (*run.kinds(0), *run.kinds(2))


def test_one_that_dies_while_it_saves_was_the_last_healthy_rank() -> None:
    run = Run(2)
    run.fail(1)
    run.freed(0)
    run.fail(0)  # its process has ended, which is heard as both
    run.out(0)
    assert run.ended[0].reason == "nothing was saved: rank 0 ended while it saved; no healthy rank is left"


@pytest.mark.parametrize("when", ["saving", "sealing"])
def test_what_a_rank_holds_it_holds_whatever_its_script_raises_then(when: str) -> None:
    """`sys.exit(1)` behind the handler of the broken collective: it waits at its end for a word."""
    run = Run(2)
    run.fail(1)
    run.freed(0)
    run.saved(0) if when == "sealing" else None
    run.fail(0, why_not="ended by an exit of the script's own, which is not held back")
    run.saved(0)
    run.committed(0)
    assert run.kinds(0) == [Free, Rescue, WriteCommitted, Leave]
    assert run.ended[0].checkpoint is not None


def test_one_that_raises_once_it_is_free_saves_where_another_cannot() -> None:
    run = Run(3)
    run.fail(1)
    run.freed(2)
    run.fail(2)
    run.freed(0)
    run.saved(0, error="disk full")
    assert run.kinds(2) == [Free, Rescue]
    assert run.rescue.state == "saving"


def test_one_that_raises_once_it_is_free_and_holds_nothing_is_not_kept() -> None:
    run = Run(3)
    run.fail(1)
    run.freed(2, holds="nothing", why="its update was under way")
    run.fail(2)
    assert run.kinds(2) == [Free, Leave]


def test_why_one_could_not_be_asked_is_not_said_of_one_that_is_gone_after_it() -> None:
    run = Run(2)
    run.fail(1, why_not="had trained nothing yet")
    run.out(0)
    assert run.ended[0].reason == "nothing was saved: no healthy rank is left"


@pytest.mark.parametrize(("updates", "told"), [(7, "7 updates"), (1, "1 update")])
def test_one_that_raises_alone_saves_what_it_held_before(updates: int, told: str) -> None:
    run = Run(world=1)
    run.fail(0, waits=True)
    run.freed(0, updates=updates)
    run.saved(0, updates=updates)
    run.committed(0)
    assert run.kinds(0) == [Free, Rescue, WriteCommitted, Leave]
    assert run.ended[0].reason == f"rank 0 saved the state after {told}"


def test_one_that_raises_alone_in_the_middle_of_an_update_saves_nothing() -> None:
    run = Run(world=1)
    run.fail(0, waits=True)
    run.freed(0, holds="nothing", why="its update was under way")
    assert run.kinds(0) == [Free, Leave]
    assert run.ended[0].reason == "nothing was saved: its update was under way"


def test_of_ranks_that_all_raise_the_last_is_asked() -> None:
    run = Run(world=3)
    for rank in (1, 0, 2):
        run.fail(rank, waits=True)
    assert (run.kinds(1), run.kinds(0), run.kinds(2)) == ([Leave], [Free, Leave], [Free])
    run.freed(2)
    assert run.kinds(2) == [Free, Rescue]


def test_the_last_that_raises_is_not_asked_while_a_healthy_one_is_there_or_a_victim() -> None:
    run = Run(world=3)
    run.fail(2, victim=True)
    run.fail(1, waits=True)
    run.fail(0, waits=True)
    assert (run.kinds(0)[-1], run.kinds(1)[-1], run.kinds(2)) == (Leave, Leave, [Free])


def test_the_last_that_raises_may_die_while_it_saves() -> None:
    run = Run(world=1)
    run.fail(0, waits=True)
    run.freed(0)
    run.out(0)
    run.fail(0)
    assert run.ended[0].reason == "nothing was saved: rank 0 ended while it saved"


def hsdp(*, updates: dict[int, int] | None = None, dead: int = 3) -> Run:
    """Two replicas of two parts each: ranks 0 and 1, ranks 2 and 3. One rank has failed, the others are free."""
    run = Run(4)
    run.fail(dead)
    for rank in sorted({0, 1, 2, 3} - {dead}):
        run.freed_with_a_part(rank, rank % 2, updates=(updates or {}).get(rank, 7))
    return run


@pytest.mark.parametrize(("dead", "savers"), [(3, (0, 1)), (0, (2, 1)), (2, (0, 1))])
def test_ranks_that_hold_the_whole_in_parts_save_it_together(dead: int, savers: tuple[int, int]) -> None:
    run = hsdp(dead=dead)
    assert [rank for rank in range(4) if Rescue in run.kinds(rank)] == sorted(savers)
    for rank in reversed(savers):
        run.saved(rank)
    assert WriteCommitted in run.kinds(savers[0]) and WriteCommitted not in run.kinds(savers[1])
    run.committed(savers[0])
    (ended,) = run.ended
    assert ended.checkpoint is not None
    assert (ended.checkpoint.saved_by, ended.checkpoint.committed) == (tuple(sorted(savers)), True)


def test_parts_of_different_updates_are_no_whole() -> None:
    run = hsdp(updates={0: 8})
    assert [rank for rank in range(4) if Rescue in run.kinds(rank)] == [1, 2]
    run = hsdp(updates={1: 8})
    assert (run.ended[0].checkpoint, run.ended[0].reason) == (None, "nothing was saved: HSDP")


def test_nobody_seals_before_every_part_is_written_and_a_late_one_ends_it() -> None:
    run = hsdp()
    run.saved(0)
    assert WriteCommitted not in run.kinds(0)
    run.wait(61)
    assert (run.ended[0].checkpoint, run.ended[0].reason) == (None, "nothing was saved: rank 1 did not save in time")


def test_a_part_that_cannot_be_written_is_written_by_another_that_holds_it_and_no_part_twice() -> None:
    run = hsdp()
    run.saved(0, error="disk full")
    assert run.kinds(1).count(Rescue) == run.kinds(2).count(Rescue) == 1
    run.saved(1)
    run.saved(2)
    assert WriteCommitted in run.kinds(2)
    run.committed(2)
    assert run.ended[0].checkpoint is not None and run.ended[0].checkpoint.saved_by == (1, 2)


def test_where_the_sealing_fails_another_part_takes_the_lead_or_it_is_over() -> None:
    run = hsdp()
    run.saved(0)
    run.saved(1)
    run.committed(0, error="disk full")
    run.saved(2)
    run.committed(2, error="disk full")
    assert run.ended[0].checkpoint is None
    assert "disk full" in run.ended[0].reason


def test_one_non_finite_part_makes_the_whole_not_good() -> None:
    run = hsdp()
    run.saved(0)
    run.saved(1, finite=False)
    run.committed(0)
    assert run.ended[0].checkpoint is not None
    assert (run.ended[0].checkpoint.committed, run.ended[0].checkpoint.path) == (False, "/run/checkpoints/not-good.step-7")


def test_a_failure_after_the_end_is_told_to_go_on_with_it() -> None:
    run = Run(world=1)
    run.fail(0)
    run.fail(0, victim=True)
    assert run.kinds(0) == [Leave, Leave]
    assert len(run.ended) == 1


def test_words_of_another_generation_change_nothing() -> None:
    run = Run(world=2)
    run.fail(1)
    stray = Freed(rank=0, generation=GENERATION - 1, updates_applied=7, holds="all")
    assert run.rescue.handle(FromRank(message=stray), now=run.now) == ()


@pytest.mark.parametrize("seed", range(300))
def test_it_ends_once_in_any_order_of_events_and_commits_only_what_is_whole(seed: int) -> None:
    dice, run = random.Random(seed), Run(world=4)
    run.fail(dice.randrange(4), victim=dice.random() < 0.3)
    for _ in range(60):
        rank = dice.randrange(4)
        dice.choice(
            (
                lambda: run.fail(rank, victim=dice.random() < 0.5),
                lambda: run.out(rank),
                lambda: run.freed(rank, updates=dice.choice((7, 8)), holds=dice.choice(("all", "all", "part", "nothing"))),
                lambda: run.saved(rank, error=dice.choice((None, None, "full")), finite=dice.random() < 0.8),
                lambda: run.committed(rank, error=dice.choice((None, "gone"))),
                lambda: run.wait(dice.choice((0.1, 1.0, 5.0))),
            )
        )()
    for _ in range(8):
        run.wait(FREE_TIMEOUT_S + 60)
    assert len(run.ended) == 1
    fact = run.ended[0].checkpoint
    if fact is not None:
        assert any(isinstance(order, Rescue) for order in run.told[fact.saved_by[0]])
        assert not fact.committed or fact.finite
