"""Nodes of one job, as many as are asked for, over real gRPC streams: each sends a report of its ranks' newest steps a second, or as
far apart as the daemon wants it.

`simulated_nodes.py ADDRESS FIRST LAST RANKS_PER_NODE SECONDS WORLD_SIZE`, a process of its own for scale.py: what it takes must not count as the daemon's.
Prints a line of JSON a second: reports sent and acked, and how long acks took. A line `xid NODE` on its input makes that node report an Xid of its
first rank's GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import grpc

from torch_watchdog_proto import __version__, codec
from torch_watchdog_proto.envelopes import TOKEN_KEY, ControlHello, RankSaid
from torch_watchdog_proto.messages import GpuSample, NodeHello, NodeReport, RankHello, StepBlock, StepTable, TensorColumns
from torch_watchdog_proto.v1 import telemetry_pb2

JOB, SESSION = "scale", "s"
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))


def gpu_of(rank: int) -> str:
    return f"GPU-{rank:08x}"


class Template:
    """One node's report of so many steps of each rank; only what changes is written anew."""

    def __init__(self, ranks: range, rows: int) -> None:
        self._ranks = ranks
        self._message = codec.node_message(NodeReport(seq=1, time_ns=1, steps=StepTable.of([usual_block(rank, rows) for rank in ranks])))
        self._report = self._message.report

    def made(self, seq: int, first_step: int, rng: random.Random, *, xid: bool) -> bytes:
        now_ns = time.time_ns()
        self._report.seq, self._report.time_ns = seq, now_ns
        steps = self._report.steps
        steps.first_record[:] = [5 * first_step] * len(self._ranks)
        # The first of each column alone: all after it are differences.
        steps.micro_of_step_delta[0] = steps.step_delta[0] = steps.updates_applied_delta[0] = first_step
        steps.micro_time_ns_delta[0] = steps.step_time_ns_delta[0] = now_ns
        for row in range(len(steps.loss)):
            own_ns = int(rng.uniform(0.7e9, 0.8e9))
            steps.loss[row], steps.grad_norm[row] = rng.uniform(2, 3), rng.uniform(0.5, 1.5)
            steps.forward_ns[row], steps.backward_ns[row] = own_ns, 10**9 - own_ns
        if not xid:
            return bytes(self._message.SerializeToString())
        sample = GpuSample(
            time_ns=now_ns, index=0, uuid=gpu_of(self._ranks[0]), name="simulated", memory_used_bytes=1, memory_total_bytes=2, xids=(79,)
        )
        told = codec.node_message(NodeReport(seq=seq, time_ns=now_ns, gpus=(sample,)))
        told.report.steps.CopyFrom(self._report.steps)
        return bytes(told.SerializeToString())


def usual_block(rank: int, rows: int) -> StepBlock:
    """So many steps of a training as most are: three tensors of the batch, one batch a step."""

    def each(value: Any) -> tuple[Any, ...]:
        return (value,) * rows

    def tensor(key: str, high: float, ignored: int) -> TensorColumns:
        return TensorColumns(
            key=key, dtype="int64", rows=steps, low=each(0.0), high=each(high), negatives=each(ignored), ignored=each(ignored), finite=each(True),
            shapes=each((8, 4096)), bound_low=0.0, bound_high=32000.0,
        )  # fmt: skip

    steps = tuple(range(rows))
    return StepBlock(
        rank=rank, attempt=0, pid=rank + 1, first_record=1, micro_step=each(0), micro_of_step=steps, micro_time_ns=steps, loader_ns=each(2_000_000),
        loss=each(2.5), loss_known=each(True), evaluation=each(False), forward_ns=each(1), scale=each(0.0), step=steps, step_time_ns=steps,
        step_ns=each(10**9), vetoed=each(False), allocated_bytes=each(40 << 30), reserved_bytes=each(50 << 30), peak_bytes=each(60 << 30),
        updates_applied=steps, backward_ns=each(1), grad_norm=each(1.0), alloc_retries=each(0), gpu=gpu_of(rank), reach=each(0.0),
        tensors=(tensor("input_ids", 31000, 0), tensor("labels", 31000, 900), tensor("attention_mask", 1, 0)),
    )  # fmt: skip


