"""Asking a running daemon, for the command line: synchronous, one call a question.

Owns the channel and turns every status into one of our errors. Knows nothing of what the answers mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, cast

import grpc

from torch_watchdog.daemon.token import CA_FILE, named_authority, token_for
from torch_watchdog.errors import DaemonAnswerError, DaemonRefusedError, DaemonUnreachableError, NoTokenError, UnknownJobError
from torch_watchdog_proto import codec
from torch_watchdog_proto.envelopes import TOKEN_KEY, JobStatus, JoinAnswer, JoinRequest, OrderAnswer, OrderKind
from torch_watchdog_proto.messages import NodeGoodbye, NodeHello, StepBlock
from torch_watchdog_proto.tls import new_channel
from torch_watchdog_proto.v1 import alerts_pb2, alerts_pb2_grpc, query_pb2, query_pb2_grpc, telemetry_pb2_grpc

__all__ = ["DaemonClient", "UnreadStatus", "client_of"]

_T = TypeVar("_T")
_MAX_MESSAGE_BYTES = 64 << 20
_STEPS_PATIENCE = 12.0  # times that of another question: a run of days takes a while to read
_UNREACHABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED})


class DaemonClient:
    """`address` is `unix:PATH` or `HOST:PORT`. Every method raises DaemonUnreachableError, UnknownJobError, DaemonRefusedError or DaemonAnswerError, all of
    which are WatchdogErrors.
    """

    def __init__(self, address: str, *, token: str = "", timeout_s: float = 5.0, authority: bytes | None = None) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._metadata = ((TOKEN_KEY, token),) if token else ()
        options = [("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES), ("grpc.enable_http_proxy", 0)]
        self._channel = new_channel(grpc, address, token, options, authority)
        self._stub = query_pb2_grpc.QueryStub(self._channel)
        self._alerts = alerts_pb2_grpc.AlertsStub(self._channel)

    def jobs(self) -> tuple[JobStatus, ...]:
        """Every job that this daemon knows, newest first; without their ranks. One that is told in words not known here is in an unknown state."""
        request = query_pb2.ListJobsRequest()
        return self._ask("", lambda call: tuple(map(_listed, self._stub.ListJobs(request, **call).jobs)))

    def job(self, name: str) -> JobStatus:
        """One job with its ranks."""
        request = query_pb2.JobRequest(job=name)
        return cast("JobStatus", self._ask(name, lambda call: codec.read_plain_message(self._stub.GetJob(request, **call))))

    def incidents(self, name: str) -> tuple[Mapping[str, Any], ...]:
        """The job's incidents as their JSON objects, oldest first."""
        request = query_pb2.JobRequest(job=name)
        return self._ask(name, lambda call: tuple(map(_object, self._stub.ListIncidents(request, **call).incidents_json)))

    def steps(
        self, name: str, rank: int | None = None, first_step: int | None = None, last_step: int | None = None
    ) -> tuple[StepBlock, ...]:
        """The blocks that hold any step of the range (inclusive), in the order in which they came."""
        request = query_pb2.GetStepsRequest(job=name, rank=rank, first_step=first_step, last_step=last_step)
        return self._ask(name, lambda call: tuple(map(codec.read_plain_message, self._stub.GetSteps(request, **call))), _STEPS_PATIENCE)

    def request(self, name: str, kind: OrderKind, *, by: str, reason: str = "") -> OrderAnswer:
        """Asks the job for a clean stop or a checkpoint."""
        request = query_pb2.OrderRequest(job=name, kind=kind, by=by, reason=reason)
        return cast("OrderAnswer", self._ask(name, lambda call: codec.read_plain_message(self._stub.RequestOrder(request, **call))))

    def join(self, request: JoinRequest) -> JoinAnswer:
        """The job that this node is one of."""
        stub = telemetry_pb2_grpc.TelemetryStub(self._channel)
        words = codec.plain_message(request)
        return cast("JoinAnswer", self._ask(request.rendezvous, lambda call: codec.read_plain_message(stub.Join(words, **call))))

    def goodbye(self, hello: NodeHello, goodbye: NodeGoodbye) -> None:
        """Tells the end of a launch that is over."""
        words, stub = (codec.node_message(hello), codec.node_message(goodbye)), telemetry_pb2_grpc.TelemetryStub(self._channel)
        self._ask(hello.job, lambda call: tuple(stub.Report(iter(words), **call)))

    def contract(self, name: str, rank: int = 0) -> Mapping[str, Any]:
        """What the rank has learned about its batches, as it wrote it to `contract/rank-R.json`."""
        request = query_pb2.ContractRequest(job=name, rank=rank)
        return self._ask(name, lambda call: _object(self._stub.GetContract(request, **call).contract_json))

    def alerts(self) -> tuple[Mapping[str, Any], ...]:
        """The alerts that are open, as JSON objects."""
        return self.alerts_and_silences()[0]

    def alerts_and_silences(self) -> tuple[tuple[Mapping[str, Any], ...], tuple[Mapping[str, Any], ...]]:
        """What is open, and what is kept quiet."""

        def asked(call: dict[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], tuple[Mapping[str, Any], ...]]:
            answer = self._alerts.ListAlerts(alerts_pb2.ListAlertsRequest(), **call)
            return tuple(map(_object, answer.alerts_json)), tuple(map(_object, answer.silences_json))

        return self._ask("", asked)

    def acknowledge(self, incident: str, *, by: str) -> OrderAnswer:
        """`incident` is JOB/ID, or the key of an alert."""
        request = alerts_pb2.AcknowledgeRequest(incident=incident, by=by)
        return cast("OrderAnswer", self._ask("", lambda call: codec.read_plain_message(self._alerts.Acknowledge(request, **call))))

    def silence(
        self, *, jobs: Sequence[str], kinds: Sequence[str], severities: Sequence[str], seconds: float, by: str, comment: str
    ) -> OrderAnswer:
        request = alerts_pb2.SilenceRequest(jobs=jobs, kinds=kinds, severities=severities, seconds=seconds, by=by, comment=comment)
        return cast("OrderAnswer", self._ask("", lambda call: codec.read_plain_message(self._alerts.Silence(request, **call))))

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, job: str, question: Callable[[dict[str, Any]], _T], patience: float = 1.0) -> _T:
        """`question` asks, and reads the answer."""
        try:
            return question({"timeout": patience * self._timeout_s, "metadata": self._metadata})
        except grpc.RpcError as error:
            self._raise(job, error)
        except ValueError as error:
            raise DaemonAnswerError(self._address, str(error)) from error

    def _raise(self, job: str, error: grpc.RpcError) -> NoReturn:
        status = error.code()
        if status in _UNREACHABLE:
            raise DaemonUnreachableError(self._address, self._timeout_s, why=_not_trusted(error.details() or "")) from error
        if status is grpc.StatusCode.NOT_FOUND:
            raise UnknownJobError(job, told=error.details()) from error
        raise DaemonRefusedError(self._address, error.details() or status.name) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadStatus(JobStatus):
    """Of a job that is told in words not known here: its name, and why no more."""

    problem: str


