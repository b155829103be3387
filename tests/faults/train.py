"""A small training of two ranks in which things go wrong on schedule; knows nothing of the watchdog but the call that resumes, where it is to be restarted.

`train.py PLAN`: PLAN is JSON, the fields of `Shape`. `faults` among them is a list of [name, rank or null, first step, last step].
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

IGNORED = -100


@dataclass(kw_only=True)
class Shape:
    """What kind of training. `pause_s`: what a step takes besides computing, so that steps have a rhythm as real ones."""

    model: str = "text"
    batch: int = 8
    length: int = 12
    vocabulary: int = 64
    highest_id: int = 0  # of the data, where they do not use all of it
    classes: int = 4
    steps: int = 120
    evaluate_every: int = 0
    save_every: int = 0
    accumulate: int = 1
    clip: bool = False
    scaler: bool = False
    ignored: float = 0.0  # share of labels
    lengths: bool = False  # vary 1 to 5 times
    sorted_ids: bool = False
    heavy: bool = False  # a loss with heavy tails
    decay: bool = False
    bce: bool = False  # a second loss, of probabilities that no sigmoid has made
    padded: bool = False  # the table has a few rows more than the tokenizer has ids
    workers: int = 0
    pause_s: float = 0.02
    lr: float = 0.05
    seed: int = 0
    restart: str = ""  # how it ends at `ends_at`, where it is to begin again: "preempted" or "killed"
    ends_at: int = 0
    device: str = "cpu"
    room_gib: float = 0.0  # of each GPU's memory; the rest is taken at the beginning, so that little is soon full. 0: all of it
    faults: list[Any] = field(default_factory=list)


class Faults:
    """Which of them act on this rank at this step."""

    def __init__(self, plan: list[Any], rank: int) -> None:
        self._plan, self._rank = plan, rank

    def __call__(self, name: str, step: int) -> bool:
        return any(name == n and who in (None, self._rank) and first <= step <= last for n, who, first, last in self._plan)


class Tokenizer:
    """As much of one as a data set needs that was tokenized before."""

    def __init__(self, ids: int) -> None:
        self.ids = ids

    def get_vocab(self) -> dict[str, int]:
        return {f"word {number}": number for number in range(self.ids)}


class Batches(Dataset):
    """One item is one batch, so that a fault can be put where it belongs."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self.shape, self.rank, self.faulty = shape, rank, Faults(shape.faults, rank)
        if shape.padded:
            self.tokenizer = Tokenizer(shape.vocabulary)

    def __len__(self) -> int:
        return (self.shape.steps + 4) * self.shape.accumulate

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        s, step = self.shape, number // self.shape.accumulate
        rng = torch.Generator().manual_seed(1000 * s.seed + 10 * number + self.rank)
        if self.faulty("slow_loader", step):
            time.sleep(0.25)
        length = s.length * int(torch.randint(1, 6, (), generator=rng)) if s.lengths else s.length
        length = 40 * s.length if self.faulty("long_batch", step) else length
        labels = torch.randint(0, s.classes, (s.batch,), generator=rng)
        ids = (
            labels[:, None] * (s.vocabulary // s.classes) + torch.randint(0, s.vocabulary // s.classes, (s.batch, length), generator=rng)
        ).long()
        if s.highest_id:
            ids = ids % s.highest_id
        if self.faulty("ids_creep", step):
            begun = next(first for name, _, first, _ in s.faults if name == "ids_creep")
            ids[0, 0] = s.highest_id + 2 * (step - begun)
        if s.sorted_ids:
            ids = torch.clamp(torch.randint(0, 6, ids.shape, generator=rng) + number * (s.vocabulary - 6) // len(self), 0, s.vocabulary - 1)
        if s.ignored:
            labels[torch.rand(s.batch, generator=rng) < s.ignored] = IGNORED
            labels[0] = max(0, int(labels[0]))
        return self._spoiled(
            step, {"ids": ids, "labels": labels, "values": torch.randn(s.batch, 8, generator=rng) + ids.float().mean(1, keepdim=True) / 32}
        )

    def _spoiled(self, step: int, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ids, labels, values = batch["ids"], batch["labels"], batch["values"]
        if self.faulty("id_high", step):
            ids[1, 2] = self.shape.vocabulary + 7
        if self.faulty("id_negative", step):
            ids[0, 3] = -1
        if self.faulty("padded_id", step):
            ids[1, 2] = self.shape.vocabulary + 2
        if self.faulty("label_high", step):
            labels[2] = self.shape.classes + 1
        if self.faulty("label_negative", step):
            labels[1] = -1
        if self.faulty("nan_input", step):
            values[0, 0] = math.nan
        if self.faulty("supervision", step):
            labels[1:] = IGNORED
        if self.faulty("all_ignored", step):
            labels[:] = IGNORED
        if self.faulty("wrong_labels", step):
            batch["labels"] = torch.where(labels >= 0, (labels + 1) % self.shape.classes, labels)
        return batch


class Net(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = 16
        self.kind = shape.model
        self.table = nn.Embedding(shape.vocabulary + 4 * shape.padded, width)
        self.mix = (
            nn.TransformerEncoderLayer(width, 2, 32, batch_first=True, dropout=0.0)
            if shape.model == "attention"
            else nn.Sequential(nn.Linear(width, 32), nn.BatchNorm1d(32) if shape.model == "norm" else nn.ReLU(), nn.Linear(32, width))
        )
        self.values = nn.Linear(8, width)
        self.head = nn.Linear(width, shape.classes)

    def forward(self, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        seen = self.table(ids)
        if self.kind == "pairs":  # every position with every other, all of it in memory at once
            seen = (seen @ seen.mT).softmax(-1) @ seen
        seen = self.mix(seen).mean(1) if self.kind == "attention" else self.mix(seen.mean(1))
        return self.head(seen + self.values(values))


class Training:
    """The loop, and in it the faults that are not the data's."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.rank = shape, int(os.environ["RANK"])
        self.faulty = Faults(shape.faults, self.rank)
        torch.manual_seed(shape.seed)
        torch.set_num_threads(1)
        self.model = DistributedDataParallel(Net(shape).to(shape.device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=shape.lr, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, shape.steps) if shape.decay else None
        self.scaler = torch.amp.GradScaler(shape.device, init_scale=2.0**16, growth_interval=25) if shape.scaler else None
        self.kept: list[torch.Tensor] = []

    def run(self) -> None:
        loader = DataLoader(Batches(self.shape, self.rank), batch_size=None, num_workers=self.shape.workers)
        begun = self._resumed(loader) if self.shape.restart else 0
        batches, steps = iter(loader), self.shape.steps
        if any(name == "ends_early" and who == self.rank for name, who, *_ in self.shape.faults):
            steps = next(first for name, _, first, _ in self.shape.faults if name == "ends_early")
        for step in range(begun, steps):
            if step == self.shape.ends_at and self.shape.restart and not begun:
                self._end()
            self._before(step)
            for _ in range(self.shape.accumulate):
                self._micro_step(step, self._moved(next(batches)))
            self._update(step)
            self._between(step)

    def _moved(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.shape.device) for name, tensor in batch.items()}

    def _resumed(self, loader: DataLoader) -> int:
        import torch_watchdog_agent

        resumed = torch_watchdog_agent.restore(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, loader=loader)
        return 0 if resumed is None else resumed.step

    def _end(self) -> None:
        """What a scheduler or a machine does to one rank."""
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM if self.shape.restart == "preempted" else signal.SIGKILL)

    def _micro_step(self, step: int, batch: dict[str, torch.Tensor]) -> None:
        if self.faulty("straggler_sleep", step):
            time.sleep(0.06)
        if self.faulty("straggler_compute", step):
            ends = time.perf_counter() + 0.06
            while time.perf_counter() < ends:
                torch.randn(64, 64, device=self.shape.device) @ torch.randn(64, 64, device=self.shape.device)
        scores = self.model(batch["ids"], batch["values"])
        loss = nn.functional.cross_entropy(scores.float(), batch["labels"], ignore_index=IGNORED)
        if self.shape.heavy and step % 9 == 4:
            loss = loss + 11 * loss.detach()
        if self.shape.bce:
            loss = loss + 0.1 * self._chances_loss(step, scores)
        (self.scaler.scale(self._spoil(step, loss)) if self.scaler else self._spoil(step, loss)).backward()

    def _chances_loss(self, step: int, scores: torch.Tensor) -> torch.Tensor:
        begun = next((first for name, _, first, _ in self.shape.faults if name == "probability_creep"), 0)
        drift = 0.002 * (step - begun) if self.faulty("probability_creep", step) else 0.0
        chances = 0.5 + 0.2 * scores.float().tanh() + drift
        return nn.functional.binary_cross_entropy(chances, (scores.detach() > 0).float())

    def _spoil(self, step: int, loss: torch.Tensor) -> torch.Tensor:
        if self.faulty("nan_loss", step):
            return loss * math.nan
        if self.faulty("inf_loss", step):
            return loss + math.inf
        if self.faulty("spike", step):
            return loss + 20
        if self.faulty("nan_gradient", step):
            return loss + 0 * torch.sqrt(self.model.module.head.weight[0, 0] * 0)
        if self.faulty("overflow", step):
            return loss + 0.0 * (self.model.module.head.weight * 1e38).sum() * 1e6
        return loss

    def _update(self, step: int) -> None:
        if self.scaler:
            if self.faulty("overflow", step):
                self.model.module.head.weight.grad.fill_(math.inf)
            self.scaler.unscale_(self.optimizer)
        if self.shape.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler:
            self.scheduler.step()

    def _before(self, step: int) -> None:
        if self.faulty("exception", step):
            raise ValueError("a mistake of this script")
        if self.faulty("memory_error", step):
            raise MemoryError("cannot allocate 40 GiB")
        if self.faulty("exit", step):
            sys.exit(3)
        if self.faulty("kill", step):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.faulty("segfault", step):
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.faulty("nan_parameter", step):
            with torch.no_grad():
                self.model.module.head.bias[0] = math.nan
        if self.faulty("explode", step):
            for group in self.optimizer.param_groups:
                group["lr"] = 1e30
        if self.faulty("other_collective", step):
            dist.all_reduce(torch.ones(3))
        elif any(name == "other_collective" and first <= step <= last for name, _, first, last in self.shape.faults):
            dist.all_reduce(torch.ones(5))

    def _between(self, step: int) -> None:
        time.sleep(self.shape.pause_s)
        every = self.shape.evaluate_every
        if every and step % every == every - 1:
            self._evaluate()
        if self.shape.save_every and step % self.shape.save_every == 0 and self.rank == 0:
            time.sleep(0.15)  # what a save of the script's own takes

    def _evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            data = Batches(Shape(**{**vars(self.shape), "faults": [], "seed": 99}), self.rank)
            for batch in DataLoader(data, batch_size=None, sampler=range(6)):
                batch = self._moved(batch)
                self.model.module(batch["ids"], batch["values"])
        self.model.train()


def join() -> None:
    """In a later attempt of torchrun the ranks would find the addresses of the first one in their store."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0":
        dist.init_process_group("gloo")
        return
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=dist.PrefixStore(f"attempt-{attempt}", store), rank=rank, world_size=size)


def main() -> None:
    join()
    training = Training(Shape(**json.loads(sys.argv[1])))
    training.run()
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads may still be at it


if __name__ == "__main__":
    main()
