"""Tiny models of many families, each with random clean batches and hand-made bad ones. Made for the guard's tests; knows nothing of the guard."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from torch.nn import functional as F  # noqa: N812  as everybody writes it

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

WORDS = 97
SMALL = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
SEQ2SEQ = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}

Batch = Any


@dataclass(frozen=True)
class Bad:
    """A change that makes a clean batch bad, and the tensor to blame."""

    key: str
    change: Callable[[Batch], Batch]


@dataclass(frozen=True)
class Family:
    name: str
    model: nn.Module
    clean: Callable[[], Batch]
    step: Callable[[nn.Module, Batch], None]
    bad: list[Bad] = field(default_factory=list)
    corrupt: bool = True


def ids(high: int, *shape: int, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape)


def size(longest: int = 20) -> tuple[int, int]:
    return random.choice([4, 4, 4, 4, 4, 3, 1, 2]), random.randint(2, longest)


def padded(rows: int, length: int, pad: int = 1, low: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, lengths = ids(WORDS, rows, length, low=low), torch.randint(1, length + 1, (rows,))
    lengths[random.randrange(rows)] = length
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    if random.random() < 0.25:
        mask = torch.ones_like(mask)
    return tokens * mask + pad * (1 - mask), mask


def hf(model: nn.Module, batch: Batch) -> None:
    model(**batch).loss.backward()


def put(key: Any, value: float) -> Bad:
    """One random cell gets this value."""

    def change(batch: Batch) -> Batch:
        tensor = batch[key]
        tensor[tuple(random.randrange(n) for n in tensor.shape)] = value
        return batch

    return Bad(str(key), change)


def put_at(key: Any, place: Any, value: Any) -> Bad:
    def change(batch: Batch) -> Batch:
        batch[key][place] = torch.as_tensor(value)
        return batch

    return Bad(str(key), change)


def instead(key: str, batch: Callable[[], Batch]) -> Bad:
    return Bad(key, lambda _: batch())


FAMILIES: dict[str, Callable[[], Family]] = {}


def family(make: Callable[[], Family]) -> Callable[[], Family]:
    FAMILIES[make.__name__] = make
    return make


@family
def bert_classifier() -> Family:
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, max_position_embeddings=32, num_labels=3))

    def batch(rows: int, length: int) -> Batch:
        tokens, mask = padded(rows, length, 0)
        return {"input_ids": tokens, "attention_mask": mask, "token_type_ids": ids(2, rows, length), "labels": ids(3, rows)}

    bad = [put("input_ids", WORDS), put("input_ids", -1), put("token_type_ids", 2), put("labels", 3), put("labels", -1)]
    return Family("bert_classifier", model, lambda: batch(*size()), hf, [*bad, instead("input_ids", lambda: batch(4, 35))])


@family
def bart() -> Family:
    config = transformers.BartConfig(
        vocab_size=WORDS, **SEQ2SEQ, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=24, pad_token_id=1,
        bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip

    def batch(rows: int, length: int, target: int) -> Batch:
        tokens, mask = padded(rows, length)
        labels, real = padded(rows, target)
        return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(real == 0, -100, labels)}

    def clean() -> Batch:
        return batch(*size(), random.randint(2, 20))

    bad = [
        *(put("input_ids", WORDS + 3), put("labels", WORDS), put("labels", -99), put("labels", -1)),
        *(instead("input_ids", lambda: batch(4, 30, 8)), instead("labels", lambda: batch(4, 8, 27))),
    ]
    return Family("bart", transformers.BartForConditionalGeneration(config), clean, hf, bad)


def _boxed(rows: int, length: int, pad: int) -> Batch:
    tokens, mask = padded(rows, length, pad)
    corner, extent = ids(501, rows, length, 2), ids(500, rows, length, 2)
    bbox = torch.cat([corner, corner + extent], -1) * mask[..., None]
    return {"input_ids": tokens, "attention_mask": mask, "bbox": bbox, "labels": torch.where(mask == 0, -100, ids(5, rows, length))}


@family
def layoutlmv3() -> Family:
    config = transformers.LayoutLMv3Config(
        **{**SMALL, "hidden_size": 24}, max_position_embeddings=34, coordinate_size=4, shape_size=4, max_2d_position_embeddings=1024,
        num_labels=5, visual_embed=False, pad_token_id=1, input_size=32,
    )  # fmt: skip
    bad = [put("bbox", 1024), put("bbox", -5), put("labels", 5), put("input_ids", WORDS)]
    return Family("layoutlmv3", transformers.LayoutLMv3ForTokenClassification(config), lambda: _boxed(*size(), 1), hf, bad)


@family
def layoutlm() -> Family:
    config = transformers.LayoutLMConfig(**SMALL, max_position_embeddings=34, max_2d_position_embeddings=1024, num_labels=5)
    bad = [put("bbox", 1024), put_at("bbox", (0, 0), [900, 10, 100, 20]), put("labels", -1)]
    return Family("layoutlm", transformers.LayoutLMForTokenClassification(config), lambda: _boxed(*size(), 0), hf, bad)


@family
def roberta() -> Family:
    config = transformers.RobertaConfig(**SMALL, max_position_embeddings=24, pad_token_id=1, num_labels=3, type_vocab_size=1)

    def batch(rows: int, length: int) -> Batch:
        tokens, mask = padded(rows, length)
        return {"input_ids": tokens, "attention_mask": mask, "labels": ids(3, rows)}

    def too_long() -> Batch:
        made = batch(4, 30)
        made["input_ids"][0] = ids(WORDS, 30, low=4)
        return made

    bad = [put("input_ids", WORDS), put("labels", 3), instead("input_ids", too_long)]
    return Family("roberta", transformers.RobertaForSequenceClassification(config), lambda: batch(*size()), hf, bad)


def _causal(rows: int, length: int) -> Batch:
    tokens, mask = padded(rows, length, 0)
    labels = torch.where(mask == 0, -100, tokens)
    labels[:, -1] = tokens[:, -1]  # there is always something to learn, also in rows of two
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@family
def gpt2() -> Family:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=24, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    bad = [
        *(put("input_ids", WORDS), put_at("labels", (0, 1), WORDS), put_at("labels", (0, 1), -3)),
        instead("input_ids", lambda: _causal(4, 25)),
    ]
    return Family("gpt2", transformers.GPT2LMHeadModel(config), lambda: _causal(*size()), hf, bad)


@family
def gpt2_classifier() -> Family:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=24, pad_token_id=0, num_labels=3, bos_token_id=1, eos_token_id=2
    )

    def batch(rows: int, length: int) -> Batch:
        tokens, mask = padded(rows, length, 0)
        return {"input_ids": tokens, "attention_mask": mask, "labels": ids(3, rows)}

    bad = [put("input_ids", WORDS), put("labels", 3), instead("input_ids", lambda: batch(4, 26))]
    return Family("gpt2_classifier", transformers.GPT2ForSequenceClassification(config), lambda: batch(*size()), hf, bad)


@family
def llama() -> Family:
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 2}, max_position_embeddings=64, pad_token_id=0)
    bad = [put("input_ids", WORDS), put("input_ids", -1), put_at("labels", (0, 1), WORDS), put_at("labels", (0, 1), -3)]
    return Family("llama", transformers.LlamaForCausalLM(config), lambda: _causal(*size()), hf, bad)


@family
def t5() -> Family:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, num_layers=1, num_heads=2, d_ff=32, decoder_start_token_id=0, pad_token_id=0
    )

    def clean() -> Batch:
        tokens, mask = padded(*size(), 0)
        labels, real = padded(len(tokens), random.randint(2, 20), 0)
        return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(real == 0, -100, labels)}

    return Family(
        "t5", transformers.T5ForConditionalGeneration(config), clean, hf, [put("input_ids", WORDS), put("labels", WORDS), put("labels", -5)]
    )


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.head = nn.Embedding(50, 8), nn.Embedding(70, 8), nn.Linear(16, 5)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.user(user), self.item(item)], -1))


@family
def two_towers() -> Family:
    def clean() -> Batch:
        rows = random.choice([8, 8, 8, 3])
        return [ids(50, rows), ids(70, rows), ids(5, rows)]

    def step(model: nn.Module, batch: Batch) -> None:
        F.cross_entropy(model(batch[0], batch[1]), batch[2]).backward()

    return Family("two_towers", TwoTowers(), clean, step, [put(0, 50), put(1, 70), put(2, 5), put(2, -1)])


@family
def segmentation() -> Family:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6))

    def clean() -> Batch:
        rows, high, wide = random.choice([4, 4, 2]), random.choice([8, 12]), random.choice([8, 10])
        mask = ids(6, rows, high, wide)
        mask[torch.rand(rows, high, wide) < 0.1] = 255
        return {"image": torch.randn(rows, 3, high, wide), "mask": mask.to(torch.uint8)}

    def step(model: nn.Module, batch: Batch) -> None:
        F.cross_entropy(model(batch["image"]), batch["mask"].long(), ignore_index=255).backward()

    return Family("segmentation", model, clean, step, [put("mask", 6), put("mask", 254)])


class Choices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 6)

    def forward(self, cat: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(torch.cat([F.one_hot(cat, 12).float(), x], -1))))


@family
def one_hot_and_gather() -> Family:
    def clean() -> Batch:
        rows = random.choice([8, 8, 5])
        return {
            "cat": ids(12, rows), "x": torch.randn(rows, 4), "act": ids(6, rows), "seq": torch.randn(rows, 7, 8), "last": ids(8, rows, low=1)
        }  # fmt: skip

    def step(model: nn.Module, batch: Batch) -> None:
        chosen = model(batch["cat"], batch["x"]).gather(1, batch["act"].unsqueeze(1)).squeeze(1)
        ends = batch["seq"][torch.arange(len(batch["last"])), batch["last"] - 1].sum(-1)
        (chosen.sum() + ends.sum() + torch.zeros(6).scatter_add(0, batch["act"], chosen).sum()).backward()

    return Family("one_hot_and_gather", Choices(), clean, step, [put("cat", 12), put("cat", -1), put("act", 6), put("last", 8)])


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(40, 8, mode="mean"), nn.Linear(8, 3)

    def forward(self, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.head(self.bag(values, offsets)))


@family
def bags() -> Family:
    def clean() -> Batch:
        rows = random.choice([6, 6, 2])
        counts = torch.randint(1, 5, (rows,))
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)[:-1]])
        return {"values": ids(40, int(counts.sum())), "offsets": offsets, "y": ids(2, rows, 3).float()}

    def step(model: nn.Module, batch: Batch) -> None:
        F.binary_cross_entropy(model(batch["values"], batch["offsets"]), batch["y"]).backward()

    bad = [put("values", 40), put("y", 2.0), put("y", -1.0), put_at("offsets", 0, 1), put_at("offsets", -1, 99), put_at("offsets", -1, -1)]
    return Family("bags", Bags(), clean, step, bad)


class Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 4)
        self.register_buffer("offsets", torch.tensor([0, 10, 20]))

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(fields + self.offsets).sum(1))


@family
def labels_made_in_the_loop() -> Family:
    def clean() -> Batch:
        rows = random.choice([6, 6, 2])
        return {"fields": ids(10, rows, 3), "y": ids(5, rows, low=1), "w": torch.cat([torch.rand(rows - 1), torch.zeros(1)])}

    def step(model: nn.Module, batch: Batch) -> None:
        labels = batch["y"].clone()
        labels -= 1
        labels[batch["w"] > 0.9] = -100
        F.cross_entropy(model(batch["fields"]), labels).backward()

    def unignored(value: int) -> Bad:
        def change(batch: Batch) -> Batch:
            batch["y"][0], batch["w"][0] = value, 0.1
            return batch

        return Bad("y", change)

    return Family("labels_made_in_the_loop", Offset(), clean, step, [put_at("fields", (0, 2), 10), unignored(0), unignored(5)])


class Binned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(101, 8), nn.Linear(8, 1)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.head(self.table((t * 100).round().long()))


@family
def binned() -> Family:
    def step(model: nn.Module, batch: Batch) -> None:
        model(batch["t"]).sum().backward()

    return Family("binned", Binned(), lambda: {"t": torch.rand(random.choice([6, 4]))}, step, [put("t", 1.02), put("t", -0.2)])


class ThroughPython(nn.Module):
    """An index that goes through lists, and a length that is read off the data."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(20, 8), nn.Embedding(16, 8)

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        again = torch.tensor([value % 20 for value in x.tolist()])
        return self.table(again).sum() + self.places(torch.arange(int(n.max()))).sum()


