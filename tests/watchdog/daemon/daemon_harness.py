"""A daemon, node processes and fake ranks on real sockets, in folders whose paths are short enough for them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from ports import free_port

from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.daemon.config import DaemonConfig
from torch_watchdog.daemon.embedded import EmbeddedDaemon
from torch_watchdog.errors import WatchdogError
from torch_watchdog.store.read import read_blocks
from torch_watchdog_agent.node.agent import NodeAgent
from torch_watchdog_agent.node.config import NodeConfig
from torch_watchdog_proto import codec
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.envelopes import JobStatus
from torch_watchdog_proto.frames import Decoder, encode
from torch_watchdog_proto.messages import Order, RankHello, RankMessage
from torch_watchdog_proto.record import KeyNamed, MicroStep, Record, RingHeader, RingWriter, StepDone, TensorSeen, ring_bytes
from torch_watchdog_proto.v1 import telemetry_pb2_grpc

DAEMON_PROGRAM = """
import asyncio, sys
from pathlib import Path
from torch_watchdog.daemon.config import DaemonConfig
from torch_watchdog.daemon.main import run_daemon
config = DaemonConfig(runs_dir=Path(sys.argv[1]), listen=tuple(sys.argv[2:]))
asyncio.run(run_daemon(config, listening=lambda addresses: print(*addresses, flush=True), say=lambda line: print(line, file=sys.stderr)))
"""

RANK_PROGRAM = """
import os, socket, sys, time
from pathlib import Path
from torch_watchdog_agent.recorder import Recorder
from torch_watchdog_proto.frames import encode
from torch_watchdog_proto.messages import RankHello
from torch_watchdog_proto.record import StepDone, TensorSeen
rank = int(sys.argv[3])
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
line.sendall(encode(RankHello(rank=rank, local_rank=rank, world_size=2, pid=os.getpid(), attempt=0, host="h", version="0.1.0")))
ring = Recorder(Path(sys.argv[2]), rank=rank, attempt=0, world_size=2, local_world_size=2)
for step in range(5):
    ring.write(StepDone(step=step, time_ns=1, step_ns=1, micro_steps=1, allocated_bytes=0, reserved_bytes=0, peak_bytes=0, vetoed=False,
                        updates_applied=step + 1))
ring.write(TensorSeen(key_id=ring.key_id("input_ids"), dtype="int64", step=5, micro_step=0, low=0.0, high=99.0, negatives=0, ignored=0,
                      finite=True, shape=(2,)))