class Node:
    """One node's two streams."""

    def __init__(self, address: str, number: int, ranks: range, world_size: int, told: Told) -> None:
        self.number, self.xid = number, False
        self._address, self._ranks, self._world_size, self._told = address, ranks, world_size, told
        self._sent_s: dict[int, float] = {}
        self._every_s, self._joined = 0.0, False

    async def run(self, begin: asyncio.Event, seconds: float, metadata: Any) -> None:
        """Connects again where it was not let in yet, as a node does."""
        while not self._joined:
            try:
                await self._run(begin, seconds, metadata)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                print(f"node {self.number}, joined: {self._joined}: {type(error).__name__}: {error}"[:400], file=sys.stderr, flush=True)
                await asyncio.sleep(random.uniform(0.5, 2.0))

    async def _run(self, begin: asyncio.Event, seconds: float, metadata: Any) -> None:
        async with grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
            telemetry = channel.stream_stream("/torch_watchdog.v1.Telemetry/Report", request_serializer=None, response_deserializer=None)(
                metadata=metadata
            )
            hello = NodeHello(
                job=JOB, node=f"node-{self.number}", version=__version__, policy="observe", command=("train",), run_dir="", session=SESSION,
                nodes=self._world_size // len(self._ranks), node_rank=self.number,
            )  # fmt: skip
            await telemetry.write(codec.node_message(hello).SerializeToString())
            await telemetry.read()
            control = channel.stream_stream("/torch_watchdog.v1.Control/Attach", request_serializer=None, response_deserializer=None)(
                metadata=metadata
            )
            for message in self._hellos():
                await control.write(codec.control_message(message).SerializeToString())
            self._told.joined += 1
            self._joined = True
            acks = asyncio.create_task(self._acks(telemetry))
            await begin.wait()
            await self._reports(telemetry, seconds)
            acks.cancel()

    def _hellos(self) -> list[Any]:
        hellos: list[Any] = [ControlHello(job=JOB, node=f"node-{self.number}", session=SESSION, version=__version__)]
        for local, rank in enumerate(self._ranks):
            said = RankHello(
                rank=rank, local_rank=local, world_size=self._world_size, pid=rank + 1, attempt=0, host="h", version=__version__
            )
            hellos.append(RankSaid(attempt=0, message=said))
        return hellos

    async def _reports(self, telemetry: Any, seconds: float) -> None:
        """A step a second of each rank; reported at once, or as far apart as the daemon wants it."""
        rng, templates = random.Random(self.number), dict[int, Template]()
        due, ends = time.monotonic() + rng.random(), time.monotonic() + seconds
        seq, step = 0, 1
        while due < ends:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            rows = max(1, round(self._every_s))
            seq += 1
            template = templates.get(rows) or templates.setdefault(rows, Template(self._ranks, rows))
            made, self.xid = template.made(seq, step, rng, xid=self.xid), False
            self._sent_s[seq] = due  # a report that could not be sent when it was due has waited since
            await telemetry.write(made)
            self._told.sent += 1
            step += rows
            due += max(1, round(self._every_s))

    async def _acks(self, telemetry: Any) -> None:
        while (answer := await telemetry.read()) is not grpc.aio.EOF:
            ack = codec.read_daemon_message(telemetry_pb2.DaemonMessage.FromString(answer))
            self._every_s = ack.every_ms / 1000
            self._told.acks_s.append(time.monotonic() - self._sent_s.pop(ack.seq))


class Told:
    """What is printed once a second."""

    def __init__(self) -> None:
        self.joined = self.sent = 0
        self.acks_s: deque[float] = deque()

    def line(self) -> str:
        acks, self.acks_s = sorted(self.acks_s), deque()
        return json.dumps(
            {"joined": self.joined, "sent": self.sent, "cpu_s": round(time.process_time(), 2), "acks_s": [round(one, 4) for one in acks]}
        )


async def main(address: str, first: int, last: int, per_node: int, seconds: float, world_size: int) -> None:
    told, begin = Told(), asyncio.Event()
    nodes = [Node(address, number, range(number * per_node, (number + 1) * per_node), world_size, told) for number in range(first, last)]
    loop = asyncio.get_running_loop()
    threading.Thread(target=_hear, args=(loop, begin, {node.number: node for node in nodes}), daemon=True).start()
    metadata = ((TOKEN_KEY, Path(os.environ["TORCH_WATCHDOG_TOKEN_FILE"]).read_text().strip()),)
    tasks = []
    for number, node in enumerate(nodes):
        tasks.append(asyncio.create_task(node.run(begin, seconds, metadata)))
        if number % 32 == 31:
            await asyncio.sleep(0.1)  # not all at one moment
    while not all(task.done() for task in tasks):
        await asyncio.sleep(1.0)
        print(told.line(), flush=True)
    for task in tasks:
        task.result()


def _hear(loop: asyncio.AbstractEventLoop, begin: asyncio.Event, nodes: dict[int, Node]) -> None:
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        if word == "begin":
            loop.call_soon_threadsafe(begin.set)
        elif int(number) in nodes:
            nodes[int(number)].xid = True


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6])))
