"""What the watchdog costs a step on GPUs: `python tests/bench/gpu_step.py --out FILE.json` on a machine that has two; `--only` takes an expression over cases.

One watched training whose hooks are switched on and off in blocks (on-off, off-on, ...), so that both sides see the same process, clocks and memory. The time
of a block is the device's own, between two CUDA events; nothing synchronises inside. Reported: the median of the blocks' ratios and its 95 % confidence
interval (bootstrap). A GPT-2-small-like model whose GPU is full (also compiled, under DDP and under FSDP2), the same with a batch that leaves it to the host's
cores, a model bound by its launches, and BERT under transformers' Trainer; batches that the loop moves to the GPU or that the loader yields there. With
the hooks off a few wrapped functions still ask whether they are on (1 to 2 us a step); the node process runs on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import Switch, compared

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
from machine import machine

SIZES = {  # width, layers, batch, length
    "full": (768, 12, 32, 1024),
    "gpt2-small-like": (768, 12, 8, 512),
    "launch-bound": (64, 4, 4, 64),
    "bert": (768, 12, 32, 128),
}
BLOCK_STEPS = {"full": 6, "gpt2-small-like": 12, "launch-bound": 120, "bert": 24}
CASES: dict[str, tuple[str, int, list[str]]] = {  # the model, ranks, options
    "launch-bound": ("launch-bound", 1, []),
    "launch-bound, batches on the GPU": ("launch-bound", 1, ["--resident"]),
    "GPT-2-small-like, small batch": ("gpt2-small-like", 1, []),
    "GPT-2-small-like, small batch, on the GPU": ("gpt2-small-like", 1, ["--resident"]),
    "GPT-2-small-like": ("full", 1, []),
    "GPT-2-small-like, compiled": ("full", 1, ["--compile"]),
    "GPT-2-small-like, DDP": ("full", 2, []),
    "GPT-2-small-like, DDP, compiled": ("full", 2, ["--compile"]),
    "GPT-2-small-like, FSDP2": ("full", 2, ["--fsdp2"]),
    "GPT-2-small-like, FSDP2, compiled": ("full", 2, ["--fsdp2", "--compile"]),
    "BERT, Trainer": ("bert", 1, []),
    "BERT, Trainer, two GPUs": ("bert", 2, []),
}
FIRST, WARM = 8, 40


def model_of(name: str) -> Any:
    import torch
    from torch import nn

    width, layers, _, _ = SIZES[name]
    words = 50257 if width > 64 else 512

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, batch_first=True, norm_first=True, dropout=0.0)
            self.table, self.blocks, self.head = nn.Embedding(words, width), nn.TransformerEncoder(layer, layers), nn.Linear(width, words)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.blocks(self.table(ids)))
            return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    return Net()


def batches_of(name: str, *, resident: bool) -> Any:
    """Endless, made before: the loader itself costs nothing. `resident`: on the GPU when the loop gets them."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    _, _, rows, length = SIZES[name]
    made = [{key: torch.randint(0, 512, (rows, length)).pin_memory() for key in ("ids", "labels")} for _ in range(16)]

    class Endless(IterableDataset):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            while True:
                yield from made

    def moved(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: tensor.cuda(non_blocking=True) for key, tensor in batch.items()} if resident else batch

    return iter(DataLoader(Endless(), batch_size=None, collate_fn=moved))


class Waits(Switch):
    """A switch that also times how long backward's entry waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_us: list[float] = []

    def time_waits(self) -> None:
        """How long backward's entry takes to hear what the device says of the batch."""
        here = self.active.rank()
        unread = getattr(here, "_unread", None)
        if unread is None:
            return
        theirs = unread.settle

        def settle(*, wait: bool) -> bool:
            began = time.perf_counter()
            settled: bool = theirs(wait=wait)
            if settled and wait:
                self.waits_us.append((time.perf_counter() - began) * 1e6)
            return settled

        unread.settle = settle


def wrapped(net: Any, args: argparse.Namespace) -> Any:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if args.fsdp2:
        from torch.distributed.fsdp import fully_shard

        for layer in net.blocks.layers:
            if args.compile:
                layer.compile()
            fully_shard(layer)
        return fully_shard(net)
    if args.compile:
        net.compile()
    return DistributedDataParallel(net, device_ids=[int(os.environ["LOCAL_RANK"])]) if dist.get_world_size() > 1 else net


