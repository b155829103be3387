"""Ranks that call different collectives are told apart by the later one, before it calls; ranks that agree, and neighbours far ahead, are let alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torch_watchdog_agent.hooks import collectives
from torch_watchdog_agent.hooks.collectives import described
from torch_watchdog_agent.identity import Identity
from torch_watchdog_agent.lockstep import Collective, Lockstep, Mismatch, violation_of
from torch_watchdog_agent.rescue.flight import NOTHING
from torch_watchdog_proto.rescue_words import GroupCalls


def ranks(folder: Path, count: int, group: str = "0") -> list[Lockstep]:
    pages = [Lockstep(folder, attempt=0, local_rank=rank, local_world_size=count) for rank in range(count)]
    for page in pages:
        page.join(group, range(count))
    return pages


def gather(*shapes: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Collective:
    return described("all_gather", [(shape, dtype) for shape in shapes])


def test_the_later_of_two_ranks_learns_what_the_other_has_called(tmp_path: Path) -> None:
    here, there = ranks(tmp_path, 2)
    assert here.about_to(gather((4, 7), (4, 7)), "0", 12) is None
    found = there.about_to(gather((4, 9), (4, 9)), "0", 12)
    assert found == Mismatch(group="0", number=12, mine="all_gather of (4, 9) int64", local_rank=0, theirs="all_gather of (4, 7) int64")


@pytest.mark.parametrize("is_later", [False, True])
def test_the_stranger_to_the_loop_is_the_culprit_whoever_of_the_two_finds_out(tmp_path: Path, is_later: bool) -> None:
    pages, who = ranks(tmp_path, 2), Identity(rank=1 - is_later, local_rank=1 - is_later, world_size=2, local_world_size=2, attempt=0)
    calls = [(gather((186,)), 9), (Collective("barrier", "barrier"), 0)]  # rank 1 has left its loop
    first, second = (1, 0) if is_later else (0, 1)
    assert pages[first].about_to(calls[first][0], "0", 10, calls[first][1]) is None
    mismatch = pages[second].about_to(calls[second][0], "0", 10, calls[second][1])
    assert mismatch is not None
    found = violation_of(mismatch, who, source="train.py:40")
    assert (found.culprit if is_later else who.rank) == 1
    assert found.summary == "the ranks are in different collectives: barrier here, all_gather of (186,) int64 on rank 0"


def test_of_calls_that_are_usual_nobody_is_the_culprit() -> None:
    who = Identity(rank=0, local_rank=0, world_size=2, local_world_size=2, attempt=0)
    mismatch = Mismatch(group="0", number=12, mine="barrier", local_rank=1, theirs="all_reduce of (1,) float32", times=5, their_times=4)
    assert violation_of(mismatch, who, source="train.py:40").culprit is None


def test_ranks_that_agree_are_let_alone_however_far_apart_they_are(tmp_path: Path) -> None:
    here, there = ranks(tmp_path, 2)
    for number in range(1000):
        assert here.about_to(gather((4, number), (4, number)), "0", number) is None
    for number in range(1000):
        assert there.about_to(gather((4, number), (4, number)), "0", number) is None


def test_groups_do_not_mix(tmp_path: Path) -> None:
    here, there = ranks(tmp_path, 2)
    there.join("1", (0, 1))
    assert here.about_to(gather((4, 7)), "0", 3) is None
    assert there.about_to(gather((4, 9)), "1", 3) is None


def test_only_ranks_of_the_group_are_compared(tmp_path: Path) -> None:
    pages = [Lockstep(tmp_path, attempt=0, local_rank=rank, local_world_size=4) for rank in range(4)]
    for page, peers in zip(pages, [(0, 2), (1, 3), (0, 2), (1, 3)], strict=True):
        page.join(f"group of {peers}", peers)
    sizes = [7, 9, 7, 9]
    groups = ["group of (0, 2)", "group of (1, 3)"] * 2
    assert [page.about_to(gather((size,)), group, 0) for page, size, group in zip(pages, sizes, groups, strict=True)] == [None] * 4


@pytest.mark.parametrize("odd", range(5))
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1)])
def test_one_that_differs_is_found_in_whatever_order_the_ranks_come(tmp_path: Path, odd: int, order: tuple[int, ...]) -> None:
    pages = ranks(tmp_path, 5)
    found = [pages[rank].about_to(gather((9 if rank == odd else 7,)), "0", 0) for rank in order]
    assert any(found)


@pytest.mark.parametrize(
    ("name", "here", "there", "same"),
    [
        ("all_reduce", [((4, 7), torch.float32)], [((28,), torch.float32)], True),
        ("all_reduce", [((4, 7), torch.float32)], [((4, 7), torch.float16)], False),
        ("all_reduce", [((4, 7), torch.float32)], [((4, 8), torch.float32)], False),
        ("broadcast", [((8,), torch.uint8)], [((2,), torch.int32)], True),
        ("all_gather", [((4,), torch.int64), ((5,), torch.int64)], [((4,), torch.int64), ((5,), torch.int64)], True),
        ("all_to_all_single", [((4,), torch.int64)], [((9,), torch.int64)], True),
        ("gather", [((4,), torch.int64)], [((9,), torch.int64)], True),
        ("barrier", [], [], True),
    ],
)
def test_what_must_be_equal_is_what_the_backends_need(name: str, here: list[object], there: list[object], same: bool) -> None:
    one, other = described(name, here), described(name, there)  # type: ignore[arg-type]
    assert (one.body[:4] == other.body[:4]) is same


def test_different_collectives_differ_even_where_their_sizes_are_equal() -> None:
    shapes = [((4, 7), torch.float32)]
    assert described("all_reduce", shapes).body[:4] != described("broadcast", shapes).body[:4]


def test_the_words_name_both_ranks_by_their_global_number_and_say_what_to_do() -> None:
    who = Identity(rank=9, local_rank=1, world_size=16, local_world_size=8, attempt=0)
    sizes = Mismatch(group="0", number=12, mine="all_gather of (4, 9) int64", local_rank=0, theirs="all_gather of (4, 7) int64")
    found = violation_of(sizes, who, source="train.py:40")
    assert (found.kind, found.severity, found.batch.key) == ("rank.desync", "critical", "")
    assert found.cause.startswith("collective 13 of process group 0 is all_gather")  # behind 12, as the flight recorder counts
    assert "(4, 9) int64 on rank 9 (train.py:40) and all_gather of (4, 7) int64 on rank 8" in found.cause
    assert "Pad" in found.fix
    ops = Mismatch(group="0", number=12, mine="barrier", local_rank=0, theirs="all_reduce of (1,) float32")
    found = violation_of(ops, who, source="train.py:40")
    assert "different collectives" in found.summary
    assert "branch" in found.fix


class Group:
    """A process group of a backend that numbers every call, as gloo does, or only the collectives, as NCCL does."""

    group_name = "numbered by a test"

    def __init__(self, *, counts_sends: bool) -> None:
        self.number, self.step = 0, int(counts_sends)

    def _get_sequence_number_for_group(self) -> int:
        return self.number

    def send(self, tensor: object) -> str:
        self.number += self.step
        return f"sent {tensor}"


@pytest.mark.parametrize("counts_sends", [True, False])
def test_calls_between_two_ranks_are_no_collectives_of_the_group(counts_sends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_not_collective", {})
    group, send = Group(counts_sends=counts_sends), collectives._set_apart(Group.send)
    assert [send(group, number) for number in range(3)] == ["sent 0", "sent 1", "sent 2"]
    group.number += 5
    assert collectives._made_on(group, NOTHING) == GroupCalls(group=group.group_name, made=5, times=4)


def test_the_newest_call_is_told_until_c_plus_plus_has_made_another(monkeypatch: pytest.MonkeyPatch) -> None:
    group, gathered = Group(counts_sends=True), gather((4, 7))
    monkeypatch.setattr(collectives, "_newest", {group.group_name: (0, gathered, 3)})
    monkeypatch.setattr(collectives, "_by_python", {group.group_name: 1})
    group.number = 1
    assert collectives._made_on(group, NOTHING) == GroupCalls(
        group=group.group_name, made=1, newest="all_gather of (4, 7) int64", alike=gathered.alike, times=3
    )
    group.number = 5
    assert collectives._made_on(group, NOTHING) == GroupCalls(group=group.group_name, made=5, times=3)


class Monitors(Group):
    def monitored_barrier(self) -> tuple[GroupCalls, ...]:
        self.number += self.step
        made = collectives._made_on(self, NOTHING)  # while it waits
        return () if made is None else (made,)


@pytest.mark.parametrize("numbers", [2, 4])
def test_a_monitored_barrier_is_one_collective_and_told_by_its_name(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo counts it twice, and on rank 0 twice for each other rank: the ranks behind it were taken for ones in different collectives."""
    for name in ("_newest", "_not_collective"):
        monkeypatch.setattr(collectives, name, {})
    for name in ("_times", "_by_python"):
        monkeypatch.setattr(collectives, name, Counter())
    monkeypatch.setattr(collectives, "made_rank", lambda: SimpleNamespace(lockstep=None))
    group, barrier = Monitors(counts_sends=True), collectives._counted_once(Monitors.monitored_barrier)
    group.number, group.step = 14, numbers
    (waiting,) = barrier(group)
    assert (waiting.made, waiting.newest, waiting.times) == (15, "monitored_barrier", 0)
    behind = collectives._made_on(group, NOTHING)
    assert behind is not None and (behind.made, behind.newest) == (15, "monitored_barrier")
    group.number += 1
    after = collectives._made_on(group, NOTHING)
    assert after is not None and (after.made, after.newest) == (16, "")
