"""Rules over what ranks record: each fires on its fault, names the rank, and is silent on what only looks like it."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable

import pytest
from streams_made import GIB, Watch, batches, block, labels, sample

from torch_watchdog_proto.messages import StepBlock

RNG = random.Random(0)


def noisy(middle: float, share: float = 0.1) -> float:
    return middle * (1 + RNG.uniform(-share, share))


# loss.spike


def test_a_loss_that_leaves_its_range_for_several_steps_is_told_with_its_rank() -> None:
    watch = Watch()
    watch.seconds(60, lambda step: (block(0, step, loss=noisy(2)), block(1, step, loss=noisy(2)), block(2, step, loss=noisy(2))))
    watch.seconds(6, lambda step: (block(0, step, loss=noisy(2)), block(1, step, loss=9), block(2, step, loss=noisy(2))), start=60)
    assert watch.told == [("loss_spike", 1, "fires")]
    assert "rank 1, step 65: the last 6 losses are 9 or more" in watch.found[0].sign.said


def test_a_spike_of_all_ranks_is_one_finding_without_a_rank_and_is_over_when_the_loss_is_back() -> None:
    watch = Watch()
    for count, loss in ((60, 2.0), (6, 9.0), (20, 2.0)):
        watch.seconds(count, lambda step, loss=loss: (block(rank, step, loss=noisy(loss)) for rank in range(3)))  # type: ignore[misc]
    assert watch.told == [("loss_spike", None, "fires"), ("loss_spike", None, "resolves")]


def short_steps(first: int, last: int, loss_of: Callable[[int, int], float], *, ranks: int = 2) -> list[StepBlock]:
    """What comes of very short steps in one second: blocks of dozens of them."""
    return [batches(rank, [(step, loss_of(rank, step)) for step in range(first, last)]) for rank in range(ranks)]


@pytest.mark.parametrize("each_second", [7, 30, 100, 1000])
def test_a_spike_of_40_very_short_steps_is_told_from_its_sixth_step_on_however_many_come_between_two_looks(each_second: int) -> None:
    watch = Watch()
    for first in range(0, 2000, each_second):
        watch.second(*short_steps(first, first + each_second, lambda rank, step: noisy(1) + 20 * (rank == 1 and 1500 <= step < 1540)))
    assert [one for one in watch.told if one[2] == "fires"] == [("loss_spike", 1, "fires")]
    assert "rank 1, step 1505: " in watch.found[0].sign.said


def test_a_spike_of_which_one_rank_tells_a_look_earlier_is_that_of_all_ranks() -> None:
    watch = Watch()

    def loss_of(rank: int, step: int) -> float:
        return noisy(1) + 20 * (step >= 200)

    watch.second(*short_steps(0, 198, loss_of, ranks=3))
    watch.second(*short_steps(198, 210, loss_of, ranks=1))
    watch.second(*short_steps(210, 220, loss_of, ranks=1), *short_steps(198, 220, loss_of, ranks=3)[1:])
    assert watch.told == [("loss_spike", None, "fires")]


@pytest.mark.parametrize(("ranks", "risen"), [(3, 2), (4, 3), (8, 7), (64, 63)])
def test_a_spike_of_most_ranks_is_one_finding_that_names_them(ranks: int, risen: int) -> None:
    """Of most and not of all nothing had been told: in a large job chance keeps one or the other rank below its limit."""
    watch = Watch()
    watch.seconds(60, lambda step: (block(rank, step, loss=noisy(2)) for rank in range(ranks)))
    watch.seconds(20, lambda step: (block(rank, step, loss=9 if rank < risen else noisy(2)) for rank in range(ranks)), 60)
    assert watch.told == [("loss_spike", None, "fires")]
    assert watch.found[0].sign.said.startswith(f"{risen} of {ranks} ranks, step 65: the last 6 losses are 9 or more")
    assert watch.found[0].sign.affected == tuple(range(risen))


@pytest.mark.parametrize("ranks", [2, 8, 600])
def test_who_rises_after_most_have_is_not_told_to_be_the_only_one(ranks: int) -> None:
    """One rank's losses are noisier than its peers': it had been told by itself, too, with its part of the data as the cause."""
    watch = Watch()

    def spiked(rank: int, step: int) -> float:
        return noisy(9) if step >= (68 if rank == 1 else 60) else noisy(2)

    watch.seconds(90, lambda step: (block(rank, step, loss=spiked(rank, step)) for rank in range(ranks)))
    assert [one for one in watch.told if one[2] == "fires"] == ([("loss_spike", 0, "fires")] if ranks == 2 else []) + [
        ("loss_spike", None, "fires")
    ]


def test_a_spike_of_half_of_the_ranks_is_told_of_each_of_them() -> None:
    watch = Watch()
    watch.seconds(60, lambda step: (block(rank, step, loss=noisy(2)) for rank in range(4)))
    watch.seconds(20, lambda step: (block(rank, step, loss=9 if rank < 2 else noisy(2)) for rank in range(4)), 60)
    assert watch.told == [("loss_spike", 0, "fires"), ("loss_spike", 1, "fires")]


@pytest.mark.parametrize(
    "losses",
    [
        [noisy(2) if step % 7 else 30.0 for step in range(200)],  # heavy tails
        [8.0 / (step + 1) for step in range(200)],  # falling
        [noisy(2, 0.6) for step in range(200)],  # noise
        [1e-6 * (1 + step % 50) for step in range(200)],  # learned by heart
        [2.0 + 0.5 * (step // 50) for step in range(200)],  # a curriculum
        [-3.0 + noisy(0.1) for step in range(200)],  # a loss below zero
    ],
    ids=["heavy tails", "falling", "noise", "by heart", "curriculum", "negative"],
)
def test_losses_that_are_as_losses_are_make_no_spike(losses: list[float]) -> None:
    watch = Watch()
    watch.seconds(200, lambda step: (block(0, step, loss=losses[step]), block(1, step, loss=noisy(2))))
    assert watch.told == []


def test_a_loss_of_a_few_samples_of_which_one_in_ten_is_hard_makes_no_spike_in_10_000_short_steps() -> None:
    watch, rng = Watch(), random.Random(0)
    for first in range(0, 10_000, 50):
        watch.second(
            *short_steps(first, first + 50, lambda _, step: 1.0 if step < 40 else rng.expovariate(1) if rng.random() < 0.1 else 0.02)
        )
    assert watch.told == []


def test_a_loss_that_is_as_high_again_as_in_its_first_steps_makes_no_spike() -> None:
    """It was learned within ten steps; then six hard ones come."""
    losses = [1.5, 1.4, 1.2, 1.0, 0.9, 0.8, 0.6, 0.5] + [0.02] * 25 + [0.4] * 6 + [0.02] * 40
    watch = Watch()
    watch.seconds(len(losses), lambda step: (block(0, step, loss=losses[step]), block(1, step, loss=noisy(2))))
    assert watch.told == []


# scaler.collapse


def scaled(scales: list[float]) -> Watch:
    watch = Watch()
    watch.seconds(len(scales), lambda step: (block(rank, step, scale=(scales[step],)) for rank in range(2)))
    return watch


def test_a_scale_that_falls_without_recovery_is_told() -> None:
    watch = scaled([65536.0] * 20 + [65536 / 2**step for step in range(15)])
    assert watch.told == [("scaler_collapse", None, "fires")]
    assert "from 65536 to 64" in watch.found[0].sign.said


@pytest.mark.parametrize(("fallen", "rank", "who"), [(1, 0, "rank 0"), (2, None, "2 of 3 ranks"), (3, None, "all 3 ranks")])
def test_whose_scale_fell_is_said(fallen: int, rank: int | None, who: str) -> None:
    """Two of many had been "all ranks"."""
    watch = Watch()
    watch.seconds(40, lambda step: (block(one, step, scale=(65536 / 2 ** (max(0, step - 20) if one < fallen else 0),)) for one in range(3)))
    assert watch.told == [("scaler_collapse", rank, "fires")]
    assert watch.found[0].sign.said.startswith(f"{who}, step ")


def test_a_scaler_that_looks_for_its_level_is_no_collapse() -> None:
    assert scaled([65536.0, 32768.0, 16384.0, 8192.0, *([4096.0] * 100), 8192.0, 4096.0]).told == []


# rank.straggler


def test_a_rank_that_needs_more_time_of_its_own_is_told() -> None:
    watch = Watch()
    watch.seconds(
        80, lambda step: (block(rank, step, own_ms=noisy(40 if rank == 2 else 20), wait_ms=25 if rank != 2 else 5) for rank in range(4))
    )
    assert watch.told == [("straggler", 2, "fires")]


def test_of_two_ranks_the_slow_one_is_told() -> None:
    watch = Watch()
    watch.seconds(80, lambda step: (block(0, step, own_ms=noisy(50), wait_ms=5), block(1, step, own_ms=noisy(20), wait_ms=35)))
    assert watch.told == [("straggler", 0, "fires")]


@pytest.mark.parametrize("power", [1, 2], ids=["linear", "quadratic"])
def test_a_rank_with_longer_sequences_is_no_straggler(power: int) -> None:
    watch = Watch()

    def step_of(step: int) -> list[StepBlock]:
        return [
            block(rank, step, own_ms=noisy(20 * (1 + (rank == 2)) ** power), wait_ms=60 if rank != 2 else 5, tensors=(labels(9, of=100 * (1 + (rank == 2))),))
            for rank in range(4)
        ]  # fmt: skip

    watch.seconds(80, step_of)
    assert watch.told == []


def test_steps_that_vary_five_times_with_their_length_make_no_straggler() -> None:
    watch = Watch()

    def step_of(step: int) -> list[StepBlock]:
        sizes = [RNG.randint(100, 500) for _ in range(4)]
        return [
            block(rank, step, own_ms=noisy(sizes[rank] / 5), wait_ms=max(sizes) / 5, tensors=(labels(9, of=sizes[rank]),))
            for rank in range(4)
        ]

    watch.seconds(200, step_of)
    assert watch.told == []


def test_a_rank_that_now_and_then_saves_or_logs_is_no_straggler() -> None:
    watch = Watch()
    watch.seconds(120, lambda step: (block(rank, step, own_ms=400 if rank == 0 and step % 10 == 0 else noisy(20)) for rank in range(4)))
    assert watch.told == []


# loader.stalled


def test_a_loader_that_becomes_slow_is_told_of_its_rank_and_not_as_a_straggler() -> None:
    watch = Watch()
    watch.seconds(40, lambda step: (block(rank, step, own_ms=21) for rank in range(3)))
    watch.seconds(
        40,
        lambda step: (block(rank, step, own_ms=221, loader_ms=201) if rank == 1 else block(rank, step, wait_ms=200) for rank in range(3)),
        40,
    )
    assert watch.told == [("slow_loader", 1, "fires")]


def test_loaders_that_become_slow_everywhere_are_told() -> None:
    watch = Watch()
    watch.seconds(40, lambda step: (block(rank, step, own_ms=21) for rank in range(2)))
    watch.seconds(60, lambda step: (block(rank, step, own_ms=221, loader_ms=200) for rank in range(2)), 40)
    assert sorted(watch.told) == [("slow_loader", 0, "fires"), ("slow_loader", 1, "fires")]


def test_a_run_that_was_bound_by_its_data_from_the_beginning_is_no_sign() -> None:
    watch = Watch()
    watch.seconds(120, lambda step: (block(rank, step, own_ms=noisy(300), loader_ms=noisy(250)) for rank in range(2)))
    assert watch.told == []


# batch.empty and ids


def test_labels_of_which_fewer_and_fewer_are_supervised_are_told() -> None:
    watch = Watch()
    watch.seconds(120, lambda step: [block(0, step, tensors=(labels(9, ignored=62 if step < 80 else 99),))])
    assert watch.told == [("supervision", 0, "fires")]
    assert "1 % of labels are supervised, the batches before had 38 %" in watch.found[0].sign.said


def test_a_small_share_that_was_always_small_is_right() -> None:
    watch = Watch()
    watch.seconds(120, lambda step: [block(0, step, tensors=(labels(9, ignored=97 + step % 3),))])
    assert watch.told == []


def test_ids_that_rise_towards_their_bound_are_told_where_the_rule_is_on() -> None:
    def rising(step: int) -> list[StepBlock]:
        return [block(0, step, tensors=(labels(4.0 * step + RNG.randint(0, 9), bound=499, key="user"),))]

    on, off = Watch(ids_creep={"enabled": True}), Watch()
    for watch in (on, off):
        watch.seconds(110, rising)
    assert on.told == [("ids_creep", 0, "fires")]
    assert "of at most 499" in on.found[0].sign.said
    assert off.told == []


def test_ids_from_all_over_their_table_are_no_sign() -> None:
    watch = Watch(ids_creep={"enabled": True})
    watch.seconds(200, lambda step: [block(0, step, tensors=(labels(RNG.randint(400, 499), bound=499),))])
    assert watch.told == []


# memory.pressure


def growing(rate_gib: float, *, start_gib: float = 40, retries: int = 0) -> Watch:
    watch = Watch()
    for step in range(120):
        allocated = int((start_gib + rate_gib * step + RNG.uniform(0, 0.001)) * GIB)
        memory = {
            "allocated_bytes": (allocated,),
            "reserved_bytes": (allocated + GIB,),
            "peak_bytes": (allocated,),
            "alloc_retries": (retries * step,),
        }
        watch.second(block(0, step, gpu="GPU-0", **memory), gpus=[sample(step, memory_used_bytes=allocated + 2 * GIB)])
    return watch


def test_memory_that_grows_step_by_step_is_told_with_the_step_at_which_it_is_full() -> None:
    watch = growing(0.1)
    assert watch.told == [("memory_pressure", 0, "fires")]
    said = watch.found[0].sign.said
    low, high = (int(part) for part in said.split("full in step ")[1].split(" at")[0].split(".."))
    assert low - 10 <= 390 <= high + 10, said  # 80 GiB less the 1 of others are reached in step 390


def leaking(*, sample_age_s: float) -> tuple[Watch, int]:
    """0.1 GiB more in each of 40 steps a second, reported five times a second, read four times; NVML answers each second. And the step with no room."""
    watch, begun, others = Watch(), 1_000_000, 2.5
    for report in range(5 * 15):
        steps = [*range(8 * report, 8 * report + 8)]
        read_at = [step // 10 * 10 for step in steps]
        figures = tuple(int((20 + 0.1 * read) * GIB) for read in read_at)
        of = {"step_time_ns": tuple((begun + step) * 25_000_000 for step in steps), "allocated_bytes": figures, "reserved_bytes": figures}
        sampled = int(max(0.0, steps[-1] - 40 * sample_age_s)) // 40 * 40
        used = int((20 + 0.1 * sampled + others) * GIB)
        seen = dataclasses.replace(sample(0, memory_used_bytes=used), time_ns=(begun + sampled) * 25_000_000)
        rows = batches(0, [(step, 1.0) for step in steps], gpu="GPU-0", peak_bytes=figures, alloc_retries=(0,) * 8, **of)
        watch.second(rows, gpus=[seen])
    return watch, int((80 - 20 - others) / 0.1)


@pytest.mark.parametrize("sample_age_s", [0.0, 0.9])
def test_a_leak_in_short_steps_is_told_whose_readings_are_fewer_than_its_reports_and_the_range_holds_the_true_step(
    sample_age_s: float,
) -> None:
    """A quarter of the reports repeat a reading: no leak of a job with short steps was steady enough. Used memory is as of up to a second before."""
    watch, full = leaking(sample_age_s=sample_age_s)
    assert watch.told == [("memory_pressure", 0, "fires")]
    low, high = map(int, re.findall(r"full in step (\d+)\.\.(\d+) at", watch.found[0].sign.said)[0])
    assert low <= full <= high and high - low < 60, (low, full, high)


def test_memory_that_stays_as_it_is_is_no_sign() -> None:
    assert growing(0.0).told == []


def test_an_allocator_that_has_to_try_again_is_told() -> None:
    assert growing(0.0, retries=1).told == [("memory_pressure", 0, "fires")]


# memory.pressure, by memory in pieces


def in_pieces(*, reserved_gib: float, peak_gib: float, used_gib: float, seconds: int = 40) -> Watch:
    watch = Watch()
    memory = {"allocated_bytes": (20 * GIB,), "reserved_bytes": (int(reserved_gib * GIB),), "peak_bytes": (int(peak_gib * GIB),)}
    for step in range(seconds):
        watch.second(block(0, step, gpu="GPU-0", **memory), gpus=[sample(step, memory_used_bytes=int(used_gib * GIB))])
    return watch


def test_memory_that_no_step_ever_needed_is_told_where_the_card_is_nearly_full_with_the_setting_that_helps() -> None:
    watch = in_pieces(reserved_gib=74, peak_gib=50, used_gib=76)
    assert watch.told == [("memory_fragmented", 0, "fires")]
    sign = watch.found[0].sign
    assert (
        "74.0 GiB are reserved, of which no step has needed more than 50.0: 24.0 GiB lie in pieces (30 % of the GPU, limit 20 %)"
        in sign.said
    )
    assert "expandable_segments:True" in sign.fix


@pytest.mark.parametrize(
    ("reserved", "peak", "used"), [(74, 70, 76), (50, 20, 52), (74, 50, 40)], ids=["needed", "room is left", "a cache that others may have"]
)
def test_a_cache_as_large_as_the_largest_step_or_with_room_beside_it_is_how_the_allocator_works(
    reserved: float, peak: float, used: float
) -> None:
    assert in_pieces(reserved_gib=reserved, peak_gib=peak, used_gib=used).told == []


def test_where_no_peak_is_told_nothing_is_said_of_pieces() -> None:
    assert in_pieces(reserved_gib=74, peak_gib=0, used_gib=76).told == []
