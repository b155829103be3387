"""A gate on a GPU waits for the neighbours' hand-over of the same batch, and for nothing else."""

from __future__ import annotations

import threading
from pathlib import Path

from torch_watchdog_agent.clearance import Clearance


def two(folder: Path) -> tuple[Clearance, Clearance]:
    return (
        Clearance(folder, attempt=0, local_rank=0, local_world_size=2),
        Clearance(folder, attempt=0, local_rank=1, local_world_size=2),
    )


def never() -> bool:
    return False


def asked_for_nothing() -> bool:
    raise AssertionError("the device was asked although no neighbour was behind")


def test_a_rank_whose_neighbours_are_as_far_does_not_wait(tmp_path: Path) -> None:
    here, there = two(tmp_path)
    here.handed_over(0, 0)
    there.handed_over(0, 0)
    here.wait(0, 0, finished=asked_for_nothing, timeout_s=0)


def test_it_waits_until_the_neighbour_is_handed_the_same_batch(tmp_path: Path) -> None:
    here, there = two(tmp_path)
    there.handed_over(4, 0)
    waiting = threading.Thread(target=lambda: here.wait(4, 1, finished=never, timeout_s=60))
    waiting.start()
    there.handed_over(4, 1)
    waiting.join(30)
    assert not waiting.is_alive()


def test_an_earlier_micro_batch_of_the_neighbour_is_not_enough(tmp_path: Path) -> None:
    here, there = two(tmp_path)
    there.handed_over(4, 0)
    asked = []
    here.wait(4, 1, finished=lambda: bool(asked.append(1)) or len(asked) > 3, timeout_s=60)
    assert len(asked) == 4


def test_the_timeout_ends_the_wait(tmp_path: Path) -> None:
    here, _ = two(tmp_path)
    ticks = iter(range(100))
    here.wait(0, 0, finished=never, timeout_s=3, clock=lambda: float(next(ticks)))
    assert next(ticks) == 4


def test_a_neighbour_that_the_device_does_not_need_is_soon_not_waited_for(tmp_path: Path) -> None:
    here, _ = two(tmp_path)
    for step in range(3):
        here.wait(step, 0, finished=lambda: True, timeout_s=60)
    here.wait(3, 0, finished=asked_for_nothing, timeout_s=0)


def test_attempts_do_not_see_each_other(tmp_path: Path) -> None:
    old = Clearance(tmp_path, attempt=0, local_rank=1, local_world_size=2)
    old.handed_over(9, 0)
    new = Clearance(tmp_path, attempt=1, local_rank=0, local_world_size=2)
    asked = []
    new.wait(0, 0, finished=lambda: not asked.append(1), timeout_s=60)
    assert asked
