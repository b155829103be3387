"""Callers that mean harm, a full disk and a wrong clock at real daemons: what was sent, what the daemon did, and what a job beside them felt.

Run it by hand, it takes two minutes: `python tests/fleet/hostile_trial.py [RESULTS.md]`; it replaces its own part of that file. A disk is filled where it may
mount one (root), a clock is set back where libfaketime is installed. What each case promises is asserted: a promise that is broken ends the trial.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "tests")]

import grpc  # noqa: E402
import httpx  # noqa: E402
from fleet_harness import BAD_TOKEN, SimulatedNode, until  # noqa: E402
from ports import free_port  # noqa: E402

from torch_watchdog.certificates import make_certificates  # noqa: E402
from torch_watchdog.daemon.client import DaemonClient  # noqa: E402
from torch_watchdog.errors import DaemonUnreachableError  # noqa: E402
from torch_watchdog_proto import codec  # noqa: E402
from torch_watchdog_proto import messages as m  # noqa: E402
from torch_watchdog_proto.envelopes import TOKEN_KEY  # noqa: E402

TOKEN = "t" * 43
METADATA = ((TOKEN_KEY, TOKEN),)
REPORT = "/torch_watchdog.v1.Telemetry/Report"
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
BEGIN, END = "<!-- hostile callers: begin -->", "<!-- hostile callers: end -->"
MOST_FELT_S = 5.0  # of a report or a page of others, on two busy cores
rows: list[tuple[str, str, str]] = []


class Daemon:
    """A real `watchdog serve` of its own folder; `said` is its log."""

    def __init__(
        self, root: Path, *options: str, host: str = "127.0.0.1", runs: Path | None = None, variables: dict[str, str] | None = None
    ):
        root.mkdir(exist_ok=True)
        self.port, self.web_port, self.runs, self._log = free_port(), free_port(), runs or root / "runs", root / "log"
        (root / "token").write_text(TOKEN)
        (root / "token").chmod(0o600)
        settings = root / "serve.toml"
        settings.write_text("[quotas]\nreports_per_second_of_a_job = 100\n")
        settings.chmod(0o600)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_WATCHDOG")}
        command = [sys.executable, "-m", "torch_watchdog.cli", "serve", "--host", host, "--port", str(self.port)]
        command += ["--web", f"{host}:{self.web_port}", "--dir", str(self.runs), "--settings", str(settings), *options]
        with self._log.open("w") as log:
            more = {"TORCH_WATCHDOG_TOKEN_FILE": str(root / "token"), "HOME": str(root), **(variables or {})}
            self.process = subprocess.Popen(command, env=kept | more, stderr=log, cwd=root)
        until(lambda: "page and API at" in self.said, 60)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def said_since(self, before: str) -> list[str]:
        """But for what is said of every job and incident, hostile or not."""
        lines = [line.removeprefix("[torch-watchdog] ") for line in self.said[len(before) :].splitlines()]
        return [line for line in lines if not line.startswith(("job ", "alert "))]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.web_port}/{path}", headers={"authorization": f"Bearer {TOKEN}"}, timeout=10)

    def refused(self) -> dict[str, float]:
        found = re.findall(r'torch_watchdog_refused_calls_total\{reason="([^"]+)"\} ([\d.e+]+)', self.get("metrics").text)
        return {reason: float(count) for reason, count in found}

    def megabytes(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


class Neighbour:
    """A job that trains at the same daemon, and a person who looks at its page: how long each report and each page takes."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.node = SimulatedNode(f"127.0.0.1:{daemon.port}", "neighbour", metadata=METADATA)
        self.node.rank(0, 1)
        self._step = 0

    @contextlib.contextmanager
    def felt(self) -> Iterator[list[str]]:
        """While the body runs; then holds what was felt, in words."""
        words: list[str] = []
        taken: list[float] = []
        ended = threading.Event()
        watching = threading.Thread(target=self._watch, args=(taken, ended))
        watching.start()
        try:
            yield words
        finally:
            ended.set()
            watching.join(60)
        assert not watching.is_alive() and max(taken) < MOST_FELT_S, f"others waited {max(taken):.1f} s"
        words.append(f"{len(taken)} reports and pages, median {statistics.median(taken) * 1e3:.0f} ms, longest {max(taken) * 1e3:.0f} ms")

    def _watch(self, taken: list[float], ended: threading.Event) -> None:
        while True:
            for look in (self._report, self._page):
                began = time.monotonic()
                look()
                taken.append(time.monotonic() - began)
            if ended.wait(0.02):
                return

    def _report(self) -> None:
        self.node.steps(0, self._step)
        self._step += 1

    def _page(self) -> None:
        assert self._daemon.get("healthz").status_code == 200


