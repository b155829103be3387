"""The properties of the stop protocol, over many seeded schedules of both halves joined by a simulated network."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from world import HOLD_TIMEOUT, Plan, World

SCHEDULES = int(os.environ.get("TORCH_WATCHDOG_SCHEDULES", 1500))


def random_plan(seed: int) -> Plan:
    draw = random.Random(seed)
    world, steps = draw.choice((1, 2, 2, 3, 4)), draw.randint(1, 6)
    cells = [(rank, step) for rank in range(world) for step in range(steps)]
    return Plan(
        world=world,
        steps=steps,
        bad=frozenset(draw.sample(cells, draw.choice((0, 0, 1, 1, 2)) if len(cells) > 1 else draw.choice((0, 1)))),
        stops=tuple(sorted((draw.randrange(steps), draw.random() < 0.7) for _ in range(draw.choice((0, 0, 1, 2))))),
        kills=frozenset(draw.sample(cells, draw.choice((0, 0, 0, 1)))),
        broken_saves=frozenset([draw.randrange(world)] if draw.random() < 0.15 else []),
        policy=draw.choice(("stop", "stop", "skip")),
        daemon_dies_after=draw.choice((None, None, draw.randint(world, 12 * world))),
    )


def check(world: World) -> None:
    vetoes = {commit.veto for commit in world.commits if commit.veto is not None}
    for rank in world.ranks:
        assert not vetoes & set(rank.applied), f"P1: rank {rank.number} applied a vetoed step"
        assert rank.longest_wait <= 2 * HOLD_TIMEOUT + 3, f"P3: rank {rank.number} waited {rank.longest_wait} s"
    left = [rank for rank in world.ranks if rank.end == "left"]
    assert len({tuple(rank.applied) for rank in left}) <= 1, f"P2: {[(rank.number, rank.applied) for rank in left]}"
    for closed in world.closed:
        if closed.checkpoint is not None and closed.checkpoint.committed:
            assert closed.generation in world.sealed, "P7: committed without a seal"
            assert not world.plan.broken_saves, "P7: committed although a part was broken"
    if not world.plan.bad and not world.plan.stops and not world.plan.kills:
        assert all(rank.end == "finished" and rank.longest_wait == 0 for rank in world.ranks), "P4: a healthy rank was delayed"
    for rank, step in world.plan.bad:
        others = [one for one in world.ranks if step in one.applied]
        assert not others or world.plan.policy == "observe" or (rank, step) not in world.plan.bad or not _reached(world, rank, step), "P1"


def _reached(world: World, rank: int, step: int) -> bool:
    return world.ranks[rank].entered >= step


@pytest.mark.timeout(600)
def test_all_properties_hold_over_random_schedules() -> None:
    first = random.randrange(1 << 30) if "TORCH_WATCHDOG_SEED" not in os.environ else int(os.environ["TORCH_WATCHDOG_SEED"])
    for seed in range(first, first + SCHEDULES):
        try:
            check(World(random_plan(seed), seed).run())
        except AssertionError as error:
            raise AssertionError(f"seed {seed} ({random_plan(seed)}): {error}") from error


def test_a_bad_batch_stops_every_rank_before_the_same_step() -> None:
    world = World(Plan(world=4, steps=6, bad=frozenset({(2, 3)})), seed=1).run()
    assert [rank.end for rank in world.ranks] == ["left"] * 4
    assert {tuple(rank.applied) for rank in world.ranks} == {(0, 1, 2)}
    assert world.closed[-1].outcome == "done"
    assert world.closed[-1].checkpoint is not None
    assert world.closed[-1].checkpoint.committed
    assert world.closed[-1].exit_code == 65


def test_skip_leaves_out_one_step_on_every_rank_and_goes_on() -> None:
    world = World(Plan(world=3, steps=5, bad=frozenset({(0, 2)}), policy="skip"), seed=2).run()
    assert {tuple(rank.applied) for rank in world.ranks} == {(0, 1, 3, 4)}
    assert {tuple(rank.vetoed) for rank in world.ranks} == {(2,)}
    assert [rank.end for rank in world.ranks] == ["finished"] * 3


def test_a_bad_batch_in_the_very_first_step_stops_before_it() -> None:
    world = World(Plan(world=2, steps=3, bad=frozenset({(1, 0)})), seed=3).run()
    assert [(rank.end, rank.applied) for rank in world.ranks] == [("left", []), ("left", [])]


def test_two_ranks_with_a_bad_batch_in_the_same_step_make_one_order() -> None:
    world = World(Plan(world=3, steps=4, bad=frozenset({(0, 2), (2, 2)})), seed=4).run()
    assert len([commit for commit in world.commits if commit.veto == 2]) == 1
    assert {tuple(rank.applied) for rank in world.ranks} == {(0, 1)}


def test_a_requested_stop_applies_the_same_updates_everywhere() -> None:
    world = World(Plan(world=3, steps=8, stops=((2, True),)), seed=5).run()
    assert len({tuple(rank.applied) for rank in world.ranks}) == 1
    assert [rank.end for rank in world.ranks] == ["left"] * 3


def test_a_requested_checkpoint_does_not_end_the_training() -> None:
    world = World(Plan(world=2, steps=8, stops=((2, False),)), seed=6).run()
    assert [rank.end for rank in world.ranks] == ["finished"] * 2
    assert world.ranks[0].applied == list(range(8))
    assert world.closed[0].checkpoint is not None
    assert world.closed[0].checkpoint.committed


def test_a_broken_part_means_no_committed_checkpoint_and_still_a_clean_stop() -> None:
    world = World(Plan(world=2, steps=5, bad=frozenset({(1, 3)}), broken_saves=frozenset({0})), seed=7).run()
    assert [rank.end for rank in world.ranks] == ["left"] * 2
    assert world.closed[-1].checkpoint is not None
    assert not world.closed[-1].checkpoint.committed
    assert "disk full" in world.closed[-1].reason


def test_bad_batches_twice_in_a_row_are_both_skipped() -> None:
    for seed in range(200):
        world = World(Plan(world=3, steps=6, bad=frozenset({(0, 2), (1, 3)}), policy="skip"), seed=seed).run()
        assert {tuple(rank.applied) for rank in world.ranks} == {(0, 1, 4, 5)}, seed
        assert [rank.end for rank in world.ranks] == ["finished"] * 3, seed


def test_skipping_too_often_turns_into_a_stop() -> None:
    world = World(Plan(world=2, steps=20, bad=frozenset((0, step) for step in range(1, 20)), policy="skip"), seed=8).run()
    assert [rank.end for rank in world.ranks] == ["left"] * 2
    assert {tuple(rank.vetoed) for rank in world.ranks} == {tuple(range(1, 11))}
    assert "no more is allowed" in world.closed[-1].reason
    assert world.closed[-1].exit_code == 65


def test_a_daemon_that_dies_between_its_words_leaves_all_ranks_stopped_alike_or_none() -> None:
    for seed in range(400):
        world = World(Plan(world=3, steps=40, stops=((2, True),), daemon_dies_after=4 + seed % 9), seed=seed).run()
        ends = {(rank.end, tuple(rank.applied)) for rank in world.ranks}
        assert len(ends) == 1, (seed, ends)
