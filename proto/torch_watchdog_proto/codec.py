"""Messages <-> protobuf: the only place where both are known.

Owns which message of which file stands for which dataclass; `wire_fields.py` does the fields and their bounds. Whatever does not fit raises
`MalformedMessageError` on either side, so that a sender learns it before the receiver does. Knows nothing of channels or files.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from torch_watchdog_proto import envelopes, messages, rescue_words
from torch_watchdog_proto.v1 import control_pb2, query_pb2, telemetry_pb2
from torch_watchdog_proto.wire_fields import MAX_ITEMS, MAX_TEXT, MalformedMessageError, read_fields, write_fields

__all__ = [
    "MAX_ITEMS",
    "MAX_TEXT",
    "MalformedMessageError",
    "control_message",
    "daemon_message",
    "node_message",
    "plain_message",
    "read_control_message",
    "read_daemon_message",
    "read_node_message",
    "read_plain_message",
    "read_stored_report",
    "read_tell_rank",
    "stored_as_received",
    "stored_report",
    "tell_rank",
]


_F = TypeVar("_F", bound=Callable[..., Any])


def _on_malformed(function: _F) -> _F:
    """protobuf and json report a bad value in four ways; callers get one."""

    @functools.wraps(function)
    def checked(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except MalformedMessageError:
            raise
        except (ValueError, TypeError, DecodeError, RecursionError, OverflowError) as error:
            raise MalformedMessageError(f"{function.__name__}: {error}") from error

    return typing.cast("_F", checked)


# Streams: what a node process and a daemon say to each other.


@_on_malformed
def node_message(says: envelopes.NodeSays) -> Any:
    """NodeMessage for hello, report or goodbye."""
    return _wrap(telemetry_pb2.NodeMessage, _NODE, says)


@_on_malformed
def read_node_message(message: Any) -> envelopes.NodeSays:
    return typing.cast("envelopes.NodeSays", _unwrap(message, "says", _NODE))


@_on_malformed
def daemon_message(answer: envelopes.DaemonAnswers) -> Any:
    """DaemonMessage for one of the three acks."""
    return _wrap(telemetry_pb2.DaemonMessage, _DAEMON, answer)


@_on_malformed
def read_daemon_message(message: Any) -> envelopes.DaemonAnswers:
    return typing.cast("envelopes.DaemonAnswers", _unwrap(message, "answers", _DAEMON))


@_on_malformed
def control_message(says: envelopes.ControlUp) -> Any:
    """ControlUp for a hello, a rank's message or the news that a rank's socket closed."""
    if not isinstance(says, envelopes.RankSaid):
        return _wrap(control_pb2.ControlUp, _CONTROL, says)
    said = control_pb2.RankSaid(attempt=says.attempt, rank=says.message.rank)
    _wrap_into(said, _RANK, says.message)
    return control_pb2.ControlUp(rank_said=said)


@_on_malformed
def read_control_message(message: Any) -> envelopes.ControlUp:
    if message.WhichOneof("says") != "rank_said":
        return typing.cast("envelopes.ControlUp", _unwrap(message, "says", _CONTROL))
    said = message.rank_said
    return envelopes.RankSaid(attempt=said.attempt, message=_unwrap(said, "message", _RANK, rank=said.rank))


@_on_malformed
def tell_rank(tell: envelopes.TellRank) -> Any:
    """TellRank for one order."""
    message = control_pb2.TellRank(attempt=tell.attempt, rank=tell.rank)
    _wrap_into(message, _ORDER, tell.order)
    return message


@_on_malformed
def read_tell_rank(message: Any) -> envelopes.TellRank:
    return envelopes.TellRank(attempt=message.attempt, rank=message.rank, order=_unwrap(message, "order", _ORDER))


# Single messages, and the frames of a segment file.

_PLAIN: dict[type[Any], Any] = {
    messages.StepBlock: telemetry_pb2.StepBlock,
    envelopes.JoinRequest: telemetry_pb2.JoinRequest,
    envelopes.JoinAnswer: telemetry_pb2.JoinAnswer,
    envelopes.JobStatus: query_pb2.JobStatus,
    envelopes.OrderAnswer: query_pb2.OrderAnswer,
}
_PLAIN_BACK = {message: cls for cls, message in _PLAIN.items()}


@_on_malformed
def plain_message(
    value: messages.StepBlock | envelopes.JobStatus | envelopes.OrderAnswer | envelopes.JoinRequest | envelopes.JoinAnswer,
) -> Any:
    """The protobuf message of the same name; of a subclass, which knows more than is told, that of its base."""
    message = next(_PLAIN[kind] for kind in type(value).__mro__ if kind in _PLAIN)()
    write_fields(message, value)
    return message


@_on_malformed
def read_plain_message(message: Any) -> Any:
    """The dataclass from the protobuf message of that name."""
    return read_fields(_PLAIN_BACK[type(message)], message)


@_on_malformed
def stored_report(node: str, session: str, report: messages.NodeReport) -> bytes:
    """One frame of a segment file, before compression."""
    message = telemetry_pb2.StoredReport(node=node, session=session)
    write_fields(message.report, report)
    return typing.cast("bytes", message.SerializeToString())


def stored_as_received(node: str, session: str, message: Any) -> bytes:
    """The same of the NodeMessage that a report came in and was read from: its bytes are taken over, not made a second time."""
    return typing.cast("bytes", telemetry_pb2.StoredReport(node=node, session=session, report=message.report).SerializeToString())


@_on_malformed
def read_stored_report(data: bytes) -> tuple[str, str, messages.NodeReport]:
    """Node, session and report of one frame."""
    message = telemetry_pb2.StoredReport.FromString(data)
    return message.node, message.session, read_fields(messages.NodeReport, message.report)


# One of several

_NODE: dict[str, type[Any]] = {"hello": messages.NodeHello, "report": messages.NodeReport, "goodbye": messages.NodeGoodbye}
_DAEMON: dict[str, type[Any]] = {"hello": envelopes.HelloAck, "report": envelopes.ReportAck, "goodbye": envelopes.GoodbyeAck}
_CONTROL: dict[str, type[Any]] = {"hello": envelopes.ControlHello, "rank_lost": envelopes.RankLost}
_RANK: dict[str, type[Any]] = {
    "hello": messages.RankHello,
    "hold": messages.Hold,
    "refused": messages.Refused,
    "noticed": messages.Noticed,
    "ack": messages.Ack,
    "cannot_promise": messages.CannotPromise,
    "vetoed": messages.Vetoed,
    "saving": messages.Saving,
    "saved": messages.Saved,
    "committed": messages.Committed,
    "left": messages.Left,
    "finished": messages.Finished,
    "signalled": messages.Signalled,
    "failed": rescue_words.Failed,
    "freed": rescue_words.Freed,
    "looked": rescue_words.Looked,
}
_ORDER: dict[str, type[Any]] = {
    "prepare": messages.Prepare,
    "commit": messages.Commit,
    "abandon": messages.Abandon,
    "write_committed": messages.WriteCommitted,
    "leave": messages.Leave,
    "free": rescue_words.Free,
    "rescue": rescue_words.Rescue,
    "release": rescue_words.Release,
    "look": rescue_words.Look,
}


def _wrap(envelope: Any, choices: Mapping[str, type[Any]], value: Any) -> Any:
    message = envelope()
    _wrap_into(message, choices, value)
    return message


def _wrap_into(message: Any, choices: Mapping[str, type[Any]], value: Any) -> None:
    name = next((name for name, cls in choices.items() if type(value) is cls), None)
    if name is None:
        raise MalformedMessageError(f"a {type(value).__name__} has no place in {message.DESCRIPTOR.name}")
    getattr(message, name).SetInParent()
    write_fields(getattr(message, name), value)


def _unwrap(message: Any, oneof: str, choices: Mapping[str, type[Any]], **more: Any) -> Any:
    name = message.WhichOneof(oneof)
    if name not in choices:
        raise MalformedMessageError(f"{message.DESCRIPTOR.name} holds nothing that is known here")
    return read_fields(choices[name], getattr(message, name), **more)
