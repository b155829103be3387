"""The gRPC services of node processes: messages are checked here, then handed to `ingest`; what it raises becomes a status with its sentence.

Owns streams and nothing of what they say. A caller that sends garbage loses its own call only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from torch_watchdog.daemon.calls import Calls, checked
from torch_watchdog.daemon.ingest import Ingest
from torch_watchdog.daemon.live_job import LiveJob, Outbox
from torch_watchdog.job.events import NodeLeft, RankGone, RankSpoke
from torch_watchdog_proto import codec
from torch_watchdog_proto.envelopes import LET_IN_KEY, ControlHello, RankLost, RankSaid, ReportAck
from torch_watchdog_proto.fault_points import reach
from torch_watchdog_proto.messages import NodeGoodbye, NodeHello, NodeReport
from torch_watchdog_proto.v1 import control_pb2_grpc, telemetry_pb2_grpc

__all__ = ["ControlService", "TelemetryService", "apart_ms"]

_REPORTS_PER_S = 250  # of one job: half a core; a report of four steps costs little more than one of a single step
_LONGEST_MS = 4000  # a standstill is told after 10 s at the earliest, and `rules/loss.py` waits for the other ranks of such a job
_LAST_WRITE_S = 5.0  # for a message that is on its way as its stream ends
_OTHERS_S = 5.0  # for the goodbyes of the other nodes: what their ranks saw last may be what began it


class TelemetryService(telemetry_pb2_grpc.TelemetryServicer):  # type: ignore[misc]
    """Hello, numbered reports, goodbye; each answered."""

    def __init__(self, ingest: Ingest, calls: Calls) -> None:
        self._ingest, self.calls = ingest, calls

    @checked("report")
    async def Report(self, requests: AsyncIterator[Any], context: Any) -> None:  # noqa: N802 - gRPC's name
        await context.send_initial_metadata(((LET_IN_KEY, "yes"),))  # the node says its hello only then: a refusal never crosses it
        hello = codec.read_node_message(await _first(requests))
        if not isinstance(hello, NodeHello):
            raise codec.MalformedMessageError("the first message must be a hello")
        self.calls.check_job(context, hello.job)
        live, answer = await self._ingest.join(hello)
        await context.write(codec.daemon_message(answer))
        acks = _Acks(context, lambda: apart_ms(live.num_reporting))
        with live.reporting(hello.node):
            async with _owned(acks.write_all()):
                async for request in requests:
                    await _take(request, live, hello.node, acks, context)

    @checked("report")
    async def Join(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        answer = self._ingest.joined(codec.read_plain_message(request))
        self.calls.check_job(context, answer.job)
        return codec.plain_message(answer)


def apart_ms(nodes: int) -> int:
    """Thousands of nodes of a job report less often, so that all their reports together stay what one daemon takes."""
    return min(_LONGEST_MS, 1000 * nodes // _REPORTS_PER_S)


async def _take(request: Any, live: LiveJob, node: str, acks: _Acks, context: Any) -> None:
    says = codec.read_node_message(request)
    match says:
        case NodeReport():
            await live.has_room()
            stored = functools.partial(codec.stored_as_received, node, live.job.session, request)
            live.take_report(node, says, stored, acks.promise(says.seq))
        case NodeGoodbye():
            live.handle(NodeLeft(node=node, goodbye=says))
            await acks.all_written()
            await live.all_left(_OTHERS_S)
            await context.write(codec.daemon_message(live.job.outcome()))
        case NodeHello():
            raise codec.MalformedMessageError("a second hello on one stream")


class _Acks:
    """Acks in the order in which the reports came, each once its report is on disk."""

    def __init__(self, context: Any, every_ms: Callable[[], int]) -> None:
        self._context, self._every_ms = context, every_ms
        self._queue: asyncio.Queue[int] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def promise(self, seq: int) -> Callable[[], None]:
        """To be called once, from any thread."""
        self._open += 1
        self._idle.clear()
        return lambda: self._tell(seq)

    async def write_all(self) -> None:
        while True:
            seq = await self._queue.get()
            await _write_whole(self._context, codec.daemon_message(ReportAck(seq=seq, every_ms=self._every_ms())))
            self._open -= 1
            if self._open == 0:
                self._idle.set()

    async def all_written(self) -> None:
        await self._idle.wait()

    def _tell(self, seq: int) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, seq)
        except RuntimeError:
            pass  # the daemon has ended meanwhile: the node will ask the next one


class ControlService(control_pb2_grpc.ControlServicer):  # type: ignore[misc]
    """Ranks' messages up, orders down."""

    def __init__(self, ingest: Ingest, calls: Calls) -> None:
        self._ingest, self.calls = ingest, calls

    @checked("report")
    async def Attach(self, requests: AsyncIterator[Any], context: Any) -> None:  # noqa: N802 - gRPC's name
        hello = codec.read_control_message(await _first(requests))
        if not isinstance(hello, ControlHello):
            raise codec.MalformedMessageError("the first message must be a hello")
        self.calls.check_job(context, hello.job)
        live = self._ingest.attach(hello)
        async with _owned(self._write_orders(live.attached(hello.node), context)):
            async for request in requests:
                _hear(codec.read_control_message(request), live, hello.node)

    async def _write_orders(self, outbox: Outbox, context: Any) -> None:
        while True:
            order = await outbox.first()
            try:
                message = codec.tell_rank(order)
            except codec.MalformedMessageError as error:  # of what one rank has said: the others' orders go on
                self.calls.refused("order", context, f"an order for rank {order.rank} does not fit a message ({error})")
            else:
                await _write_whole(context, message)
            outbox.done(order)


def _hear(says: ControlHello | RankSaid | RankLost, live: LiveJob, node: str) -> None:
    live.check_ours()
    match says:
        case RankSaid():
            reach("daemon", "got", says.message)
            live.handle(RankSpoke(node=node, attempt=says.attempt, message=says.message))
        case RankLost():
            live.handle(RankGone(attempt=says.attempt, rank=says.rank, pid=says.pid))
        case ControlHello():
            raise codec.MalformedMessageError("a second hello on one stream")


async def _first(requests: AsyncIterator[Any]) -> Any:
    async for request in requests:
        return request
    raise codec.MalformedMessageError("the stream ended before its hello")


async def _write_whole(context: Any, message: Any) -> None:
    """Also where the task is cancelled meanwhile: gRPC never tells the other side that a stream has ended of which a write was cancelled."""
    writing = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait((writing,), timeout=_LAST_WRITE_S)
        raise


@contextlib.asynccontextmanager
async def _owned(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` beside the body, and ends it with the body. A stream that breaks under it ends the body by itself."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))
