"""A training as people write it for GPUs: nothing in it asks whether there is one. For a replay on the CPU."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

ROWS, LENGTH = 40, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(ROWS, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        shift = torch.zeros(ids.shape[0], 1, device="cuda")
        return self.head(self.norm(self.table(ids).mean(1) + shift))


def wrapped(net: Net, local_rank: int) -> nn.Module:
    if "--fsdp2" in sys.argv:
        return fully_shard(net, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    return DistributedDataParallel(
        torch.compile(nn.SyncBatchNorm.convert_sync_batchnorm(net)), device_ids=[local_rank], output_device=local_rank
    )


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl", device_id=torch.device("cuda", local_rank))
    torch.cuda.manual_seed_all(0)
    print(torch.cuda.get_device_properties(local_rank).total_memory, torch.cuda.get_device_capability(), torch.cuda.mem_get_info())
    device = torch.device(f"cuda:{local_rank}")
    net = wrapped(Net().cuda(local_rank), local_rank)
    optimizer, scaler = torch.optim.AdamW(net.parameters(), fused=True), torch.amp.GradScaler("cuda")
    criterion = nn.CrossEntropyLoss().to(device)
    data = [(torch.randint(0, ROWS, (LENGTH,)), number % 4) for number in range(16)]
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for ids, labels in DataLoader(data, batch_size=4, sampler=DistributedSampler(data), pin_memory=True):
        start.record()
        with torch.cuda.stream(stream):
            moved = ids.to(local_rank, non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
        moved.record_stream(torch.cuda.current_stream())
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            loss = criterion(net(moved), labels.cuda(non_blocking=True))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        print(f"loss {loss.item()} {start.elapsed_time(end)} ms {torch.cuda.max_memory_allocated() >> 20} MiB", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
