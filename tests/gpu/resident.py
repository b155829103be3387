"""Batches that are on the GPU already, looked at closely: `python tests/gpu/resident.py --out FILE.json`.

For every kind of asserts.py and some computed indices: the steady checks never synchronise (torch's own sync debug mode raises), a clean batch keeps its bits,
a bad one is told in the words of the CPU and breaks nothing; what the checks cost the training thread and the device; how many graphs inductor compiles with
and without the watchdog.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "agent/contract"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from bad_value import KINDS, Batch, Kind, Net, samples
from guard_loop import Loop
from launching import Ended, environment
from machine import machine
from torch.utils.data import DataLoader

from torch_watchdog_agent.contract import Guard
from torch_watchdog_agent.contract.flatten import leaves_of, replaced
from torch_watchdog_agent.errors import BadBatchError

STEADY_FROM, STEADY = 5, 300
WATCHDOG = [sys.executable, "-m", "torch_watchdog.cli"]


def positions(net: Net, batch: Batch) -> torch.Tensor:
    real = (batch["i"] != 1).long()
    return net.table(real.cumsum(1) * real + 94).sum()


def next_tokens(net: Net, batch: Batch) -> torch.Tensor:
    labels = torch.nn.functional.pad(batch["i"], (0, 1), value=-100)[:, 1:].contiguous()
    logits = net.table(batch["i"].clamp(min=0)) @ net.grid[:, :4].expand(8, 4)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def widths(net: Net, batch: Batch) -> torch.Tensor:
    return net.table(batch["i"][..., 1] - batch["i"][..., 0]).sum()


def tokens(rng: torch.Generator) -> Batch:
    row = torch.randint(2, 90, (9,), generator=rng)
    row[5:] = 1
    return {"i": row}


def boxes(rng: torch.Generator) -> Batch:
    return {"i": torch.randint(0, 40, (6, 2), generator=rng).sort(-1).values}


COMPUTED = {
    "positions by cumsum": Kind(4, tokens, ("i", (2, 5), 2), positions),
    "labels of the next token": Kind(4, lambda rng: {"i": torch.randint(0, 4, (6,), generator=rng)}, ("i", (1, 3), 4), next_tokens),
    "widths of boxes": Kind(4, boxes, ("i", (2, 3, 0), 80), widths),
}


def moved(batch: Any) -> Any:
    return replaced(batch, {key: tensor.cuda() for key, tensor in leaves_of(batch).items()})


class Resident(Loop):
    """The loop of the guard's tests, with batches on the GPU. In a steady step a synchronisation of ours raises, which turns the guard off."""

    steps = 0

    def step(self, batch: Any, **_: Any) -> Any:
        self.steps += 1
        batch = moved(batch)
        kept = {key: tensor.clone() for key, tensor in leaves_of(batch).items()}
        torch.cuda.set_sync_debug_mode("error" if self.steps > STEADY_FROM else "default")
        checked = self.guard.fetched(batch, indices=None, worker=None)
        handed, under_check = self.guard.started(checked, batch, change=True)
        torch.cuda.set_sync_debug_mode("default")
        if checked.violation is not None:
            return checked.violation
        self.guard.handed_over(checked, handed)
        try:
            self.run(self.model, handed)
        except BadBatchError as error:
            return error.violation
        violation = None
        if under_check is not None:
            under_check.sent.wait()
            violation = self.guard.said_of(under_check)
        self.guard.step_ended()
        if violation is None:
            assert all(torch.equal(tensor, kept[key]) for key, tensor in leaves_of(handed).items()), "a clean batch was changed"
        return violation


def one_kind(kind: Kind) -> dict[str, Any]:
    """Clean steps, then the bad one, on the GPU and on the CPU. A step that assumes a CUDA failure would end this process: none does."""
    torch.manual_seed(0)
    net = Net(768)
    run = lambda model, batch: kind.loss(model, batch).backward()  # noqa: E731
    cpu, gpu = Loop(copy.deepcopy(net), run), Resident(net.cuda(), run)
    alarms, found, expected = 0, None, None
    for number, batch in enumerate(DataLoader(samples(kind, 8), batch_size=kind.rows)):
        found, expected = gpu.step(copy.deepcopy(batch)), cpu.step(batch).violation
        if number == 8:
            break
        alarms += found is not None
    torch.cuda.synchronize()  # raises if an assertion was reached after all
    same = found is not None and expected is not None and found.summary == expected.summary
    return {"alarms before": alarms, "same words as on the CPU": same, "words": found and found.summary, "said": gpu.said}


