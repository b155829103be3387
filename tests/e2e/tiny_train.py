"""A tiny training for the tests of a launch: exact losses on stdout, then an end as the arguments ask for it."""

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--step-time-s", type=float, default=0.0)
    parser.add_argument("--exit", type=int, default=0)
    parser.add_argument("--die-by", type=int)
    parser.add_argument("--fail-first-attempt", action="store_true")
    parser.add_argument("--count-signals", action="store_true")
    parser.add_argument("--done-file", type=Path)
    parser.add_argument("--deaf-until", type=Path, help="after step 10 the last rank holds the interpreter's lock until this file is there")
    options = parser.parse_args()

    fails = options.fail_first_attempt and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    signalled = []
    if options.count_signals:
        signal.signal(signal.SIGTERM, lambda number, _: (signalled.append(number), os.write(1, f"signal {number}\n".encode())))
    torch.set_num_threads(1)
    # The attempt that fails trains each rank alone: where gloo has told an address, torch's own second attempt may find the first one's.
    world_size = 1 if fails else int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank = int(os.environ.get("RANK", "0"))
    model = nn.Sequential(nn.Embedding(32, 8), nn.Flatten(), nn.Linear(32, 4))
    if world_size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randint(0, 32, (options.steps * 4 * world_size, 4)), torch.randint(0, 4, (options.steps * 4 * world_size,)))
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=False)
    for step, (tokens, labels) in enumerate(DataLoader(data, batch_size=4, sampler=sampler)):
        loss = nn.functional.cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"{'attempt 0 ' if fails else ''}step {step} loss {loss.item().hex()}", flush=True)
        if fails and rank == 0 and step == 2:
            sys.exit(9)
        if options.deaf_until and step == 10 and rank == world_size - 1:
            ctypes.PyDLL(None).system(f"touch {options.deaf_until}.deaf; while [ ! -e {options.deaf_until} ]; do sleep 0.05; done".encode())
        time.sleep(options.step_time_s)
        if signalled and step > 20:
            break  # late enough for a second signal to be seen
    if world_size > 1:
        dist.destroy_process_group()
        time.sleep(0.5)  # gloo's threads end first: an exit in between aborts the process now and then, without us too
    if options.done_file and rank == 0:
        options.done_file.write_text("done")
    if options.die_by:
        os.kill(os.getpid(), signal.Signals(options.die_by))
    sys.exit(options.exit)


if __name__ == "__main__":
    main()
