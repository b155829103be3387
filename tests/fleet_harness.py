"""A daemon with a page, nodes that are simulated but speak real gRPC, and a browser's view of it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import httpx

from torch_watchdog.daemon.config import DaemonConfig
from torch_watchdog.daemon.embedded import EmbeddedDaemon
from torch_watchdog_proto import codec
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.envelopes import ControlHello, RankSaid
from torch_watchdog_proto.v1 import control_pb2_grpc, telemetry_pb2_grpc

TOKEN = "a-token-for-tests"
BAD_TOKEN = m.Violation(
    kind="batch.index_out_of_range", summary="past the table", cause="c", fix="f",
    batch=m.BatchFact(key="input_ids", element=(2, 7), value=70), bound=m.BoundFact(low=0, high=63, op="embedding", module="wte"),
)  # fmt: skip


def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """Waits for what other threads and processes bring about; what it was."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)
    return found


class SimulatedNode:
    """One node's two streams, held open until `close`."""

    def __init__(
        self,
        address: str,
        job: str,
        *,
        node: str = "node-0",
        metadata: Any = (),
        session: str = "s",
        policy: m.Policy = "stop",
        run_dir: str = "/r",
    ) -> None:
        self.job, self._seq = job, 0
        self._channel = grpc.insecure_channel(address)
        self._reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._says: queue.SimpleQueue[Any] = queue.SimpleQueue()
        hello = m.NodeHello(job=job, node=node, version="0.1.0", policy=policy, command=("train",), run_dir=run_dir, session=session)
        self._telemetry = telemetry_pb2_grpc.TelemetryStub(self._channel).Report(_stream(self._reports), metadata=metadata)
        self._reports.put(codec.node_message(hello))
        self.hello = codec.read_daemon_message(next(self._telemetry))
        self._control = control_pb2_grpc.ControlStub(self._channel).Attach(_stream(self._says), metadata=metadata)
        self._says.put(codec.control_message(ControlHello(job=job, node=node, session=session, version="0.1.0")))

    def rank(self, rank: int, world_size: int, attempt: int = 0) -> None:
        self.say(
            m.RankHello(rank=rank, local_rank=rank, world_size=world_size, pid=100 + rank, attempt=attempt, host="h", version="0.1.0"),
            attempt,
        )

    def say(self, message: m.RankMessage, attempt: int = 0) -> None:
        self._says.put(codec.control_message(RankSaid(attempt=attempt, message=message)))

    def report(self, *blocks: m.StepBlock, events: tuple[m.RankEvent, ...] = ()) -> None:
        """Returns once it is on disk."""
        self._seq += 1
        self._reports.put(codec.node_message(m.NodeReport(seq=self._seq, time_ns=1, steps=m.StepTable.of(blocks), events=events)))
        next(self._telemetry)

    def steps(self, rank: int, *steps: int, attempt: int = 0, loss: float = 1.0) -> None:
        micro = {"micro_step": (0,) * len(steps), "micro_of_step": steps, "loss": (loss,) * len(steps), "loss_known": (True,) * len(steps)}
        more = {"micro_time_ns": steps, "loader_ns": steps, "evaluation": (False,) * len(steps), "step_ns": (2_000_000,) * len(steps)}
        more |= {"step_time_ns": tuple(step + 1 for step in steps), "vetoed": (False,) * len(steps)}
        self.report(m.StepBlock(rank=rank, attempt=attempt, pid=100 + rank, first_record=1, step=steps, **micro, **more))  # type: ignore[arg-type]

    def exited(self, rank: int, *, exit_code: int | None = None, signal: int | None = None, text: str = "", attempt: int = 0) -> None:
        event = m.RankEvent(
            rank=rank,
            attempt=attempt,
            pid=100 + rank,
            kind="exited",
            time_ns=1,
            order=rank + 1,
            exit_code=exit_code,
            signal=signal,
            text=text,
        )
        self.report(events=(event,))

    def goodbye(self, exit_code: int = 0) -> Any:
        self._reports.put(codec.node_message(m.NodeGoodbye(exit_code=exit_code)))
        return codec.read_daemon_message(next(self._telemetry))

    def close(self) -> None:
        for stream in (self._reports, self._says):
            stream.put(None)
        self._channel.close()


def _stream(waiting: queue.SimpleQueue[Any]) -> Iterator[Any]:
    while (message := waiting.get()) is not None:
        yield message


class Fleet:
    """A daemon in this process with its page; `get` and `post` ask it as a program with the token would."""

    def __init__(self, root: Path, **more: Any) -> None:
        self.root, self.runs = root, root / "runs"
        (root / "run").mkdir(mode=0o700, exist_ok=True)
        self.socket = f"unix:{root / 'run' / 'd.sock'}"
        self.said: list[str] = []
        self.nodes: list[SimulatedNode] = []
        known: dict[str, Any] = {"runs_dir": self.runs, "listen": (self.socket,), "web": "127.0.0.1:0", "web_token": TOKEN}
        self.daemon = EmbeddedDaemon(DaemonConfig(**known | more), say=self.said.append)

    def __enter__(self) -> Self:
        self.daemon.__enter__()
        self.url = self.daemon.addresses[-1]
        self.http = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.http.close()
        for node in self.nodes:
            node.close()
        self.daemon.__exit__(kind, error, trace)

    def node(self, job: str = "job", **more: Any) -> SimulatedNode:
        node = SimulatedNode(self.socket, job, **more)
        self.nodes.append(node)
        return node

    def training(self, job: str = "job", **more: Any) -> SimulatedNode:
        """Its one rank has taken a step."""
        node = self.node(job, **more)
        node.rank(0, 1)
        node.steps(0, 0)
        return node

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.http.get(path, **more)

    def threads(self) -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    def incidents(self, job: str = "job") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get(f"api/v1/jobs/{job}/incidents").json()["incidents"]
        return found
