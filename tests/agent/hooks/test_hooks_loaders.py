"""Every kind of loader is heard: each batch once, and the sample behind a bad number by its index, where that is certain, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from listening import Heard, listen_to

pytestmark = pytest.mark.e2e

ROWS, BAD, BATCH = 64, 41, 4
BATCHES = ROWS // BATCH
TELLS_WORKERS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)  # and takes in_order=


def worker(number: int) -> int | None:
    return number if TELLS_WORKERS else None


def heard_all(heard: Heard) -> None:
    """Every batch is on the record, with the loss that the loop computed, and nothing of ours complained."""
    assert heard.complaints == []
    assert list(heard.losses.values()) == [None if loss is None else pytest.approx(loss) for loss in heard.printed]


@pytest.mark.parametrize(
    ("loop", "sample"),
    [
        ("plain", (BAD, None)),
        ("workers", (BAD, worker(0))),  # batch 10 of two workers
        pytest.param("any_order", (None, 0), marks=pytest.mark.skipif(not TELLS_WORKERS, reason="torch before 2.6 has no in_order")),
        ("stream", (None, None)),
        pytest.param("stream_of_workers", (None, worker(BAD % 2)), marks=pytest.mark.slow),
        ("batches_of_the_data_set", (BAD // BATCH, None)),
        ("stateful", (BAD, None)),
        pytest.param("stateful_workers", (BAD, 0), marks=pytest.mark.slow),
        pytest.param("loader_inside", (BAD, None), marks=pytest.mark.slow),
        pytest.param("named_tuples", (BAD, None), marks=pytest.mark.slow),
        pytest.param("nested", (BAD, None), marks=pytest.mark.slow),
        ("dataclasses_made_by_collation", (BAD, None)),
    ],
)
def test_a_bad_sample_is_named_by_its_index_and_worker_or_not_at_all(
    folder: Path, loop: str, sample: tuple[int | None, int | None]
) -> None:
    heard = listen_to(folder, "loops.py", loop)
    heard_all(heard)
    assert len(heard.printed) == BATCHES
    found = heard.samples
    assert len(set(found)) == 1, heard.noticed
    if loop == "any_order":
        assert found[0][0] is None
        assert found[0][1] in (0, 1)
    else:
        assert found[0] == sample
    assert heard.noticed[0].batch.value == 99
    assert "ids" in str(heard.noticed[0].batch.key)


@pytest.mark.parametrize(
    "how",
    [
        *("in_a_generator", "before_use", "one_iterator_a_batch"),
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("after_the_update", "in_a_cycle", "evaluated_in_between")),
    ],
)
def test_each_update_after_a_loader_was_left_is_counted_and_no_inner_step_of_a_batch(folder: Path, how: str) -> None:
    heard = listen_to(folder, "leaves.py", how)
    assert heard.complaints == []
    assert len(heard.steps) == heard.printed


def test_a_loader_left_in_mid_epoch_begins_anew_and_its_samples_stay_right(folder: Path) -> None:
    heard = listen_to(folder, "loops.py", "persistent_workers")
    heard_all(heard)
    assert len(heard.printed) == 5 + BATCHES
    assert set(heard.samples) == {(BAD, worker(0))}


def test_a_loader_that_is_left_again_and_again_is_heard_to_its_end(folder: Path) -> None:
    heard = listen_to(folder, "loops.py", "abandoned")
    heard_all(heard)
    assert len(heard.printed) == 3 * 3 + BATCHES
    assert set(heard.samples) == {(BAD, None)}


def test_both_of_two_zipped_loaders_are_heard(folder: Path) -> None:
    heard = listen_to(folder, "loops.py", "zipped")
    assert heard.complaints == []
    assert heard.steps[:2] == [2, 2]
    assert [loss for loss in heard.losses.values() if loss is not None] == pytest.approx(
        [loss for loss in heard.printed if loss is not None]
    )
    assert set(heard.samples) == {(BAD, None)}


def test_a_batch_that_a_worker_failed_to_make_does_not_shift_the_samples(folder: Path) -> None:
    heard = listen_to(folder, "loops.py", "a_worker_fails")
    heard_all(heard)
    assert len(heard.printed) == BATCHES - 1
    assert set(heard.samples) == {(BAD, worker(0))}


def test_any_iterable_of_batches_can_be_watched(folder: Path) -> None:
    heard = listen_to(folder, "loops.py", "watched_generator")
    heard_all(heard)
    assert [one.batch.value for one in heard.noticed[:1]] == [99]
    assert [one.batch.element[0] for one in heard.noticed[:1] if one.batch.element] == [BAD % BATCH]


def test_a_batch_that_was_changed_on_its_way_is_looked_at_as_the_loop_gets_it(folder: Path) -> None:
    heard = listen_to(folder, "loops.py", "watched_transform")
    heard_all(heard)
    assert set(heard.samples) == {(BAD, None)}
    assert ("more", (BATCH, 6)) in heard.tensors


def test_samples_of_a_loader_that_mixes_its_batches_are_not_guessed(folder: Path) -> None:
    heard = listen_to(folder, "loops.py", "watched_shuffle_buffer")
    heard_all(heard)
    assert heard.noticed
    assert {index for index, _ in heard.samples} == {None}


def test_evaluation_without_no_grad_is_told_from_training_by_the_mode_of_the_models(folder: Path) -> None:
    heard = listen_to(folder, "loops.py", "evaluation_between")
    assert heard.complaints == []
    assert heard.evaluated == 2 * 3
    assert list(heard.losses.values()) == pytest.approx(heard.printed)


def test_a_loop_that_trains_in_evaluation_mode_is_taken_for_training(folder: Path) -> None:
    heard = listen_to(folder, "loops.py", "trains_in_eval_mode")
    assert heard.complaints == []
    assert heard.evaluated <= 1
    assert len(heard.losses) >= BATCHES - 1


def test_a_declared_bound_is_held_from_the_first_batch(folder: Path) -> None:
    heard = listen_to(folder, "loops.py", "declared")
    heard_all(heard)
    assert [one.batch.sample.dataset_index for one in heard.noticed if one.batch.sample] == [BAD]
    bound = heard.noticed[0].bound
    assert bound is not None
    assert (bound.low, bound.high, bound.learned_from) == (0, 9, "declared by you")
    assert "loops.py" in str(bound.source)


def test_a_gate_can_be_marked_by_hand(folder: Path) -> None:
    heard = listen_to(folder, "loops.py", "gates_by_hand")
    assert heard.complaints == []
    assert heard.steps == [1] * 10 + [2] + [1] * 4


@pytest.mark.parametrize("loop", ["background_thread", "background_thread_that_copies"])
def test_a_batch_that_another_thread_has_fetched_is_met_at_its_forward(folder: Path, loop: str) -> None:
    heard = listen_to(folder, "loops.py", loop)
    assert heard.complaints == []
    assert len(heard.printed) == BATCHES
    assert len(heard.steps) == BATCHES  # the first, empty one, and all but the bad one
    assert set(heard.samples) == {(BAD, None)}
    assert heard.noticed[0].batch.value == 99
