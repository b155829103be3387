"""Callers that mean harm, or are broken, at a live daemon: each is refused, the log says so, and a job beside them is acked and ordered as ever."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fleet_harness import BAD_TOKEN, TOKEN, Fleet, SimulatedNode, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_watchdog_proto import codec
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.envelopes import TOKEN_KEY, ControlHello, RankSaid
from torch_watchdog_proto.v1 import telemetry_pb2

OWN = "o" * 43
METADATA = ((TOKEN_KEY, OWN),)
REPORT, ATTACH = "/torch_watchdog.v1.Telemetry/Report", "/torch_watchdog.v1.Control/Attach"
FUZZED = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="tw") as path:
        more = {"token": OWN, "listen": ("127.0.0.1:0",), "audit_file": Path(path) / "audit.jsonl", "web_request_s": 0.5}
        with Fleet(Path(path), **more) as made:
            yield made


@pytest.fixture(scope="module")
def good(fleet: Fleet) -> SimulatedNode:
    """A job that trains beside all this."""
    made = SimulatedNode(fleet.daemon.addresses[0], "good", metadata=METADATA)
    fleet.nodes.append(made)
    made.rank(0, 1)
    return made


def is_unharmed(fleet: Fleet, good: SimulatedNode) -> bool:
    """Its next report is acked, and the page answers, both at once."""
    began = time.monotonic()
    good.steps(0, good._seq)
    assert fleet.get("healthz").status_code == 200
    return time.monotonic() - began < 5.0


def port_of(fleet: Fleet, number: int) -> int:
    return int(fleet.daemon.addresses[number].rstrip("/").rpartition(":")[2])


@pytest.mark.parametrize("number", [0, 1], ids=["gRPC", "HTTP"])
@FUZZED
@given(st.sampled_from((b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /", b"POST /login HTTP/1.1\r\n")), st.binary(max_size=400))
def test_random_and_truncated_bytes_harm_nobody(fleet: Fleet, good: SimulatedNode, number: int, head: bytes, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port_of(fleet, number)), timeout=5) as caller, contextlib.suppress(OSError):
        caller.sendall(head + garbage)
    assert is_unharmed(fleet, good)


def valid_messages() -> list[bytes]:
    hello = m.NodeHello(job="fuzzed", node="n", version="0.1.0", policy="stop", command=("train",), run_dir="/r", session="s")
    block = m.StepBlock(rank=0, attempt=0, pid=1, first_record=1, step=(1, 2), step_ns=(1, 1))
    return [
        codec.node_message(hello).SerializeToString(),
        codec.node_message(m.NodeReport(seq=1, time_ns=1, steps=m.StepTable.of((block,)))).SerializeToString(),
        codec.control_message(ControlHello(job="good", node="n", session="s", version="0.1.0")).SerializeToString(),
        codec.control_message(
            RankSaid(attempt=0, message=m.Noticed(rank=0, step=1, micro_step=0, violation=BAD_TOKEN))
        ).SerializeToString(),
    ]


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """A message of ours with bytes changed, cut or added."""
    message = bytearray(draw(st.sampled_from(valid_messages())))
    for _ in range(draw(st.integers(0, 6))):
        message[draw(st.integers(0, len(message) - 1))] = draw(st.integers(0, 255))
    return bytes(message[: draw(st.integers(0, len(message)))]) + draw(st.binary(max_size=20))


@pytest.mark.parametrize("method", [REPORT, ATTACH])
@FUZZED
@given(st.lists(st.one_of(spoiled(), st.sampled_from(valid_messages()), st.binary(max_size=100)), min_size=1, max_size=4))
def test_spoiled_messages_cost_only_their_own_call(fleet: Fleet, good: SimulatedNode, method: str, sent: list[bytes]) -> None:
    with grpc.insecure_channel(fleet.daemon.addresses[0]) as channel:
        call = channel.stream_stream(method, request_serializer=bytes, response_deserializer=bytes)
        with contextlib.suppress(grpc.RpcError):
            list(call(iter(sent), metadata=METADATA, timeout=3))
    assert is_unharmed(fleet, good)


def refusal(fleet: Fleet, method: str, *sent: Any, metadata: Any = METADATA) -> grpc.RpcError:
    with grpc.insecure_channel(fleet.daemon.addresses[0]) as channel:
        call = channel.stream_stream(method, request_serializer=lambda one: one.SerializeToString(), response_deserializer=bytes)
        with pytest.raises(grpc.RpcError) as raised:
            list(call(iter(sent), metadata=metadata, timeout=10))
    return raised.value


def test_a_message_past_the_limit_is_refused(fleet: Fleet, good: SimulatedNode) -> None:
    huge = telemetry_pb2.NodeMessage(hello=telemetry_pb2.NodeHello(job="huge", command=["x" * (9 << 20)]))
    assert refusal(fleet, REPORT, huge).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert is_unharmed(fleet, good)


def test_a_caller_that_says_it_is_another_job_is_refused_and_logged(fleet: Fleet, good: SimulatedNode) -> None:
    lie = m.NodeHello(job="good", node="node-0", version="0.1.0", policy="stop", command=("x",), run_dir="/r", session="another launch")
    assert refusal(fleet, REPORT, codec.node_message(lie)).code() is grpc.StatusCode.ALREADY_EXISTS
    control = ControlHello(job="good", node="node-0", session="another launch", version="0.1.0")
    assert refusal(fleet, ATTACH, codec.control_message(control)).code() is grpc.StatusCode.ALREADY_EXISTS
    assert any("refused a call of" in line and "already has its files" in line for line in fleet.said)
    assert is_unharmed(fleet, good)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "", ".hidden", "x" * 101, "a\x00b", "sp ace"])
def test_a_job_whose_name_would_leave_its_folder_is_refused(fleet: Fleet, good: SimulatedNode, name: str) -> None:
    hello = m.NodeHello(job=name, node="n", version="0.1.0", policy="stop", command=("x",), run_dir="/r", session="s")
    assert refusal(fleet, REPORT, codec.node_message(hello)).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert is_unharmed(fleet, good)


@pytest.mark.parametrize("version", ["0.3.0", "1.1.0", "x", ""])
def test_a_version_more_than_one_minor_away_is_refused(fleet: Fleet, good: SimulatedNode, version: str) -> None:
    hello = m.NodeHello(job="old", node="n", version=version, policy="stop", command=("x",), run_dir="/r", session="s")
    assert refusal(fleet, REPORT, codec.node_message(hello)).code() is grpc.StatusCode.FAILED_PRECONDITION
    assert is_unharmed(fleet, good)


def test_one_minor_away_is_taken(fleet: Fleet) -> None:
    hello = m.NodeHello(job="near", node="n", version="0.2.7", policy="stop", command=("x",), run_dir="/r", session="s")
    with grpc.insecure_channel(fleet.daemon.addresses[0]) as channel:
        call = channel.stream_stream(REPORT, request_serializer=lambda one: one.SerializeToString(), response_deserializer=bytes)
        assert next(call(iter([codec.node_message(hello)]), metadata=METADATA, timeout=10))


def test_connections_that_say_nothing_or_a_byte_now_and_then_harm_nobody(fleet: Fleet, good: SimulatedNode) -> None:
    with contextlib.ExitStack() as stack:
        for number in (0, 1):
            for _ in range(60):
                caller = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(fleet, number)), timeout=5))
                caller.sendall(b"P" if number == 0 else b"GET / HTTP/1.1\r\nx: ")
        assert is_unharmed(fleet, good)
        caller.settimeout(10)
        assert caller.recv(100) == b""  # the page lets it go


def test_a_flood_of_calls_without_a_token_is_counted_said_once_and_harms_nobody(fleet: Fleet, good: SimulatedNode) -> None:
    with grpc.insecure_channel(fleet.daemon.addresses[0]) as channel:
        call = channel.stream_stream(REPORT, request_serializer=bytes, response_deserializer=bytes)
        flood = [call(iter([]), metadata=((TOKEN_KEY, "wrong"),), timeout=20) for _ in range(300)]
        assert is_unharmed(fleet, good)
        assert all(one.code() is grpc.StatusCode.UNAUTHENTICATED for one in flood)
    metrics = fleet.http.get("metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
    assert "refused_calls_total" in metrics
    assert sum("brought another token" in line for line in fleet.said) == 1


def test_a_job_that_lies_about_its_ranks_spoils_only_itself(fleet: Fleet, good: SimulatedNode) -> None:
    before = fleet.incidents("good")  # another test may have brought one of its own
    liar = SimulatedNode(fleet.daemon.addresses[0], "liar", metadata=METADATA)
    fleet.nodes.append(liar)
    liar.rank(0, 2)
    for rank in (7, 2**31, 2**32 - 200):
        liar.say(m.Noticed(rank=rank, step=2**60, micro_step=0, violation=BAD_TOKEN))
        liar.exited(rank, signal=9)
    until(lambda: is_unharmed(fleet, good))
    assert fleet.get("api/v1/jobs/liar").status_code == 200 and fleet.get("metrics").status_code == 200
    assert fleet.incidents("good") == before


def test_a_clock_that_is_set_back_stops_no_deadline() -> None:
    from torch_watchdog.daemon.main import steady_clock

    clock = steady_clock()
    times = [clock() for _ in range(1000)]
    assert times == sorted(times) and abs(times[0] - time.time()) < 60  # of the machine's own time, by a clock that nobody sets
