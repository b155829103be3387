"""The gRPC services of node processes: messages are checked here, then handed to `ingest`; what it raises becomes a status with its sentence.

Owns streams and nothing of what they say. A caller that sends garbage loses its own call only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import grpc

from torch_watchdog.daemon.counters import Counters
from torch_watchdog.daemon.ingest import Ingest
from torch_watchdog.daemon.live_job import LiveJob, Outbox
from torch_watchdog.errors import (
    BadJobNameError,
    JobElsewhereError,
    JobNameTakenError,
    StoreError,
    TooManyJobsError,
    UnknownJobError,
    VersionSkewError,
    WatchdogError,
)
from torch_watchdog.job.events import NodeLeft, RankGone, RankSpoke
from torch_watchdog_proto import codec
from torch_watchdog_proto.envelopes import LET_IN_KEY, TOKEN_KEY, ControlHello, RankLost, RankSaid, ReportAck
from torch_watchdog_proto.messages import NodeGoodbye, NodeHello, NodeReport
from torch_watchdog_proto.v1 import control_pb2_grpc, telemetry_pb2_grpc

__all__ = ["Calls", "ControlService", "TelemetryService", "checked"]

_OTHERS_S = 5.0  # for the goodbyes of the other nodes: what their ranks saw last may be what began it

_STATUS = {
    UnknownJobError: grpc.StatusCode.NOT_FOUND,
    JobNameTakenError: grpc.StatusCode.ALREADY_EXISTS,
    VersionSkewError: grpc.StatusCode.FAILED_PRECONDITION,
    BadJobNameError: grpc.StatusCode.INVALID_ARGUMENT,
    JobElsewhereError: grpc.StatusCode.UNAVAILABLE,  # these: the node asks again
    StoreError: grpc.StatusCode.UNAVAILABLE,
    TooManyJobsError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class Calls:
    """Every call under way, and the token that each must bring (none where it is empty)."""

    def __init__(self, *, token: str, counters: Counters) -> None:
        self.token, self.counters = token, counters
        self._under_way: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Awaits the work of one call; None where `end_all` cut it short."""
        task = asyncio.create_task(work)
        self._under_way.add(task)
        try:
            await asyncio.wait((task,))
            return None if task.cancelled() else task.result()
        finally:
            self._under_way.discard(task)
            task.cancel()

    async def all_ended(self, timeout_s: float) -> None:
        """Returns once no call is under way, or after `timeout_s`."""
        if timeout_s > 0 and self._under_way:
            await asyncio.wait(tuple(self._under_way), timeout=timeout_s)

    async def end_all(self) -> None:
        """Ends them in order: gRPC itself would cut them off with a traceback on the terminal."""
        tasks = tuple(self._under_way)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def checked(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Awaitable[Any]]:
    """Asks for the token, and answers our own errors with their sentence."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Any) -> Any:
        problem = _problem_of_token(context, self.calls.token)
        if problem:
            self.calls.counters.refused_calls["grpc_token"] += 1
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, problem)
        try:
            return await self.calls.run(method(self, request, context))
        except codec.MalformedMessageError as error:
            self.calls.counters.refused_calls["grpc_malformed"] += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:500])
        except WatchdogError as error:
            self.calls.counters.refused_calls[f"grpc_{type(error).__name__}"] += 1
            await context.abort(_STATUS.get(type(error), grpc.StatusCode.INTERNAL), str(error)[:1000])

    return call


def _problem_of_token(context: Any, token: str) -> str:
    given = str(dict(context.invocation_metadata() or ()).get(TOKEN_KEY, ""))
    by_socket = context.peer().startswith("unix:")  # its folder keeps others out
    if not token or by_socket or hmac.compare_digest(given.encode(), token.encode()):
        return ""
    return (
        f"this call brought {'another' if given else 'no'} token: the user who started the daemon has it on this machine, "
        "everybody else needs TORCH_WATCHDOG_TOKEN_FILE to name a file that holds it"
    )


class TelemetryService(telemetry_pb2_grpc.TelemetryServicer):  # type: ignore[misc]
    """Hello, numbered reports, goodbye; each answered."""

    def __init__(self, ingest: Ingest, calls: Calls) -> None:
        self._ingest, self.calls = ingest, calls

    @checked
    async def Report(self, requests: AsyncIterator[Any], context: Any) -> None:  # noqa: N802 - gRPC's name
        await context.send_initial_metadata(((LET_IN_KEY, "yes"),))  # the node says its hello only then: a refusal never crosses it
        hello = codec.read_node_message(await _first(requests))
        if not isinstance(hello, NodeHello):
            raise codec.MalformedMessageError("the first message must be a hello")
        live, answer = await self._ingest.join(hello)
        await context.write(codec.daemon_message(answer))
        acks = _Acks(context)
        with live.reporting(hello.node):
            async with _owned(acks.write_all()):
                async for request in requests:
                    await _take(codec.read_node_message(request), live, hello.node, acks, context)

    @checked
    async def Join(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002 - gRPC's names
        return codec.plain_message(self._ingest.joined(codec.read_plain_message(request)))


async def _take(says: NodeHello | NodeReport | NodeGoodbye, live: LiveJob, node: str, acks: _Acks, context: Any) -> None:
    match says:
        case NodeReport():
            await live.has_room()
            live.take_report(node, says, acks.promise(says.seq))
        case NodeGoodbye():
            live.handle(NodeLeft(node=node, goodbye=says))
            await acks.all_written()
            await live.all_left(_OTHERS_S)
            await context.write(codec.daemon_message(live.job.outcome()))
        case NodeHello():
            raise codec.MalformedMessageError("a second hello on one stream")


class _Acks:
    """Acks in the order in which the reports came, each once its report is on disk."""

    def __init__(self, context: Any) -> None:
        self._context = context
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
            await self._context.write(codec.daemon_message(ReportAck(seq=seq)))
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

    @checked
    async def Attach(self, requests: AsyncIterator[Any], context: Any) -> None:  # noqa: N802 - gRPC's name
        hello = codec.read_control_message(await _first(requests))
        if not isinstance(hello, ControlHello):
            raise codec.MalformedMessageError("the first message must be a hello")
        live = self._ingest.attach(hello)
        async with _owned(_write_orders(live.outbox(hello.node), context)):
            async for request in requests:
                _hear(codec.read_control_message(request), live, hello.node)


def _hear(says: ControlHello | RankSaid | RankLost, live: LiveJob, node: str) -> None:
    live.check_ours()
    match says:
        case RankSaid():
            live.handle(RankSpoke(node=node, attempt=says.attempt, message=says.message))
        case RankLost():
            live.handle(RankGone(attempt=says.attempt, rank=says.rank, pid=says.pid))
        case ControlHello():
            raise codec.MalformedMessageError("a second hello on one stream")


async def _write_orders(outbox: Outbox, context: Any) -> None:
    while True:
        order = await outbox.first()
        await context.write(codec.tell_rank(order))
        outbox.done(order)


async def _first(requests: AsyncIterator[Any]) -> Any:
    async for request in requests:
        return request
    raise codec.MalformedMessageError("the stream ended before its hello")


@contextlib.asynccontextmanager
async def _owned(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` beside the body, and ends it with the body. A stream that breaks under it ends the body by itself."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))
