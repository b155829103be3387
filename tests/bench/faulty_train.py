"""Two ranks of which rank 1 meets a fault in its step 20; knows nothing of the watchdog. For side_by_side.py.

`faulty_train.py OUT FAULT LAUNCHER`: OUT/steps-R has a line a step, OUT/fault the moment; rank 0 saves OUT/own-checkpoint every 15 steps, as scripts do.
`ft_launcher` wants each rank to send heartbeats, and torchft a manager in the loop: both are given that, since that is how they are used.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

AT, STEPS, CLEAN_STEPS, SAVE_EVERY, BATCH = 20, 50, 120, 15, 2
SAMPLE = 2 * BATCH * AT + BATCH  # the first sample of rank 1 in that step
PAUSE_S = 0.03
GROUP_TIMEOUT_S = 30


class Rows(Dataset):
    def __init__(self, fault: str, length: int) -> None:
        self.fault, self.length = fault, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = torch.Generator().manual_seed(index)
        ids, label = torch.randint(0, 64, (8,), generator=rng), torch.tensor(index % 4)
        if index == SAMPLE and self.fault == "bad label":
            label = torch.tensor(9)
        if index == SAMPLE and self.fault == "bad batch":
            ids[3] = 70
        return ids, label


class InTurn:
    """Which samples a rank gets: its share of each step's."""

    def __init__(self, rank: int, steps: int) -> None:
        self.batches = [[2 * BATCH * step + BATCH * rank + place for place in range(BATCH)] for step in range(steps)]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def main(out: Path, fault: str, launcher: str) -> None:
    torch.set_num_threads(1)
    steps = CLEAN_STEPS if fault == "none" else STEPS
    rank = int(os.environ["REPLICA_GROUP_ID"] if launcher == "torchft" else os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 16), nn.Flatten(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
    model, optimizer, beat = _by(launcher, model)
    rows = Rows(fault, 2 * BATCH * steps)
    told = (out / f"steps-{rank}").open("w", buffering=1)
    for step, (ids, labels) in enumerate(DataLoader(rows, batch_sampler=InTurn(rank, steps))):
        if rank == 1 and step == AT:
            _strike(out, fault)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids), labels)
        loss = loss * float("nan") if fault == "nan loss" and rank == 1 and step == AT else loss
        loss.backward()
        optimizer.step()
        beat()
        told.write(f"{step} {time.time_ns()}\n")
        if rank == 0 and step % SAVE_EVERY == SAVE_EVERY - 1:
            torch.save(model.state_dict(), out / "own-checkpoint")
            (out / "own-checkpoint-step").write_text(str(step + 1))
        time.sleep(PAUSE_S)
    if launcher != "torchft":
        dist.destroy_process_group()
        time.sleep(0.5)  # gloo's threads may still be at it


def _strike(out: Path, fault: str) -> None:
    (out / "fault").write_text(str(time.time_ns()))
    if fault == "kill -9":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)


def _by(launcher: str, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]:
    def nothing() -> None: ...

    if launcher == "torchft":
        return *_by_torchft(model), nothing
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if launcher != "ft_launcher":
        return model, optimizer, nothing
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    return model, optimizer, client.send_heartbeat


def _by_torchft(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    import torchft

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state() -> dict:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(found: dict) -> None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    # torchrun, which starts a group of replicas in torchft's examples, hosts this store; here a group is one process.
    store = dist.TCPStore("localhost", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)), min_replica_size=1, load_state_dict=load, state_dict=state,
        replica_id=f"replica_{os.environ['REPLICA_GROUP_ID']}_", timeout=datetime.timedelta(seconds=5),
    )  # fmt: skip
    model = torchft.DistributedDataParallel(manager, model)
    model.store = store  # for as long as the training lasts
    return model, torchft.Optimizer(manager, optimizer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