def note(sent: str, did: str, felt: str) -> None:
    rows.append((sent, did, felt))
    print(f"{sent}\n    {did}\n    {felt}", flush=True)


def counted(daemon: Daemon, before: dict[str, float]) -> str:
    more = {reason: count - before.get(reason, 0) for reason, count in daemon.refused().items() if count > before.get(reason, 0)}
    return ", ".join(f"{count:.0f} refused as {reason}" for reason, count in more.items()) or "none is counted as refused"


def first_line(lines: list[str]) -> str:
    return (
        f"; log: `{re.sub(r'/tmp/[^/ ]+', '...', lines[0])[:120]}`" + (f" and {len(lines) - 1} more" if len(lines) > 1 else "")
        if lines
        else "; nothing in the log"
    )


def case(daemon: Daemon, neighbour: Neighbour, sent: str, harm: Callable[[], str]) -> None:
    """`harm` does it and says what came of it."""
    refused, said = daemon.refused(), daemon.said
    with neighbour.felt() as felt:
        came = harm()
    note(sent, f"{came}; {counted(daemon, refused)}{first_line(daemon.said_since(said))}", felt[0])


def stream(daemon: Daemon, messages: Any, token: str = TOKEN, timeout_s: float = 10.0) -> grpc.StatusCode:
    """The status that a stream of reports ends with."""
    with grpc.insecure_channel(f"127.0.0.1:{daemon.port}") as channel:
        call = channel.stream_stream(REPORT, request_serializer=bytes, response_deserializer=bytes)
        try:
            list(call(iter(messages), metadata=((TOKEN_KEY, token),), timeout=timeout_s))
        except grpc.RpcError as error:
            return error.code()  # type: ignore[no-any-return]
    return grpc.StatusCode.OK


def hello(job: str, session: str = "s", version: str = "0.1.0") -> bytes:
    one = m.NodeHello(job=job, node="n", version=version, policy="stop", command=("x",), run_dir="/r", session=session)
    return codec.node_message(one).SerializeToString()  # type: ignore[no-any-return]


def flood_without_token(daemon: Daemon) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{daemon.port}") as channel:
        call = channel.stream_stream(REPORT, request_serializer=bytes, response_deserializer=bytes)
        calls = [call(iter([]), metadata=((TOKEN_KEY, "wrong"),), timeout=60) for _ in range(3_000)]
        codes = {one.code() for one in calls}
    assert codes == {grpc.StatusCode.UNAUTHENTICATED}, codes
    return "all UNAUTHENTICATED"


def flood_with_token(daemon: Daemon) -> str:
    """One job reports as fast as it can, for five seconds."""
    node = SimulatedNode(f"127.0.0.1:{daemon.port}", "flooder", metadata=METADATA)
    node.rank(0, 1)
    began, before_mb, sent = time.monotonic(), daemon.megabytes(), 0
    while time.monotonic() - began < 5:
        node.steps(0, sent)
        sent += 1
    grown = daemon.megabytes() - before_mb
    node.close()
    assert sent < 5 * 100 + 600, "its quota did not hold"
    return f"{sent} acked in 5 s (quota 100/s, burst 5 s), memory {grown:+.0f} MB"


def liars(daemon: Daemon) -> str:
    answers = {
        "job of another": stream(daemon, [hello("neighbour", "another session")]),
        "../../etc/passwd": stream(daemon, [hello("../../etc/passwd")]),
        "version 9.9": stream(daemon, [hello("old", version="9.9.0")]),
    }
    assert grpc.StatusCode.OK not in answers.values(), answers
    node = SimulatedNode(f"127.0.0.1:{daemon.port}", "liar", metadata=METADATA)
    node.rank(0, 2)
    for rank in (7, 2**31, 2**32 - 200):
        node.say(m.Noticed(rank=rank, step=2**60, micro_step=0, violation=BAD_TOKEN))
    until(lambda: daemon.get("api/v1/jobs/liar").status_code == 200)
    node.close()
    assert daemon.get("api/v1/jobs/neighbour/incidents").json()["incidents"] == [], "a lie reached another job"
    return (
        ", ".join(f"{lie}: {code.name}" for lie, code in answers.items()) + "; ranks that do not exist: only the liar's own job is spoiled"
    )


def too_large(daemon: Daemon) -> str:
    code = stream(daemon, [b"\x0a" + b"x" * (9 << 20)])
    pages = [
        status(daemon, "POST", "login", content=b"token=" + b"x" * (1 << 20)),
        status(daemon, "GET", "", headers={"x-large": "x" * (1 << 20)}),
    ]
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and pages[0] in (413, "reset") and pages[1] in (400, "reset"), (code, pages)
    return f"gRPC {code.name}, page {pages[0]} and {pages[1]}"


