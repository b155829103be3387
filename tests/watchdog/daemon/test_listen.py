"""Where the daemon listens, and who gets in: sockets of this user's, ports of this machine, ports that leave it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from daemon_harness import Place, until

from torch_watchdog.daemon.listen import new_server
from torch_watchdog.errors import DaemonStartError, DaemonUnreachableError
from torch_watchdog_proto.tls import leaves_the_machine

STRONG = "x" * 32
ELSEWHERE = "0.0.0.0"  # reaches this machine, and is no loopback address: the way that other machines take


@contextlib.contextmanager
def listened_to(port: int, passed: bytearray) -> Iterator[int]:
    """A port that passes one connection on to `port`, and keeps every byte."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_pass_on, args=(server, port, passed), daemon=True)
        thread.start()
        yield server.getsockname()[1]


def _pass_on(server: socket.socket, port: int, passed: bytearray) -> None:
    with server.accept()[0] as caller, socket.create_connection((ELSEWHERE, port)) as daemon:
        back = threading.Thread(target=_copy, args=(daemon, caller, passed), daemon=True)
        back.start()
        _copy(caller, daemon, passed)
        back.join(10)


def _copy(source: socket.socket, target: socket.socket, passed: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            passed += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nonsense", "HOST:PORT"),
        ("unix:/nowhere/at/all.sock", "0700"),
    ],
)
def test_an_address_that_will_not_do_is_refused_with_advice(place: Place, address: str, words: str) -> None:
    with pytest.raises(DaemonStartError, match=words), place.daemon(address):
        pass


def test_a_port_that_is_taken_is_refused(place: Place) -> None:
    with place.daemon("127.0.0.1:0", token="t") as first, pytest.raises(DaemonStartError, match="another"):
        place.daemon(first.addresses[0], token="t").__enter__()


def test_a_port_that_would_ask_nobody_for_a_token_is_refused(place: Place) -> None:
    for address in ("127.0.0.1:0", "[::]:0"):
        with pytest.raises(DaemonStartError, match="everybody who reaches it"), place.daemon(address):
            pass


def test_a_port_that_leaves_the_machine_needs_a_token_that_nobody_can_guess(place: Place) -> None:
    with pytest.raises(DaemonStartError, match=r"31 characters.*32 or more.*token_urlsafe"), place.daemon("[::]:0", token="x" * 31):
        pass


def test_off_this_machine_only_those_get_as_far_as_a_call_who_know_the_token(place: Place) -> None:
    with place.daemon("[::]:0", token=STRONG) as daemon:
        port = daemon.addresses[0].rpartition(":")[2]
        there = f"{ELSEWHERE}:{port}"
        node = place.node(there, token=lambda: STRONG)
        until(lambda: place.client(there, token=STRONG).jobs())
        for address, token in ((there, "y" * 40), (there, ""), (f"127.0.0.1:{port}", STRONG)):
            with pytest.raises(DaemonUnreachableError):
                place.client(address, token=token).jobs()
        assert node.finish(0).lines == ()


def test_the_line_to_another_machine_cannot_be_read_on_the_way(place: Place) -> None:
    passed = bytearray()
    with place.daemon("[::]:0", token=STRONG) as daemon, listened_to(int(daemon.addresses[0].rpartition(":")[2]), passed) as port:
        assert place.client(f"{ELSEWHERE}:{port}", token=STRONG).jobs() == ()
    assert len(passed) > 500
    assert STRONG.encode() not in passed and b"torch-watchdog-token" not in passed and b"ListJobs" not in passed


def test_a_socket_in_a_folder_that_others_can_enter_is_refused(place: Place) -> None:
    place.runtime.chmod(0o755)
    with pytest.raises(DaemonStartError, match="chmod 700"), place.daemon():
        pass


def test_the_socket_is_for_this_user_only(place: Place) -> None:
    with place.daemon():
        assert os.stat(place.runtime / "daemon.sock").st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("address", "leaves"),
    [
        ("unix:/run/a.sock", False),
        ("127.0.0.1:1", False),
        ("[::1]:1", False),
        ("localhost:1", False),
        ("[::]:1", True),
        ("node0:1", True),
        ("10.0.0.1:1", True),
    ],
)
def test_what_is_no_socket_and_no_loopback_address_leaves_the_machine(address: str, leaves: bool) -> None:
    assert leaves_the_machine(address) is leaves


class Answering(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Every call, with nothing."""

    def service(self, details: Any) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(answer)


def test_no_call_is_refused_where_thousands_of_nodes_begin_in_one_moment() -> None:
    answered, sent = Counter[grpc.StatusCode](), threading.Event()

    def call(address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            calls = [channel.unary_unary("/any/call").future(b"", timeout=60) for _ in range(3000)]
            sent.set()
            answered.update(one.code() for one in calls)

    async def serve() -> None:
        server = new_server(1 << 20)
        server.add_generic_rpc_handlers((Answering(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        calling = asyncio.create_task(asyncio.to_thread(call, f"127.0.0.1:{port}"))
        await asyncio.sleep(0)
        assert sent.wait(60)  # the loop is busy with something else meanwhile, and takes none of them
        await calling
        await server.stop(0)

    asyncio.run(serve())
    assert answered == {grpc.StatusCode.OK: 3000}