def cost() -> dict[str, Any]:
    """The whole of it for [8, 4096] ids and labels: microseconds of the training thread, and of the device by events."""
    net = torch.nn.ModuleDict({"table": torch.nn.Embedding(50257, 8), "head": torch.nn.Linear(8, 512)}).cuda()

    def run(_: Any, batch: Any) -> None:
        logits = net["head"](net["table"](batch["ids"])).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()).backward()

    batch = {"ids": torch.randint(0, 512, (8, 4096), device="cuda"), "labels": torch.randint(0, 512, (8, 4096), device="cuda")}
    guard = Guard(say=print, on_refused=lambda _: None)
    thread_us, device_us, sync_us = [], [], []
    for number in range(STEADY):
        torch.cuda.synchronize()
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start = time.perf_counter()
        checked = guard.fetched(batch, indices=None, worker=None)
        fetched = time.perf_counter()
        began.record()
        here = time.perf_counter()
        handed, under_check = guard.started(checked, batch, change=True)
        taken = time.perf_counter() - here + fetched - start
        ended.record()
        guard.handed_over(checked, handed)
        if number < 20:
            run(None, handed)
        torch.cuda.synchronize()
        if under_check is not None:
            here = time.perf_counter()
            under_check.sent.wait()
            guard.said_of(under_check)
            sync_us.append((time.perf_counter() - here) * 1e6)
            thread_us.append(taken * 1e6)
            device_us.append(began.elapsed_time(ended) * 1e3)
        guard.step_ended()
    middle = {"thread_us": thread_us, "device_us": device_us, "answer_us": sync_us}
    return {name: round(statistics.median(times), 1) for name, times in middle.items()}


COMPILED = """
import json, sys, torch
from torch import nn
from torch.utils.data import DataLoader
from torch._dynamo.utils import counters
resident = "--resident" in sys.argv
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 100)).cuda()
model = torch.compile(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
rows = [{"ids": torch.randint(0, 100, (16,)), "labels": torch.randint(0, 100, (16,))} for _ in range(8 * 24)]
collate = torch.utils.data.default_collate
move = lambda batch: {key: tensor.cuda() for key, tensor in batch.items()}
for batch in DataLoader(rows, batch_size=8, collate_fn=(lambda rows: move(collate(rows))) if resident else collate):
    batch = batch if resident else move(batch)
    loss = nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("GRAPHS " + json.dumps({"graphs": counters["stats"]["unique_graphs"], "loss": float(loss).hex()}))
"""


def graphs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "compiled.py"
        script.write_text(COMPILED)
        for place in ([], ["--resident"]):
            for wrapper in ([], WATCHDOG):
                command = [*wrapper, sys.executable, str(script), *place]
                done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240, check=False)
                lines = [line.removeprefix("GRAPHS ") for line in done.stdout.splitlines() if line.startswith("GRAPHS ")]
                name = f"{'on the GPU already' if place else 'moved by the loop'}, {'watched' if wrapper else 'plain'}"
                found[name] = json.loads(lines[0]) if lines else (done.stdout + done.stderr)[-1500:]
    return found


OVERFLOWS = """
import torch
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(4, 2, bias=False, dtype=torch.float16), nn.Linear(2, 1)
        self.up.weight = nn.Parameter(torch.full((2, 4), 200.0).half(), requires_grad=False)
    def forward(self, x):
        return self.head(self.up(x.half()).float())
net = Net().cuda()
optimizer = torch.optim.SGD(net.head.parameters(), lr=1e-6)
rows = [{"x": torch.rand(4), "y": torch.rand(1)} for _ in range(3 * 12)]
rows[8 * 3 + 1]["x"] *= 1000
for batch in DataLoader(rows, batch_size=3):
    loss = nn.functional.mse_loss(net(batch["x"].cuda(non_blocking=True)), batch["y"].cuda(non_blocking=True))
    loss.backward()
    loss.item()  # a loop that logs each step
    optimizer.step()
    optimizer.zero_grad()
"""


def not_finite() -> Any:
    """A half-precision module overflows in step 8: what is said about it."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "overflows.py"
        script.write_text(OVERFLOWS)
        done = subprocess.run(
            [*WATCHDOG, sys.executable, str(script)],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        incidents = Ended(done.returncode, done.stdout, done.stderr, Path(folder)).incidents
    facts = [{name: incident[name] for name in ("kind", "step", "summary", "cause", "fix")} for incident in incidents]
    return {"exit code": done.returncode, "incidents": facts, "output": [] if facts else done.stderr[-1500:]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "command": "python tests/gpu/resident.py", "kinds": {}}
    for name, kind in {**KINDS, **COMPUTED}.items():
        try:
            results["kinds"][name] = one_kind(kind)
        except Exception as error:
            results["kinds"][name] = f"{type(error).__name__}: {error}"
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    for name, part in (("cost of [8, 4096] ids and labels", cost), ("activation.not_finite", not_finite), ("inductor", graphs)):
        try:
            results[name] = part()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