print("ready", flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Waits for what other threads and processes bring about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


class Place:
    """The folders of one test, and everything that runs in them."""

    def __init__(self, root: Path) -> None:
        self.root, self.runs, self.runtime, self.rings = root, root / "runs", root / "run", root / "rings"
        self.runtime.mkdir(mode=0o700)
        self.rings.mkdir(mode=0o700)
        self.socket = f"unix:{self.runtime / 'daemon.sock'}"
        self.port = f"127.0.0.1:{free_port()}"
        self.said: list[str] = []
        self.closing: list[Callable[[], object]] = []

    @property
    def run_dir(self) -> Path:
        return self.runs / "job"

    def daemon(self, *listen: str, **more: Any) -> EmbeddedDaemon:
        return EmbeddedDaemon(DaemonConfig(runs_dir=self.runs, listen=listen or (self.socket,), **more), say=self.said.append)

    def daemon_process(self) -> subprocess.Popen[bytes]:
        """One that can be killed. Returns once it listens."""
        process = subprocess.Popen([sys.executable, "-c", DAEMON_PROGRAM, str(self.runs), self.socket], stdout=subprocess.PIPE)
        self.closing.append(lambda: kill(process))
        assert process.stdout is not None and process.stdout.readline()
        return process

    def node(self, daemon: str | None = None, **more: Any) -> NodeAgent:
        known: dict[str, Any] = {
            "job": "job", "node": "node", "session": "s", "policy": "stop", "command": ("train",), "run_dir": self.run_dir,
            "runtime_dir": self.runtime, "ring_dir": self.rings, "daemon": daemon or self.socket, "poll_interval_s": 0.02,
            "max_backoff_s": 0.3,
        }  # fmt: skip
        node = NodeAgent(NodeConfig(**known | more), say=self.said.append)
        node.start()
        self.closing.append(lambda: node.finish(0, timeout_s=0.1))
        return node

    def rank_process(self, rank: int) -> subprocess.Popen[bytes]:
        """A rank of its own pid, that can be killed. Returns once it has said hello."""
        arguments = [str(self.runtime / "control.sock"), str(self.rings), str(rank)]
        process = subprocess.Popen([sys.executable, "-c", RANK_PROGRAM, *arguments], stdout=subprocess.PIPE)
        self.closing.append(lambda: kill(process))
        assert process.stdout is not None and process.stdout.readline()
        return process

    def client(self, address: str | None = None, **more: Any) -> DaemonClient:
        client = DaemonClient(address or self.socket, **more)
        self.closing.append(client.close)
        return client

    def status(self) -> JobStatus | None:
        """The job as the daemon sees it; None while there is no daemon, or no job."""
        try:
            return self.client().job("job")
        except WatchdogError:
            return None

    def num_ranks(self) -> int:
        status = self.status()
        return 0 if status is None else len(status.ranks)

    def rank(self, rank: int, world_size: int = 1, *, runtime: Path | None = None) -> FakeRank:
        fake = FakeRank((runtime or self.runtime) / "control.sock", rank, world_size)
        self.closing.append(fake.close)
        return fake

    def ring(self, rank: int = 0, capacity: int = 4096) -> Ring:
        return Ring(self.rings, rank, capacity)


class FakeRank:
    """Speaks frames over the control socket, as a rank's control thread does."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(20)
        self._socket.connect(str(path))
        self._decoder, self._orders = Decoder(), list[Order]()
        self.say(RankHello(rank=rank, local_rank=rank, world_size=world_size, pid=os.getpid(), attempt=0, host="h", version="0.1.0"))

    def say(self, *messages: RankMessage) -> None:
        for message in messages:
            self._socket.sendall(encode(message))

    def order(self) -> Order:
        """The next order."""
        while not self._orders:
            data = self._socket.recv(1 << 16)
            assert data, "the node process closed the socket"
            self._orders += self._decoder.feed(data)  # type: ignore[arg-type]
        return self._orders.pop(0)

    def close(self) -> None:
        self._socket.close()


class Ring:
    """A ring file that this process fills as a rank would."""

    def __init__(self, folder: Path, rank: int, capacity: int) -> None:
        header = RingHeader(rank=rank, attempt=0, pid=os.getpid(), world_size=1, start_time_ns=1, capacity=capacity)
        self._buffer = bytearray(ring_bytes(capacity))
        self._writer = RingWriter(memoryview(self._buffer), header)
        self._path = folder / f"0-{rank}-{os.getpid()}.ring"
        self._path.write_bytes(self._buffer)
        self._path.chmod(0o600)

    def steps(self, *steps: int, loss: float = 1.0) -> None:
        for step in steps:
            self.write(
                KeyNamed(key_id=0, name="input_ids"),
                TensorSeen(
                    key_id=0, dtype="int64", step=step, micro_step=0, low=0, high=float(step), negatives=0, ignored=0, finite=True, shape=(4, 8)
                ),
                MicroStep(step=step, micro_step=0, time_ns=step, loader_ns=3, loss=loss, loss_known=True),
                StepDone(
                    step=step, time_ns=step, step_ns=7, micro_steps=1, allocated_bytes=1, reserved_bytes=2, peak_bytes=3, vetoed=False,
                    updates_applied=step + 1,
                ),
            )  # fmt: skip

    def write(self, *records: Record) -> None:
        for record in records:
            self._writer.write(record)
        with self._path.open("r+b") as file:
            file.seek(128)
            file.write(self._buffer[128:])
            file.seek(0)
            file.write(self._buffer[:128])


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


# What is said on a stream by hand

HELLO = m.NodeHello(job="job", node="node", version="0.1.0", policy="stop", command=("train",), run_dir="/elsewhere", session="s")


def report(seq: int, *steps: int) -> m.NodeReport:
    return m.NodeReport(seq=seq, time_ns=seq, steps=m.StepTable.of((m.StepBlock(rank=0, attempt=0, pid=1, first_record=1, step=steps),)))


def talk(address: str, *says: Any, metadata: Any = ()) -> list[Any]:
    """One telemetry stream from hello to end; the answers."""
    with grpc.insecure_channel(address) as channel:
        requests = iter([codec.node_message(one) for one in says])
        answers = telemetry_pb2_grpc.TelemetryStub(channel).Report(requests, timeout=20, metadata=metadata)
        return [codec.read_daemon_message(answer) for answer in answers]


def refusal(address: str, *says: Any, metadata: Any = ()) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        talk(address, *says, metadata=metadata)
    return caught.value.code(), caught.value.details()


def kept_steps(run_dir: Path, rank: int | None = None) -> list[int]:
    return [step for block in read_blocks(run_dir, rank) for step in block.step]
