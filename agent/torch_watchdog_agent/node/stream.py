"""The node's line to the daemon: one gRPC channel, two streams, and what happens when they break.

Owns connection, backoff and resend. While the daemon is away reports wait in a bounded buffer, and control messages in a bounded queue; ranks train
on. Says once that the daemon is lost and what that costs, and once that it is back. Knows nothing of what reports say.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from torch_watchdog_agent.node.config import NodeConfig
from torch_watchdog_agent.node.unacked import UnackedReports
from torch_watchdog_proto import __version__, codec
from torch_watchdog_proto.envelopes import (
    LET_IN_KEY,
    TOKEN_KEY,
    ControlHello,
    ControlUp,
    GoodbyeAck,
    HelloAck,
    RankSaid,
    ReportAck,
    TellRank,
)
from torch_watchdog_proto.messages import NodeGoodbye, NodeHello, NodeReport
from torch_watchdog_proto.tls import new_channel
from torch_watchdog_proto.v1 import control_pb2_grpc, telemetry_pb2_grpc

__all__ = ["DaemonLink"]

_HELLO_TIMEOUT_S = 5.0
_FIRST_BACKOFF_S = 0.1
_MAX_WAITING_CONTROL = 10_000
_LONGEST_APART_S = 5.0  # between two reports, whatever a daemon says: the rings hold what ranks write meanwhile
_FOR_GOOD = frozenset(
    {
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
_NOT_YET = frozenset({grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED})  # the daemon is there, and cannot take this job in now
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel must not inherit the backoff of the last
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 64 << 20),
]


class _LinkLostError(Exception):
    """The daemon ended a stream."""


class DaemonLink:
    """`on_order` gets orders on the loop's thread; `hellos` gives the hellos that a daemon must hear first on each connection."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        on_order: Callable[[TellRank], None],
        hellos: Callable[[], Iterable[RankSaid]],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._on_order, self._hellos, self._say = config, on_order, hellos, say
        self._reports = UnackedReports(max_bytes=config.max_unacked_bytes)
        self._control: deque[ControlUp] = deque(maxlen=_MAX_WAITING_CONTROL)
        self._wake_reports, self._wake_control = asyncio.Event(), asyncio.Event()
        self._goodbye: NodeGoodbye | None = None
        self._control_ended = asyncio.Event()
        self._outcome: asyncio.Future[GoodbyeAck | None] = asyncio.get_running_loop().create_future()
        self._lost_since: float | None = None
        self._comes_back = "is back"
        self._was_accepted = self._has_left_out = False
        self.report_every_s = 0.0  # what the daemon wants, which knows how many nodes there are

    def report(self, report: NodeReport) -> None:
        """Queues a report; its number is given here."""
        if not self._outcome.done():
            self._reports.add(report)
            self._wake_reports.set()

    def tell(self, message: ControlUp) -> None:
        """Queues a control message; the oldest gives way, because an order is ended by its deadline anyway."""
        if not self._outcome.done():
            self._control.append(message)
            self._wake_control.set()

    def lost_s(self) -> float:
        """For how long the daemon has been away; without end where it has refused this node."""
        if self._outcome.done():
            return float("inf")
        return 0.0 if self._lost_since is None else time.monotonic() - self._lost_since

    async def say_goodbye(self, goodbye: NodeGoodbye) -> GoodbyeAck | None:
        """After everything that was queued before. None where the daemon has refused this node."""
        self._goodbye = goodbye
        self._wake_reports.set()
        self._wake_control.set()
        return await asyncio.shield(self._outcome)

    async def run(self) -> None:
        """Connects, and again whenever the line breaks, until the goodbye is answered or the daemon refuses for good."""
        num_failures = 0
        while not self._outcome.done():
            try:
                if await self._connect():
                    num_failures = 0
            except grpc.RpcError as error:
                self._refused_or_lost(error)
            except (_LinkLostError, TimeoutError, codec.MalformedMessageError) as error:
                self._lost(str(error) or "no answer in time")
            if not self._outcome.done():
                await asyncio.sleep(self._backoff_s(num_failures))
                num_failures += 1

    def _backoff_s(self, num_failures: int) -> float:
        """Full jitter: a thousand nodes must not knock at one moment."""
        longest = min(self._config.max_backoff_s, _FIRST_BACKOFF_S * 2 ** min(num_failures, 16))
        return random.uniform(longest / 2, longest)  # noqa: S311 - no secret

    # One connection

    async def _connect(self) -> bool:
        """Serves one connection to its end. True where it had begun well. Raises what ended one that had not."""
        begun = False
        token = self._config.token()
        if token is None:
            raise _LinkLostError("nothing says that it is this user's: there is no token for it")
        channel = new_channel(grpc.aio, self._config.daemon, token, _OPTIONS, self._config.authority)
        try:
            metadata = ((TOKEN_KEY, token),) if token else ()
            telemetry = telemetry_pb2_grpc.TelemetryStub(channel).Report(metadata=metadata)
            await self._say_hello(telemetry)
            control = control_pb2_grpc.ControlStub(channel).Attach(metadata=metadata)
            begun = self._was_accepted = True
            self._found()
            await control.write(codec.control_message(self._control_hello()))
            await self._serve(telemetry, control)
        except (grpc.RpcError, _LinkLostError, asyncio.InvalidStateError) as error:
            if not begun or self._is_for_good(error):
                raise
        finally:
            await channel.close()
        return begun

    async def _say_hello(self, telemetry: Any) -> None:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            if LET_IN_KEY in dict(await telemetry.initial_metadata()):  # else reading says why not; a write would hide it
                await telemetry.write(codec.node_message(self._hello()))
            answer = codec.read_daemon_message(await _read(telemetry))
        if not isinstance(answer, HelloAck):
            raise _LinkLostError("the daemon did not answer the hello")
        self._reports.reconnected(answer.next_seq)

    async def _serve(self, telemetry: Any, control: Any) -> None:
        self._control_ended.clear()
        works = (
            self._send_reports(telemetry), self._read_answers(telemetry),
            self._send_control(control), self._read_orders(control),
        )  # fmt: skip
        tasks = [asyncio.create_task(work) for work in works]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _send_reports(self, telemetry: Any) -> None:
        while True:
            self._wake_reports.clear()
            while (report := self._reports.next_to_send()) is not None:
                await self._write(telemetry, codec.node_message, report)
            if self._goodbye is not None and self._control_ended.is_set():
                await telemetry.write(codec.node_message(self._goodbye))
                return
            await self._wake_reports.wait()

    async def _read_answers(self, telemetry: Any) -> None:
        while True:
            match codec.read_daemon_message(await _read(telemetry)):
                case ReportAck(seq=seq, every_ms=every_ms):
                    self._reports.acked(seq)
                    self.report_every_s = min(every_ms / 1000, _LONGEST_APART_S)
                case GoodbyeAck() as outcome:
                    self._end(outcome)
                    return

    async def _send_control(self, control: Any) -> None:
        for hello in self._hellos():
            await self._write(control, codec.control_message, hello)
        while True:
            self._wake_control.clear()
            while self._control:
                await self._write(control, codec.control_message, self._control[0])
                self._control.popleft()
            if self._goodbye is not None:
                await control.done_writing()
                return
            await self._wake_control.wait()

    async def _write(self, stream: Any, encoded: Callable[[Any], Any], message: Any) -> None:
        """What does not fit the wire is left out: sent again on each new connection, it would end them all."""
        try:
            wire = encoded(message)
        except codec.MalformedMessageError as error:
            if not self._has_left_out:
                self._say(f"a record that does not fit a message is left out, and so are others like it ({str(error)[:200]})")
            self._has_left_out = True
            return
        await stream.write(wire)

    async def _read_orders(self, control: Any) -> None:
        while (message := await control.read()) is not grpc.aio.EOF:
            self._on_order(codec.read_tell_rank(message))
        if self._goodbye is None:
            raise _LinkLostError("the daemon ended the control stream")
        # The daemon has heard everything that the ranks said: only now may the goodbye close the job.
        self._control_ended.set()
        self._wake_reports.set()

    # Words

    def _hello(self) -> NodeHello:
        config = self._config
        return NodeHello(
            job=config.job, node=config.node, version=__version__, policy=config.policy, command=_shortened(config.command), run_dir=str(config.run_dir),
            nodes=config.nodes, node_rank=config.node_rank, rules=config.rules, max_skips=config.max_skips, session=config.session,
            rendezvous=config.rendezvous,
        )  # fmt: skip

    def _control_hello(self) -> ControlHello:
        config = self._config
        return ControlHello(job=config.job, node=config.node, session=config.session, version=__version__)

    def _refused_or_lost(self, error: grpc.RpcError) -> None:
        if not self._is_for_good(error):
            self._lost(error.details() or error.code().name, is_there=error.code() in _NOT_YET)
            return
        self._say(f"the daemon at {self._config.daemon} refused: {error.details()} (the training goes on without it)")
        self._end(None)

    def _is_for_good(self, error: BaseException) -> bool:
        """Not so where the token is refused to a node that was let in before: the daemon was started again, and is about to publish its new one."""
        if not isinstance(error, grpc.RpcError):
            return False
        code = error.code()
        return code in _FOR_GOOD and not (code is grpc.StatusCode.UNAUTHENTICATED and self._was_accepted)

    def _lost(self, reason: str, *, is_there: bool = False) -> None:
        """`is_there`: it has answered, but cannot take this job in now."""
        if self._lost_since is None and self._goodbye is None:
            self._lost_since, self.report_every_s = time.monotonic(), 0.0
            does_not, self._comes_back = (
                ("does not watch this job yet", "watches this job") if is_there else ("cannot be reached", "is back")
            )
            self._say(
                f"the daemon at {self._config.daemon} {does_not} ({reason[:400]}): until it {self._comes_back} a bad batch stops only its own rank, and "
                f"`watchdog stop` and `status` do not work; the training goes on, and up to {self._config.max_unacked_bytes >> 20} MiB of "
                "records are kept for it"
            )

    def _found(self) -> None:
        if self._lost_since is not None:
            away_s, self._lost_since = time.monotonic() - self._lost_since, None
            dropped = self._reports.num_dropped
            lost = f"{dropped} reports did not fit and are lost" if dropped else "nothing was lost"
            self._say(f"the daemon {self._comes_back} after {away_s:.0f} s: {lost}")

    def _end(self, outcome: GoodbyeAck | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)


def _shortened(command: tuple[str, ...]) -> tuple[str, ...]:
    """For a person to recognise it: a command line may be longer than a message."""
    return tuple(word[:1000].encode("utf-8", "replace").decode() for word in command[:200])


async def _read(call: Any) -> Any:
    message = await call.read()
    if message is grpc.aio.EOF:
        raise _LinkLostError("the daemon ended the stream")
    return message