def train(args: argparse.Namespace) -> None:
    """One rank. Prints the first steps' times, and of each round the block's time per step with the hooks off and on, in milliseconds."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    run = fine_tune if args.train == "bert" else loop
    run(args, measured(found, args.train, 0 if args.first_only else args.rounds))
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps(found), flush=True)
    dist.destroy_process_group()


def loop(args: argparse.Namespace, steps: Iterator[None]) -> None:
    import torch

    net: Any = wrapped(model_of(args.train).cuda(), args)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    batches = batches_of(args.train, resident=args.resident)
    for _ in steps:
        batch = next(batches)
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(batch["ids"].cuda(non_blocking=True), batch["labels"].cuda(non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fine_tune(args: argparse.Namespace, steps: Iterator[None]) -> None:
    """A classifier of BERT's own size by an unchanged Trainer; its end of a step asks for the next."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

    _, _, rows, length = SIZES[args.train]
    ids = torch.randint(0, 30522, (1024, length))
    samples = [{"input_ids": ids[n], "attention_mask": torch.ones(length, dtype=torch.long), "labels": n % 2} for n in range(len(ids))]

    class Ask(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = next(steps, "over") == "over"

    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            folder, per_device_train_batch_size=rows, max_steps=100_000, bf16=True, optim="adamw_torch_fused", learning_rate=1e-5, save_strategy="no",
            logging_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        next(steps)
        Trainer(BertForSequenceClassification(BertConfig(num_labels=2)), given, train_dataset=samples, callbacks=[Ask()]).train()


def measured(found: dict[str, Any], name: str, rounds: int) -> Iterator[None]:
    """One step of the training for each item: the first ones, then blocks with the hooks on and off. Into `found`, when it is over, what they took."""
    import torch

    first_ms = []
    for _ in range(FIRST):
        began = time.perf_counter()
        yield
        torch.cuda.synchronize()
        first_ms.append(round((time.perf_counter() - began) * 1e3, 2))
    found["first_ms"] = first_ms
    if not rounds:
        return
    yield from (None for _ in range(WARM))
    switch = Waits()
    switch.time_waits()
    blocks: list[tuple[bool, Any, Any]] = []
    steps = BLOCK_STEPS[name]
    for number in range(rounds):
        for on in (True, False) if number % 2 else (False, True):
            switch.turn(on=on)
            yield  # what the switch itself brings about is not measured
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield from (None for _ in range(steps))
            end.record()
            blocks.append((on, start, end))
    switch.turn(on=True)
    torch.cuda.synchronize()
    times = {side: [start.elapsed_time(end) / steps for on, start, end in blocks if on is side] for side in (False, True)}
    waits = sorted(switch.waits_us)
    found |= {"off_ms": times[False], "on_ms": times[True], "wait_us": waits[len(waits) // 2] if waits else None}


def launched(name: str, ranks: int, wrapper: list[str], *options: str) -> dict[str, Any]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        command = [*wrapper, *run, str(Path(__file__).resolve()), "--train", name, *options]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if not lines:
        raise RuntimeError(done.stdout[-1000:] + done.stderr[-3000:])
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
    return found


def judged(found: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    return {
        **compared(found["on_ms"], found["off_ms"]),
        "wait_at_backward_us": found["wait_us"] and round(found["wait_us"], 1),
        "first_steps_ms": {"watched": found["first_ms"], "plain": plain["first_ms"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", choices=SIZES)
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--first-only", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--ranks", type=int, help="of the cases of several ranks: so many instead of 2")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.train:
        train(args)
        return
    results: dict[str, Any] = {"machine": machine(), "command": "python tests/bench/gpu_step.py " + " ".join(sys.argv[1:])}
    watched = [sys.executable, "-m", "torch_watchdog.cli"]
    for title, (name, ranks, options) in CASES.items():
        if not re.search(args.only, title):
            continue
        ranks = args.ranks or ranks if ranks > 1 else 1
        plain = launched(name, ranks, [], "--first-only", *options)
        found = launched(name, ranks, watched, "--rounds", str(args.rounds), *options)
        results[title] = {"ranks": ranks, **judged(found, plain)}
        print(title, results[title], file=sys.stderr, flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
