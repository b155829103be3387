"""One of the named models under DDP, with batches that meet it wrong on purpose: `named.py bart --fault long@5 target@6`. It knows nothing of the watchdog.

A fault is put into row 1 of rank 1's batch in that step, by what the data set or the collation of a real training gets wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "agent" / "contract"))

from named_models import MODELS, VOCABULARY, Batch

ROW, ROWS, RANKS, STEPS = 1, 2, 2, 12
Fault = Callable[[Batch], Any]


def cell(key: str, place: tuple[int, ...], value: float) -> Fault:
    def fault(batch: Batch) -> None:
        batch[key][(ROW, *place)] = value

    return fault


def whole(key: str, change: Callable[[torch.Tensor], Any]) -> Fault:
    def fault(batch: Batch) -> None:
        batch[key] = change(batch[key])

    return fault


def long(batch: Batch) -> None:
    """A source of 40 tokens; the other rows are padded to it."""
    ids, mask = torch.ones(ROWS, 40, dtype=torch.long), torch.zeros(ROWS, 40, dtype=torch.long)
    length = batch["input_ids"].shape[1]
    ids[:, :length], mask[:, :length] = batch["input_ids"], 1
    ids[ROW, length:], mask[ROW, length:] = 5, 1
    batch["input_ids"], batch["attention_mask"] = ids, mask


def shifted(batch: Batch) -> None:
    """Labels shifted as they are, -100 and all, by a collation that does so with every row."""
    batch["decoder_input_ids"][:, 1:] = batch["labels"][:, :-1]


def swapped(batch: Batch) -> None:
    batch["bbox"][ROW, 6] = torch.tensor([300, 40, 100, 60])


FAULTS: dict[str, dict[str, Fault]] = {
    "bert": {"label": cell("labels", (), 3), "id": cell("input_ids", (4,), VOCABULARY), "numpy": whole("input_ids", torch.Tensor.numpy)},
    "bart": {"long": long, "target": cell("labels", (3,), VOCABULARY), "ignored": cell("decoder_input_ids", (4,), -100), "shifted": shifted},
    "layoutlmv3": {
        "above": cell("bbox", (5, 2), 1040), "negative": cell("bbox", (5, 0), -3), "swapped": swapped,
        "mask": whole("attention_mask", lambda mask: mask[:, :8]), "float": whole("bbox", torch.Tensor.float), "numpy": whole("bbox", torch.Tensor.numpy),
    },
    "losses": {
        "class": cell("labels", (), 5), "chance": cell("chance", (0,), 255.0), "nan": cell("age", (), float("nan")),
        "device": whole("labels", lambda labels: labels.to("meta")), "dtype": whole("labels", torch.Tensor.float),
        "shape": whole("chance", lambda chance: chance[:, 0]), "column": whole("price", lambda price: price[:, None]),
    },
}  # fmt: skip


def unchanged(batch: Batch) -> Batch:
    return batch


def each(change: Callable[[Any], Any]) -> Callable[[Batch], Batch]:
    return lambda batch: {key: change(value) for key, value in batch.items()}


# What the collation makes of a batch of tensors, and what the loop makes of that.
FORMS: dict[str, tuple[Callable[[Batch], Batch], Callable[[Batch], Batch]]] = {
    "tensor": (unchanged, unchanged),
    "array": (each(torch.Tensor.numpy), each(lambda array: torch.as_tensor(array).to("cpu"))),
    "int32": (each(lambda tensor: tensor.numpy().astype("int32")), each(lambda array: torch.from_numpy(array.astype("int64")))),
    "list": (each(torch.Tensor.tolist), each(lambda numbers: torch.tensor(numbers))),
}


class Samples(Dataset):
    """Sample i from its own generator."""

    def __init__(self, made: Callable[[], Batch]) -> None:
        self.made = made

    def __len__(self) -> int:
        return STEPS * ROWS * RANKS

    def __getitem__(self, index: int) -> tuple[int, Batch]:
        with torch.random.fork_rng():
            torch.manual_seed(index)
            return index, {key: tensor[0] for key, tensor in self.made().items()}


class Collate:
    def __init__(self, faults: dict[int, Fault], *, ragged: bool, form: Callable[[Batch], Batch]) -> None:
        self.faults, self.ragged, self.form = faults, ragged, form  # faults by the index of a sample

    def __call__(self, samples: list[tuple[int, Batch]]) -> Batch:
        batch = {key: torch.stack([sample[key] for _, sample in samples]) for key in samples[0][1]}
        if self.ragged:
            length = 20 - samples[0][0] // (ROWS * RANKS) % 5
            batch |= {key: batch[key][:, :length] for key in ("input_ids", "attention_mask")}
        for index, _ in samples:
            if index in self.faults:
                self.faults[index](batch)
        return self.form(batch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=FAULTS)
    parser.add_argument("--fault", nargs="*", default=[], help="NAME@STEP")
    parser.add_argument("--ragged", action="store_true", help="each step has a length of its own")
    parser.add_argument("--form", choices=FORMS, default="tensor")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, made = MODELS[given.model]
    form, tensors_of = FORMS[given.form]
    faults = {}
    for name, step in (fault.split("@") for fault in given.fault):
        faults[(int(step) * ROWS + ROW) * RANKS + 1] = FAULTS[given.model][name]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(make(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples, collate = Samples(made), Collate(faults, ragged=given.ragged, form=form)
    for step, batch in enumerate(
        DataLoader(samples, batch_size=ROWS, sampler=DistributedSampler(samples, shuffle=False), collate_fn=collate)
    ):
        model(**tensors_of(batch))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(1, f"rank {rank} trained in step {step}\n".encode())
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads end first: an exit in between aborts the process now and then, without us too


if __name__ == "__main__":
    main()
