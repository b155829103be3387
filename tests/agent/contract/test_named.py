"""Named failures of real models, tiny, in one process: the tensor, its first bad element, the range and the cause are told before the operator runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from guard_loop import Loop
from named_models import MODELS, ROWS, VOCABULARY, Batch, bart_batch, bert_batch, draw, layoutlm_batch, losses_batch, train
from torch import nn
from torch.nn import functional as F  # noqa: N812

Change: TypeAlias = Callable[[Batch], Batch]


def cell(key: str, place: tuple[int, ...], value: float) -> Change:
    def changed(batch: Batch) -> Batch:
        batch[key][place] = value
        return batch

    return changed


def put(key: str, change: Callable[[Any], Any]) -> Change:
    return lambda batch: {**batch, key: change(batch[key])}


def swapped(batch: Batch) -> Batch:
    """Left and right of one box change places."""
    batch["bbox"][2, 6] = torch.tensor([300, 40, 100, 60])
    return batch


def too_long(batch: Batch) -> Batch:
    ids = draw(3, VOCABULARY, 40)
    return {**batch, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def loop_of(name: str) -> Loop:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    loop = Loop(make(), train)
    for _ in range(5):
        assert loop.step(batch(), go_on=False).violation is None
    return loop


BOXES = "layoutlmv3.embeddings.x_position_embeddings"
VALUES = [
    ("bert", cell("labels", (1,), 3), "labels", (1,), 3, (0, 2), "cross_entropy", None, "num_labels"),
    ("bart", cell("labels", (1, 3), 64), "labels", (1, 3), 64, (0, 63), "cross_entropy", None, "number of classes (64)"),
    (
        "bart",
        cell("decoder_input_ids", (1, 7), -100),
        "decoder_input_ids",
        (1, 7),
        -100,
        (0, 63),
        "embedding",
        "model.decoder.embed_tokens",
        "pad id",
    ),
    ("bart", too_long, "input_ids", (0, 32), None, (0, 33), "embedding", "model.encoder.embed_positions", "max_length=32"),
    ("layoutlmv3", cell("bbox", (1, 5, 2), 1040), "bbox", (1, 5, 2), 1040, (0, 1023), "embedding", BOXES, "true page size"),
    ("layoutlmv3", cell("bbox", (1, 5, 0), -3), "bbox", (1, 5, 0), -3, (0, 1023), "embedding", BOXES, "below 0"),
    ("losses", cell("labels", (2,), 5), "labels", (2,), 5, (0, 4), "cross_entropy", None, "head has one class too few"),
    ("losses", cell("chance", (1, 0), 255.0), "chance", (1, 0), 255.0, (0, 1), "binary_cross_entropy", None, "divide by 255"),
    ("losses", cell("age", (3,), float("nan")), "age", (3,), None, (0, 49), "embedding", "ages", "NaN"),
]
TYPES = [
    ("layoutlmv3", put("bbox", lambda box: box.float()), "batch.dtype", "bbox", "embedding", ".long()"),
    ("layoutlmv3", put("bbox", lambda box: box.numpy()), "batch.dtype", "bbox", "embedding", "as_tensor"),
    ("losses", put("labels", lambda labels: labels.float()), "batch.dtype", "labels", "cross_entropy", "int64"),
    ("losses", put("chance", lambda chance: chance[:, 0]), "batch.shape", "chance", "binary_cross_entropy", "(4, 1)"),
]


@pytest.mark.parametrize(("name", "change"), [case[:2] for case in (*VALUES, *TYPES)])
def test_each_of_these_batches_ends_a_training_that_nobody_watches(name: str, change: Change) -> None:
    make, batch = MODELS[name]
    with pytest.raises((IndexError, RuntimeError, TypeError, ValueError)):
        train(make(), change(batch()))


@pytest.mark.parametrize(("name", "change", "key", "element", "value", "allowed", "op", "module", "words"), VALUES)
def test_a_bad_value_is_named_before_the_operator_runs(
    name: str, change: Change, key: str, element: tuple[int, ...], value: float | None, allowed: tuple[int, int], op: str, module: str | None, words: str
) -> None:  # fmt: skip
    seen = loop_of(name).step(change(MODELS[name][1]()), go_on=False)
    found = seen.checked.violation or seen.refused
    assert found is not None and found.bound is not None
    assert (found.batch.key, found.batch.element, found.severity) == (key, element, "critical")
    assert (found.kind == "probability.out_of_range") is (op == "binary_cross_entropy")  # a target is no index
    assert (found.bound.low, found.bound.high, found.bound.op, found.bound.module) == (*allowed, op, module)
    assert value is None or found.batch.value == value  # of a NaN, and of a length, there is none to compare
    assert words in found.cause + found.fix


@pytest.mark.parametrize(("name", "change", "kind", "key", "op", "words"), TYPES)
def test_a_tensor_of_another_kind_is_named_when_the_operator_refuses_it(
    name: str, change: Change, kind: str, key: str, op: str, words: str
) -> None:
    found = loop_of(name).step(change(MODELS[name][1]())).violation
    assert found is not None and found.bound is not None
    assert (found.kind, found.batch.key, found.bound.op) == (kind, key, op)
    assert words in found.summary + found.cause + found.fix


def test_swapped_corners_are_refused_by_the_model_that_looks_up_the_width_and_pass_in_the_one_that_clips_it() -> None:
    first, third = loop_of("layoutlm"), loop_of("layoutlmv3")
    found = first.step(swapped(layoutlm_batch()), go_on=False).checked.violation
    assert found is not None and found.bound is not None and found.batch.derived is not None
    assert (found.batch.key, found.batch.derived.value, found.bound.low) == ("bbox", -200, 0)
    assert "two corners are swapped" in found.cause
    assert third.step(swapped(layoutlm_batch()), go_on=False).violation is None


def test_the_position_of_the_first_token_too_many_is_named_not_the_last_one() -> None:
    found = loop_of("bart").step(too_long(bart_batch())).violation
    assert found is not None and found.batch.derived is not None
    assert (found.batch.element, found.batch.derived.value, found.batch.count) == ((0, 32), 34, 8 * ROWS)


@pytest.mark.parametrize("name", ["bert", "bart", "layoutlmv3"])
@pytest.mark.parametrize("shape", [(ROWS, 8), (ROWS, 24), (ROWS - 1, 12)])
def test_a_mask_of_another_shape_that_the_model_fills_or_cuts_without_a_word_is_a_warning(name: str, shape: tuple[int, int]) -> None:
    loop, batch = loop_of(name), MODELS[name][1]()
    seen = loop.step({**batch, "attention_mask": torch.ones(shape, dtype=torch.int64)}, go_on=False)
    (warning,) = seen.checked.warnings
    assert seen.violation is None
    assert (warning.kind, warning.severity, warning.batch.key, warning.batch.shape) == ("batch.shape", "warning", "attention_mask", shape)
    assert f"does not fit input_ids {tuple(batch['input_ids'].shape)}" in warning.summary


def test_a_mask_that_never_had_the_shape_of_the_ids_is_no_warning() -> None:
    loop = Loop(MODELS["bert"][0](), train)
    for length in (8, 9, 12, 12, 8, 10, 9):
        batch = {**bert_batch(), "attention_mask": torch.ones(ROWS, length, dtype=torch.int64)}
        assert loop.step(batch, go_on=False).checked.warnings == ()


def test_labels_on_another_device_are_named_with_the_device_that_they_always_were_on() -> None:
    loop = loop_of("losses")
    found = loop.step(put("labels", lambda labels: labels.to("meta"))(losses_batch())).violation
    assert found is not None
    assert (found.kind, found.batch.key, found.batch.device) == ("batch.device", "labels", "meta")
    assert found.summary == "labels is on device meta; cross_entropy had it on cpu"


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
def test_a_loss_of_a_row_against_a_column_is_a_warning_in_the_first_step_and_told_once(loss: Callable[..., torch.Tensor]) -> None:
    loop = Loop(nn.Linear(3, 1), lambda model, batch: loss(model(batch["x"])[:, 0], batch["y"]).backward())
    for _ in range(5):
        assert loop.step({"x": torch.randn(10, 3), "y": torch.randn(10, 1)}, go_on=False).violation is None
    (warning,) = loop.noticed
    assert (warning.kind, warning.severity, warning.batch.key, warning.batch.shape) == ("batch.shape", "warning", "y", (10, 1))
    assert "(10, 1) against an output (10,)" in warning.summary
    assert "100 differences in place of 10" in warning.cause
    assert warning.bound is not None and "test_named.py" in (warning.bound.source or "")


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("shape", [(10,), (1,), (1, 1)])
def test_a_loss_in_which_one_shape_takes_in_the_other_is_no_warning(shape: tuple[int, ...]) -> None:
    loop = Loop(nn.Linear(3, 1), lambda model, batch: F.mse_loss(model(batch["x"])[:, 0], batch["y"]).backward())
    for _ in range(5):
        loop.step({"x": torch.randn(10, 3), "y": torch.randn(*shape)}, go_on=False)
    assert loop.noticed == []