def status(daemon: Daemon, method: str, path: str, **more: Any) -> int | str:
    """A server that has read enough answers and closes, whatever is still on its way."""
    try:
        with httpx.stream(method, f"http://127.0.0.1:{daemon.web_port}/{path}", timeout=10, **more) as answer:
            return answer.status_code
    except httpx.TransportError:
        return "reset"


def garbage(port: int, count: int) -> None:
    """Random bytes, some behind the beginning of something valid that is cut off."""
    chance = random.Random(port)
    heads = (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTT", b"POST /login HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")
    for _ in range(count):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as caller:
            caller.sendall(chance.choice(heads) + chance.randbytes(chance.randrange(4_000)))


def random_bytes(daemon: Daemon) -> str:
    files = daemon.files()
    for port in (daemon.port, daemon.web_port):
        garbage(port, 500)
    until(lambda: daemon.files() <= files + 10, 60)
    return "connections closed, none is left open"


def spoiled_messages(daemon: Daemon) -> str:
    chance, codes = random.Random(1), set[str]()
    good = [hello("spoiled"), codec.node_message(m.NodeReport(seq=1, time_ns=1)).SerializeToString()]
    for _ in range(200):
        spoiled = bytearray(chance.choice(good))
        for _ in range(chance.randrange(1, 6)):
            spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
        codes.add(stream(daemon, [good[0], bytes(spoiled[: chance.randrange(len(spoiled) + 1)])], timeout_s=3).name)
    return f"each ends its own call ({', '.join(sorted(codes))})"


def slow_loris(daemon: Daemon) -> str:
    """A byte a second on the page's port, nothing on gRPC's."""
    files = daemon.files()
    with contextlib.ExitStack() as stack:
        callers = [
            [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(200)]
            for port in (daemon.web_port, daemon.port)
        ]
        began, alive = time.monotonic(), 200
        while alive and time.monotonic() - began < 30:
            alive = sum(_still_open(caller, b"G") for caller in callers[0])
            time.sleep(1)
        took = time.monotonic() - began
        assert alive == 0, f"{alive} slow callers are still connected after 30 s"
    until(lambda: daemon.files() <= files + 10, 60)
    return f"all 200 of the page's are let go within {took:.0f} s, the silent ones of gRPC keep a socket each until they leave"


def _still_open(caller: socket.socket, byte: bytes) -> bool:
    try:
        caller.setblocking(False)
        caller.sendall(byte)
        return caller.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def with_tls(root: Path) -> None:
    """A daemon with a certificate: plain words, another authority, another host, an expired certificate, a TLS handshake that never ends."""
    host = "0.0.0.0"
    certs = root / "certs"
    make_certificates(certs, [host], days=1)
    daemon = Daemon(root / "tls", "--cert", str(certs / "daemon.crt"), "--key", str(certs / "daemon.key"), host=host)
    authority = (certs / "ca.crt").read_bytes()
    trusting = ssl.create_default_context(cafile=str(certs / "ca.crt"))

    def asked(authority: bytes, timeout_s: float = 10) -> bool:
        with DaemonClient(f"{host}:{daemon.port}", token=TOKEN, authority=authority, timeout_s=timeout_s) as client:
            try:
                client.jobs()
            except DaemonUnreachableError:
                return False
        return True

    def healthy() -> float:
        began = time.monotonic()
        assert httpx.get(f"https://{host}:{daemon.web_port}/healthz", verify=trusting, timeout=10).status_code == 200 and asked(authority)
        return (time.monotonic() - began) * 1e3

    try:
        healthy()
        for port in (daemon.port, daemon.web_port):
            garbage(port, 300)
        note(
            "TLS: 300 times plain, random or cut off bytes on each port",
            "every handshake fails",
            f"page and call together {healthy():.0f} ms",
        )
        silent = [socket.create_connection(("127.0.0.1", port)) for port in (daemon.port, daemon.web_port) for _ in range(200)]
        note("TLS: 200 connections on each port that never begin", "they hold a socket each", f"page and call together {healthy():.0f} ms")
        for one in silent:
            one.close()
        make_certificates(root / "other", [host], days=1)
        assert not asked((root / "other" / "ca.crt").read_bytes(), 3)
        refusals = []
        for wrong, hosts, days in (("expired", [host], 0), ("for another host", ["elsewhere.example.org"], 1)):
            make_certificates(certs, hosts, days=days)
            until(lambda: not asked(authority, 2), 60)
            refusals.append(wrong)
        make_certificates(certs, [host], days=1)
        until(lambda: asked(authority), 60)
        note(
            f"TLS: a caller that trusts another authority; the daemon's certificate {', '.join(refusals)}, then a good one",
            "the caller does not speak to it; the good one is in use without a restart" + first_line(daemon.said_since("")[2:]),
            f"page and call together {healthy():.0f} ms",
        )
    finally:
        daemon.end()


def full_disk(root: Path) -> None:
    sent = "the disk of the run directories is full, then has room again"
    disk = root / "disk"
    disk.mkdir()
    if (
        os.getuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=False, capture_output=True).returncode
    ):
        note(sent, "not tried: this user may not mount a disk", "")
        return
    daemon = Daemon(root / "full", runs=disk / "runs")
    try:
        neighbour = Neighbour(daemon)
        with neighbour.felt() as felt:
            (disk / "filler").write_bytes(b"x" * (disk_free(disk) - 8192))
            until(lambda: daemon.get("readyz").status_code == 503, 60)
            neighbour.node.say(m.Noticed(rank=0, step=10**6, micro_step=0, violation=BAD_TOKEN))
            until(lambda: daemon.get("api/v1/jobs/neighbour/incidents").json()["incidents"], 20)
            (disk / "filler").unlink()
            until(lambda: daemon.get("readyz").status_code == 200 and len(daemon.said_since("")) > 3, 90)
        lines = daemon.said_since("")[2:]
        did = "records are dropped and counted, `/readyz` says 503 meanwhile and 200 once nothing was lost for ten seconds, a bad batch in between is judged"
        note(sent, did + first_line(lines), felt[0])
        assert len(lines) == 2, lines
    finally:
        daemon.end()
        subprocess.run(["umount", str(disk)], check=False)


