"""torch's flight recorder of NCCL, read by us: run by hand on a machine with GPUs, `python tests/gpu/flight.py`.

All ranks run DDP steps; then all but the last wait for it in an all_reduce, and a thread of theirs reads what is recorded meanwhile. Prints what rank 0
found; the exit code is 0 where it is right: the newest collective by name and shape, not done yet, and DDP's own, which C++ calls, before it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_watchdog_agent.hooks import collectives
from torch_watchdog_agent.rescue import flight

LOOKS_AFTER_S, LATE_S = 1.0, 3.0


def main() -> None:
    if "RANK" not in os.environ:
        count = min(2, torch.cuda.device_count())
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), __file__]
        sys.exit(
            subprocess.run(
                command, env={"TORCH_NCCL_TRACE_BUFFER_SIZE": "200", "TORCH_FR_BUFFER_SIZE": "200", **os.environ}, check=False
            ).returncode
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    collectives.patch(sys.modules["torch.distributed.distributed_c10d"])
    model = DistributedDataParallel(nn.Linear(8, 4).to(device))
    for _ in range(3):
        model(torch.ones(2, 8, device=device)).sum().backward()
    torch.cuda.synchronize()
    after_backward = collectives.calls_made(flight.read(device_answers=lambda: True))
    found: list[flight.Flight] = []
    looker = threading.Timer(LOOKS_AFTER_S, lambda: found.append(flight.read(device_answers=lambda: True)))
    looker.start()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(LATE_S)
    dist.all_reduce(torch.ones(5, 7, device=device))
    torch.cuda.synchronize()
    looker.join()
    if dist.get_rank() == 0:
        judge(after_backward[0].newest, found[0], alone=dist.get_world_size() == 1)
    dist.destroy_process_group()


def judge(after_backward: str, waiting: flight.Flight, *, alone: bool) -> None:
    (newest,) = waiting.newest.values()
    right = {
        "C++'s collective is named": after_backward.startswith("all_reduce of (36,) float32"),
        "the one that is waited in": alone or (newest.name, newest.tensors) == ("all_reduce", (((5, 7), "Float"),)),
        "it is not done": alone or newest.state in ("scheduled", "started"),
    }
    print(json.dumps({"torch": torch.__version__, "after backward": after_backward, "waits": waiting.lines.strip(), **right}, indent=1))
    if not all(right.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
