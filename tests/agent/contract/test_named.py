"""Named failures of real models, tiny, in one process: the tensor, its first bad element, the range and the cause are told before the operator runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from guard_loop import Loop
from torch import nn
from torch.nn import functional as F  # noqa: N812

Batch = dict[str, Any]
Make: TypeAlias = Callable[[], nn.Module]
Change: TypeAlias = Callable[[Batch], Batch]
ROWS, VOCABULARY, POSITIONS = 4, 64, 32


def draw(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, (ROWS, *shape))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=POSITIONS, **sizes))


def bert_batch() -> Batch:
    ids = draw(0, VOCABULARY, 12)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": draw(0, 3)}


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tokens = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    return BartForConditionalGeneration(BartConfig(vocab_size=VOCABULARY, max_position_embeddings=POSITIONS, **sizes, **heads, **tokens))


def bart_batch() -> Batch:
    """Labels end in -100, which is legal; the decoder's inputs are the labels shifted, with the padding token in its place."""
    labels, ids = draw(3, VOCABULARY, 9), draw(3, VOCABULARY, 20)
    labels[:, 7:] = -100
    shifted = torch.cat([torch.full((ROWS, 1), 2), labels[:, :-1]], 1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
        "decoder_input_ids": shifted.masked_fill(shifted == -100, 1),
    }


def layoutlm() -> nn.Module:
    from transformers import LayoutLMv3Config, LayoutLMv3ForTokenClassification

    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}
    boxes = {"max_2d_position_embeddings": 1024, "coordinate_size": 4, "shape_size": 4, "visual_embed": False}
    tokens = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    config = LayoutLMv3Config(vocab_size=VOCABULARY, max_position_embeddings=40, input_size=16, patch_size=8, **sizes, **boxes, **tokens)
    return LayoutLMv3ForTokenClassification(config)


def layoutlm_batch() -> Batch:
    corner, extent = draw(0, 500, 10, 2), draw(0, 500, 10, 2)
    ids = draw(3, VOCABULARY, 10)
    return {
        "input_ids": ids,
        "bbox": torch.cat([corner, corner + extent], -1),
        "attention_mask": torch.ones_like(ids),
        "labels": draw(0, 3, 10),
    }


def first_layoutlm() -> nn.Module:
    from transformers import LayoutLMConfig, LayoutLMForTokenClassification

    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}
    return LayoutLMForTokenClassification(LayoutLMConfig(vocab_size=VOCABULARY, max_position_embeddings=40, **sizes))


class Losses(nn.Module):
    """The losses of torch itself over one layer, and a feature that becomes an index."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.one, self.ages = nn.Linear(6, 5), nn.Linear(6, 1), nn.Embedding(50, 6)

    def forward(self, x: torch.Tensor, age: torch.Tensor, labels: torch.Tensor, chance: torch.Tensor) -> tuple[torch.Tensor]:
        x = x + self.ages((age * 10).long())
        return (F.cross_entropy(self.classes(x), labels) + F.binary_cross_entropy(torch.sigmoid(self.one(x)), chance),)


def losses_batch() -> Batch:
    return {"x": torch.randn(ROWS, 6), "age": torch.rand(ROWS) * 4, "labels": draw(0, 5), "chance": draw(0, 2, 1).float()}


MODELS: dict[str, tuple[Make, Callable[[], Batch]]] = {
    "bert": (bert, bert_batch), "bart": (bart, bart_batch), "layoutlm": (first_layoutlm, layoutlm_batch),
    "layoutlmv3": (layoutlm, layoutlm_batch), "losses": (Losses, losses_batch),
}  # fmt: skip


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


def train(model: nn.Module, batch: Batch) -> None:
    model(**batch)[0].backward()


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