def disk_free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def clock_set_back(root: Path) -> None:
    sent = "the machine's clock is set back by an hour, then forth by two"
    if not FAKETIME.exists():
        note(sent, "not tried: libfaketime is not installed (apt-get install faketime)", "")
        return
    clock = root / "clock"
    clock.write_text("+0s")
    variables = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    daemon = Daemon(root / "time", variables=variables)
    try:
        neighbour = Neighbour(daemon)
        began = time.monotonic()
        with neighbour.felt() as felt:
            for shift in ("-3600s", "+3600s"):
                clock.write_text(shift)
                neighbour.node.say(m.Noticed(rank=0, step=10**6 if shift[0] == "-" else 10**7, micro_step=0, violation=BAD_TOKEN))
                until(lambda: daemon.get("api/v1/jobs/neighbour/incidents").json()["incidents"], 20)
                until(lambda: time.monotonic() - began > 3)
        status = daemon.get("api/v1/jobs/neighbour").json()
        assert status["state"] != "ended"
        note(
            sent, "no deadline moves: nobody is taken for silent, the bad batch is judged" + first_line(daemon.said_since("")[2:]), felt[0]
        )
    finally:
        daemon.end()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tw") as folder:
        root = Path(folder)
        daemon = Daemon(root / "a")
        try:
            neighbour = Neighbour(daemon)
            before = daemon.megabytes(), daemon.files()
            with neighbour.felt() as felt:
                until(lambda began=time.monotonic(): time.monotonic() - began > 3)
            note("nothing, for comparison", "", felt[0])
            for sent, harm in (
                ("3,000 calls without the token, at once", flood_without_token),
                ("one job with a token reports as fast as it can", flood_with_token),
                ("lies: another's job, a path as a name, another version, ranks that do not exist", liars),
                ("a message of 9 MiB, a form of 1 MiB, a header of 1 MiB", too_large),
                ("500 times random or cut off bytes on each port", random_bytes),
                ("200 streams of messages with changed and missing bytes", spoiled_messages),
                ("slow-loris: 200 connections on each port, a byte a second or nothing", slow_loris),
            ):
                case(daemon, neighbour, sent, lambda harm=harm: harm(daemon))  # type: ignore[misc]
            note(
                "after all this",
                f"memory {before[0]:.0f} MB before, {daemon.megabytes():.0f} MB after; open files {before[1]}, {daemon.files()}",
                "",
            )
            neighbour.node.close()
        finally:
            daemon.end()
        with_tls(root)
        full_disk(root)
        clock_set_back(root)
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]))


def write(path: Path) -> None:
    """In place of this trial's own part."""
    lines = [
        "# Callers that mean harm, a full disk, a wrong clock",
        "",
        "By `python tests/fleet/hostile_trial.py tests/fleet/RESULTS.md`, 2 cores.",
        "",
    ]
    lines += ["| what was sent | what the daemon did | what a job and a page beside it felt |", "|---|---|---|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    text = path.read_text() if path.exists() else ""
    kept = re.sub(f"\n*{re.escape(BEGIN)}.*?{re.escape(END)}\n*", "\n", text, flags=re.DOTALL).rstrip()
    path.write_text("\n".join([kept, "", BEGIN, *lines, END]) + "\n")


if __name__ == "__main__":
    main()