@family
def through_python() -> Family:
    def clean() -> Batch:
        rows = random.choice([6, 4])
        return {"x": ids(100, rows), "n": ids(16, rows, low=1)}

    def step(model: nn.Module, batch: Batch) -> None:
        model(batch["x"], batch["n"]).backward()

    return Family("through_python", ThroughPython(), clean, step, corrupt=False)


class Codebook(nn.Module):
    """An index computed from the model's output, and random negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes = nn.Linear(4, 8), nn.Embedding(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encode(x)
        nearest, negatives = torch.cdist(z, self.codes.weight).argmin(-1), torch.randint(0, 16, (len(x),))
        return ((self.codes(nearest) - z) ** 2).sum() + self.codes(negatives).sum()


@family
def codebook() -> Family:
    return Family("codebook", Codebook(), lambda: {"x": torch.randn(5, 4)}, lambda m, b: m(b["x"]).backward(), corrupt=False)


@family
def ctc() -> Family:
    model = nn.Sequential(nn.Linear(6, 12), nn.LogSoftmax(-1))

    def clean() -> Batch:
        rows, frames, longest = random.choice([4, 3]), random.randint(10, 14), random.randint(3, 5)
        return {
            "x": torch.randn(frames, rows, 6), "y": ids(12, rows, longest, low=1), "frames": torch.full((rows,), frames),
            "lengths": torch.randint(1, longest + 1, (rows,)),
        }  # fmt: skip

    def step(model: nn.Module, batch: Batch) -> None:
        F.ctc_loss(model(batch["x"]), batch["y"], batch["frames"], batch["lengths"]).backward()

    bad = [put_at("y", (0, 0), 12), put("frames", 40), put("lengths", 9)]
    return Family("ctc", model, clean, step, bad, corrupt=False)


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables, self.head = nn.ModuleList([nn.Embedding(n, 8) for n in (5, 6, 7)]), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(sum(table(x[..., i]) for i, table in enumerate(self.tables)))


@family
def columns_and_active_labels() -> Family:
    def clean() -> Batch:
        rows, length = size()
        active = (torch.rand(rows, length) > 0.3).long()
        active[0, 0] = 1
        return {"x": torch.stack([ids(n, rows, length) for n in (5, 6, 7)], -1), "y": ids(4, rows, length), "active": active}

    def step(model: nn.Module, batch: Batch) -> None:
        active = batch["active"] == 1
        F.cross_entropy(model(batch["x"])[active], batch["y"][active]).backward()

    bad = [put_at("x", (0, -1, 0), 5), put_at("x", (0, -1, 1), 6), put_at("x", (0, -1, 2), 7), put_at("y", (0, 0), 4)]
    return Family("columns_and_active_labels", Columns(), clean, step, bad)


class Remapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.register_buffer("remap", torch.randperm(40) % 11)

    def forward(self, x: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        return torch.zeros(9, 8).index_add(0, group, self.table(self.remap[x])).sum()


@family
def remapped() -> Family:
    def clean() -> Batch:
        rows = random.choice([6, 4])
        return {"x": ids(40, rows), "group": ids(9, rows)}

    def step(model: nn.Module, batch: Batch) -> None:
        model(batch["x"], batch["group"]).backward()

    return Family("remapped", Remapped(), clean, step, [put("x", 40), put("x", -41), put("group", 9)])
