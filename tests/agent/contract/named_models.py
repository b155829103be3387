"""The models of the named failures, tiny and with random weights, and a clean batch for each. Also used by the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

Batch = dict[str, Any]
Make: TypeAlias = Callable[[], nn.Module]
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

    def forward(
        self, x: torch.Tensor, age: torch.Tensor, labels: torch.Tensor, chance: torch.Tensor, price: torch.Tensor
    ) -> tuple[torch.Tensor]:
        x = x + self.ages((age * 10).long())
        one = self.one(x)
        return (
            F.cross_entropy(self.classes(x), labels) + F.binary_cross_entropy(torch.sigmoid(one), chance) + F.mse_loss(one[:, 0], price),
        )


def losses_batch() -> Batch:
    return {
        "x": torch.randn(ROWS, 6),
        "age": torch.rand(ROWS) * 4,
        "labels": draw(0, 5),
        "chance": draw(0, 2, 1).float(),
        "price": torch.rand(ROWS),
    }


MODELS: dict[str, tuple[Make, Callable[[], Batch]]] = {
    "bert": (bert, bert_batch), "bart": (bart, bart_batch), "layoutlm": (first_layoutlm, layoutlm_batch),
    "layoutlmv3": (layoutlm, layoutlm_batch), "losses": (Losses, losses_batch),
}  # fmt: skip


def train(model: nn.Module, batch: Batch) -> None:
    model(**batch)[0].backward()
