"""Who is refused by a daemon, with which words, and what others feel of it: nothing."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
from daemon_harness import HELLO, Place, kept_steps, refusal, report, talk, until

from torch_watchdog.daemon.ingest import Ingest, versions_agree
from torch_watchdog.errors import DaemonRefusedError
from torch_watchdog_proto import codec
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.envelopes import JoinRequest
from torch_watchdog_proto.v1 import telemetry_pb2, telemetry_pb2_grpc

# Garbage


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096])
def test_garbage_on_the_port_disturbs_nobody(place: Place, garbage: bytes) -> None:
    with place.daemon("127.0.0.1:0", token="t") as daemon:
        node, ring = place.node(daemon=daemon.addresses[0], token=lambda: "t"), place.ring()
        host, _, port = daemon.addresses[0].rpartition(":")
        for _ in range(5):
            with socket.create_connection((host, int(port)), timeout=10) as sender:
                sender.sendall(garbage)
        ring.steps(0, 1)
        until(lambda: kept_steps(place.run_dir) == [0, 1])
        assert node.finish(0).lines == ()


@pytest.mark.parametrize(
    "message",
    [
        telemetry_pb2.NodeMessage(),
        telemetry_pb2.NodeMessage(report=telemetry_pb2.NodeReport(seq=1)),
        telemetry_pb2.NodeMessage(hello=telemetry_pb2.NodeHello(job="job", policy="dance", version="0.1.0")),
        telemetry_pb2.NodeMessage(hello=telemetry_pb2.NodeHello(job="../job", policy="stop", version="0.1.0")),
        telemetry_pb2.NodeMessage(hello=telemetry_pb2.NodeHello(job="", policy="stop", version="0.1.0")),
    ],
)
def test_a_stream_that_does_not_begin_with_a_sound_hello_is_ended_with_the_reason(place: Place, message: Any) -> None:
    with place.daemon(), grpc.insecure_channel(place.socket) as channel:
        call = telemetry_pb2_grpc.TelemetryStub(channel).Report(iter([message]), timeout=20)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and caught.value.details()
    assert not place.runs.exists()


def test_a_fault_of_our_own_is_told_caller_and_log(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ingest, "joined", lambda self, message: 1 // 0)
    with place.daemon(audit_file=place.root / "audit.jsonl"), grpc.insecure_channel(place.socket) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            telemetry_pb2_grpc.TelemetryStub(channel).Join(
                codec.plain_message(JoinRequest(rendezvous="x", host="h", version="0.1.0")), timeout=20
            )
        text = "this is a fault of torch-watchdog itself, please report it: ZeroDivisionError: integer division or modulo by zero (test_refused.py:"
        assert caught.value.code() is grpc.StatusCode.INTERNAL and text in caught.value.details()
        until(lambda: any("refused a call of unix:" in line and text in line for line in place.said))


def test_a_malformed_report_ends_its_stream_and_keeps_what_came_before(place: Place) -> None:
    broken = telemetry_pb2.NodeMessage(report=telemetry_pb2.NodeReport(seq=2))
    broken.report.steps.MergeFrom(telemetry_pb2.StepTable(step_delta=[1, 1], step_ns=[1]))
    with place.daemon(), grpc.insecure_channel(place.socket) as channel:
        says = [codec.node_message(HELLO), codec.node_message(report(1, 0)), broken]
        with pytest.raises(grpc.RpcError) as caught:
            list(telemetry_pb2_grpc.TelemetryStub(channel).Report(iter(says), timeout=20))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        until(lambda: kept_steps(place.run_dir) == [0])
        assert talk(place.socket, HELLO, report(2, 1), m.NodeGoodbye(exit_code=0))[0].next_seq == 2


# Who may report


def test_a_second_launch_under_a_used_name_is_refused_now_and_after_a_restart(place: Place) -> None:
    other = replace(HELLO, session="another")
    with place.daemon():
        talk(place.socket, HELLO, report(1, 0))
        code, words = refusal(place.socket, other)
        assert code is grpc.StatusCode.ALREADY_EXISTS and "--job" in words
    with place.daemon():
        assert refusal(place.socket, other)[0] is grpc.StatusCode.ALREADY_EXISTS


def test_a_node_that_is_refused_says_so_once_and_ends_at_once(place: Place) -> None:
    with place.daemon():
        talk(place.socket, HELLO, report(1, 0))
        node = place.node(session="another")
        until(lambda: place.said)
        begun = time.monotonic()
        assert node.finish(0).exit_code is None
        assert time.monotonic() - begun < 3
        assert len(place.said) == 1 and "--job" in place.said[0]


@pytest.mark.parametrize(
    ("theirs", "agree"),
    [("0.1.0", True), ("0.2.9", True), ("0.0.1", True), ("0.3.0", False), ("1.1.0", False), ("", False), ("one", False), ("0", False)],
)
def test_one_minor_version_of_skew_is_allowed(theirs: str, agree: bool) -> None:
    assert versions_agree(theirs, "0.1.0") is agree


def test_a_version_too_far_away_is_refused_with_both_versions(place: Place) -> None:
    with place.daemon():
        code, words = refusal(place.socket, replace(HELLO, version="0.9.0"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "0.9.0" in words and "0.1.0" in words


def test_the_token_is_asked_of_everybody_but_on_a_socket_that_only_this_user_reaches(place: Place) -> None:
    with place.daemon(place.port, place.socket, token="secret"):
        assert refusal(place.port, HELLO)[0] is grpc.StatusCode.UNAUTHENTICATED
        assert refusal(place.port, HELLO, metadata=(("torch-watchdog-token", "other"),))[0] is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(DaemonRefusedError, match=r"no token.*TORCH_WATCHDOG_TOKEN_FILE"):
            place.client(place.port).jobs()
        with pytest.raises(DaemonRefusedError, match="another token"):
            place.client(place.port, token="other").jobs()
        node = place.node(place.port, token=lambda: "secret")
        until(lambda: place.client(place.port, token="secret").jobs())
        assert place.client(place.socket).jobs()
        assert node.finish(0).lines == ()


def test_a_node_that_brings_no_token_says_so_once_and_ends_at_once(place: Place) -> None:
    with place.daemon(place.port, token="secret"):
        node = place.node(place.port)
        until(lambda: place.said)
        assert node.finish(0, timeout_s=60).exit_code is None
    assert len(place.said) == 1 and "no token" in place.said[0] and "training goes on" in place.said[0]


@pytest.mark.parametrize("meanwhile", [None, "first"])
def test_a_node_comes_back_to_a_daemon_that_was_started_again_with_another_token(place: Place, meanwhile: str | None) -> None:
    """It has published none yet, or its last one is still found."""
    published: list[str | None] = ["first"]
    with place.daemon(place.port, token="first"):
        node = place.node(place.port, token=lambda: published[0])
        until(lambda: place.client(place.port, token="first").jobs())
    published[0] = meanwhile
    with place.daemon(place.port, token="second"):
        until(lambda: place.said)
        published[0] = "second"
        until(lambda: place.client(place.port, token="second").jobs())
        assert node.finish(0).lines == ()
    assert len(place.said) == 2 and "back" in place.said[1]