def _listed(message: Any) -> JobStatus:
    try:
        return cast("JobStatus", codec.read_plain_message(message))
    except codec.MalformedMessageError as error:
        problem = f"its daemon tells of it what this version does not know ({error}): use the `watchdog` of its version"
        return UnreadStatus(
            job=message.job, state="unknown", policy=message.policy, attempt=0, world_size=0, run_dir="", started_s=0.0, problem=problem
        )


def _object(text: str) -> Mapping[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise codec.MalformedMessageError(f"a {type(found).__name__} in the place of an object")
    return found


def _not_trusted(details: str) -> str:
    """By gRPC's words, which are all that it tells; empty where that is not what is wrong."""
    if "Hostname Verification" in details:
        return "its certificate is for another name. Call it by one that `watchdog certs` was given, or make it another certificate"
    if "has expired" in details:
        return "its certificate has expired, and `watchdog certs` with the same names renews it"
    if "handshake failed" in details.lower():
        return f"TLS fails. {CA_FILE} must name the ca.crt of that daemon, and none where it has no --cert: then the token must be its own"
    return ""


def client_of(address: str, environment: Mapping[str, str], *, timeout_s: float = 5.0) -> DaemonClient:
    """With this user's token for it. Raises NoTokenError, ConfigError."""
    token = token_for(address, environment)
    if token is None:
        raise NoTokenError(address)
    return DaemonClient(address, token=token, timeout_s=timeout_s, authority=named_authority(environment))
