"""A fleet of 50 jobs at a daemon that is killed, loses its database, and is replaced by another: nothing is lost, nothing is told twice.

Run it by hand, it takes four minutes: `python tests/fleet/fleet_trial.py [RESULTS.md]`; it replaces its own part of that file. Needs PostgreSQL (Debian's
package). 46 jobs are node processes' own code with simulated ranks, 4 are real launches of a real training; all reach the daemons through one address, as
behind a load balancer.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "tests"), str(REPO / "tests" / "watchdog" / "daemon")]

from daemon_harness import FakeRank, Ring  # noqa: E402
from fleet_harness import BAD_TOKEN  # noqa: E402
from http_receiver import HttpReceiver  # noqa: E402
from ports import free_port  # noqa: E402
from services import PostgresServer  # noqa: E402

from torch_watchdog.daemon.client import DaemonClient  # noqa: E402
from torch_watchdog.errors import WatchdogError  # noqa: E402
from torch_watchdog.store.database import Database  # noqa: E402
from torch_watchdog_agent.node.agent import NodeAgent  # noqa: E402
from torch_watchdog_agent.node.config import NodeConfig  # noqa: E402
from torch_watchdog_proto import messages as m  # noqa: E402

SIMULATED, REAL = 46, 4
TOKEN = "t" * 43
AWAY_S = float(os.environ.get("FLEET_AWAY_S", "60"))


def until(condition: Callable[[], Any], what: str, timeout_s: float = 90.0) -> float:
    """How long it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise SystemExit(f"FAILED: {what} did not come about within {timeout_s:g} s")
        time.sleep(0.1)
    return time.monotonic() - began


class Balancer:
    """One address; each connection goes to the daemon that is in use now. Layer 4, as in front of a fleet."""

    def __init__(self) -> None:
        self.target: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            caller, _ = self._listener.accept()
            try:
                daemon = socket.create_connection(("127.0.0.1", self.target or 1), timeout=5)
                daemon.settimeout(None)
            except OSError:
                caller.close()
                continue
            for source, sink in ((caller, daemon), (daemon, caller)):
                threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
    except OSError:
        pass
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


class Daemon:
    """A real `watchdog serve` over the store, with a disk of its own."""

    def __init__(self, root: Path, name: str, store: str, pager: HttpReceiver) -> None:
        self.runs, self.port, self._root = root / name, free_port(), root
        settings = root / f"{name}.toml"
        settings.write_text(f'store = "{store}"\n[receivers]\npager = "pagerduty://KEY@127.0.0.1:{pager.port}"\n')
        settings.chmod(0o600)
        self._command = [
            sys.executable,
            "-m",
            "torch_watchdog.cli",
            "serve",
            "--port",
            str(self.port),
            "--dir",
            str(self.runs),
            "--settings",
            str(settings),
        ]
        self.log = root / f"{name}.log"
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self._command, env=environment(self._root), stderr=log, cwd=self._root)
        until(lambda: self.log.read_text().count("daemon at "), "a daemon")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def environment(root: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_WATCHDOG")}
    return kept | {"TORCH_WATCHDOG_TOKEN_FILE": str(root / "token"), "OMP_NUM_THREADS": "1"}


class SimulatedJob:
    """A node process's code, a ring and a rank that says what a test wants."""

    def __init__(self, root: Path, number: int, daemon: str) -> None:
        self.name, home = f"sim-{number:02d}", root / f"n{number}"
        for folder in (home, home / "run", home / "rings"):
            folder.mkdir(mode=0o700)
        self.ring, self.step = Ring(home / "rings", 0, 4096), 0
        config = NodeConfig(
            job=self.name, node=f"node-{number}", session=f"s{number}", policy="observe", command=("train",), run_dir=home, runtime_dir=home / "run",
            ring_dir=home / "rings", daemon=daemon, token=lambda: TOKEN, max_backoff_s=2.0, gpu_interval_s=60.0,
        )  # fmt: skip
        self.said: list[str] = []
        self.agent = NodeAgent(config, say=self.said.append)
        self.agent.start()
        self.rank = FakeRank(home / "run" / "control.sock", 0, 1)

    def train(self) -> None:
        self.ring.steps(self.step)
        self.step += 1

    def find(self) -> None:
        """A bad batch, which is an incident."""
        self.rank.say(m.Noticed(rank=0, step=self.step, micro_step=0, violation=BAD_TOKEN))

    def lost(self) -> list[str]:
        return [line for line in self.said if "are lost" in line]


class Fleet:
    def __init__(self, root: Path) -> None:
        self.root, self.balancer, self.pager = root, Balancer(), HttpReceiver()
        (root / "token").write_text(TOKEN)
        self.jobs: list[SimulatedJob] = []
        self.real: list[subprocess.Popen[bytes]] = []
        self._training = threading.Event()
        self.rows: list[tuple[str, str]] = []

    def begin(self) -> None:
        self.jobs = [SimulatedJob(self.root, number, self.balancer.address) for number in range(SIMULATED)]
        for number in range(REAL):
            command = [
                sys.executable, "-m", "torch_watchdog.cli", "--daemon", self.balancer.address, "--dir", str(self.root / "launches"), "--job", f"real-{number}",
                "--policy", "observe", sys.executable, str(REPO / "tests" / "e2e" / "tiny_train.py"), "--steps", "5000", "--step-time-s", "0.2",
            ]  # fmt: skip
            with (self.root / f"real-{number}.log").open("wb") as log:
                self.real.append(subprocess.Popen(command, env=environment(self.root), stdout=log, stderr=log, cwd=self.root))
        threading.Thread(target=self._train, daemon=True).start()

    def _train(self) -> None:
        while not self._training.wait(1.0):
            for job in self.jobs:
                job.train()

    def end(self) -> None:
        self._training.set()
        for process in self.real:
            process.terminate()
        for process in self.real:
            process.wait(60)

    def ask(self) -> DaemonClient:
        return DaemonClient(self.balancer.address, token=TOKEN, timeout_s=10)

    def incidents(self, jobs: list[str]) -> dict[str, list[str]]:
        """Ids by job, of those that the daemon in use knows."""
        try:
            with self.ask() as client:
                known = {status.job for status in client.jobs()}
                return {job: [str(one["id"]) for one in client.incidents(job)] for job in jobs if job in known}
        except WatchdogError:
            return {}

    def reporting(self) -> int:
        try:
            with self.ask() as client:
                return sum(client.job(status.job).ranks != () for status in client.jobs() if status.state == "running")
        except WatchdogError:
            return 0

    def keys(self) -> Counter[str]:
        return Counter(body["dedup_key"] for body in self.pager.bodies(event_action="trigger"))

    def note(self, what: str, figure: str) -> None:
        self.rows.append((what, figure))
        print(f"{what}: {figure}", flush=True)


def killed(fleet: Fleet, daemon: Daemon) -> list[str]:
    """kill -9 while incidents come, some before it, some while it is away."""
    some = fleet.jobs[:20]
    for job in some[:10]:
        job.find()
    time.sleep(0.3)
    daemon.kill()
    for job in some[10:]:
        job.find()
    time.sleep(5)
    daemon.start()
    names = [job.name for job in some]
    took = until(lambda: sum(map(len, fleet.incidents(names).values())) >= len(names), "every incident after kill -9")
    fleet.note("kill -9 of the daemon, 5 s away, 20 incidents around it", f"all 20 known {took:.1f} s after it was back")
    took = until(lambda: fleet.reporting() >= SIMULATED + REAL, "all jobs at the daemon again")
    fleet.note(
        "after that", f"all {SIMULATED + REAL} jobs at it again {took:.1f} s later"
    )  # a job that it has not met has to wait for the store
    return names


def without_database(fleet: Fleet, postgres: PostgresServer, daemon: Daemon) -> list[str]:
    some = fleet.jobs[20:30]
    postgres.stop()
    began = time.monotonic()
    for job in some:
        job.find()
    names = [job.name for job in some]
    took = until(lambda: sum(map(len, fleet.incidents(names).values())) >= len(names), "every incident without PostgreSQL")
    fleet.note("PostgreSQL stopped, 10 incidents meanwhile", f"all 10 judged {took:.1f} s later, without it")
    time.sleep(max(0.0, AWAY_S - (time.monotonic() - began)))
    postgres.start()
    took = until(lambda: "the store is back" in daemon.log.read_text(), "the store again")
    lines = [line for line in daemon.log.read_text().splitlines() if "store" in line and "cannot be used" in line]
    fleet.note(f"PostgreSQL back after {AWAY_S:.0f} s", f"noticed after {took:.1f} s; {len(lines)} line in the log while it was away")
    return names


def replaced(fleet: Fleet, first: Daemon, second: Daemon) -> list[str]:
    """The daemon dies for good, and its nodes come to another that has none of its files."""
    first.kill()
    fleet.balancer.target = second.port
    took = until(lambda: fleet.reporting() >= SIMULATED + REAL, "all jobs at the second daemon")
    fleet.note("the daemon dies for good, another takes over", f"all {SIMULATED + REAL} jobs there after {took:.1f} s (lease 12 s)")
    some = fleet.jobs[30:40]
    for job in some:
        job.find()
    return [job.name for job in some]


def check(fleet: Fleet, store: str, names: list[str]) -> None:
    """Of every incident: once at the daemon, once in the store, told once."""
    until(
        lambda: all(len(ids) == 1 for ids in fleet.incidents(names).values()) and len(fleet.incidents(names)) == len(names),
        "one incident for each job",
    )
    until(lambda: len(fleet.keys()) >= len(names), "every alert")
    time.sleep(20)  # what would be told twice would be told by now
    twice = {key: number for key, number in fleet.keys().items() if number > 1}
    updates = "none told twice" if not twice else f"{len(twice)} TOLD TWICE"
    fleet.note(f"{len(names)} incidents in all", f"{len(fleet.keys())} alerts, {updates}")
    database = Database.open(store)
    kept = [json.loads(record.content) for name in names for record in database.records(name, "incident")]
    reports = {job.name: {record.key for record in database.records(job.name, "report")} for job in fleet.jobs}
    numbers = {name: sorted(int(key.rpartition(":")[2]) for key in keys) for name, keys in reports.items()}
    gaps = sum(found != list(range(1, len(found) + 1)) for found in numbers.values())
    fleet.note("in the store", f"{len(kept)} incidents; {sum(map(len, reports.values()))} reports, jobs with a missing number: {gaps}")
    lost = [line for job in fleet.jobs for line in job.lost()]
    fleet.note("reports that nodes had to drop", str(len(lost)))
    for key in twice:
        print(json.dumps(list(fleet.pager.bodies(dedup_key=key))))
    if len(kept) != len(names) or twice or gaps or lost or len(fleet.keys()) != len(names):
        raise SystemExit("FAILED: see above")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tw") as folder, tempfile.TemporaryDirectory(prefix="tw") as database:
        root = Path(folder)
        fleet = Fleet(root)
        with PostgresServer(Path(database)) as postgres, fleet.pager:
            first = Daemon(root, "a", postgres.url, fleet.pager)
            fleet.balancer.target = first.port
            try:
                fleet.begin()
                took = until(lambda: fleet.reporting() >= SIMULATED + REAL, "50 jobs")
                fleet.note(f"{SIMULATED} simulated and {REAL} real jobs at one daemon", f"all there after {took:.1f} s")
                names = killed(fleet, first)
                names += without_database(fleet, postgres, first)
                second = Daemon(root, "b", postgres.url, fleet.pager)
                names += replaced(fleet, first, second)
                check(fleet, postgres.url, names)
                fleet.note("real trainings still running", str(sum(process.poll() is None for process in fleet.real)))
                second.process.terminate()
                second.process.wait(30)
            finally:
                fleet.end()
                first.process.kill()
    if len(sys.argv) > 1:
        lines = [
            "# A fleet through a kill, a lost database and a failover",
            "",
            "By `python tests/fleet/fleet_trial.py`, 2 cores.",
            "",
            "| what | figure |",
            "|---|---|",
        ]
        file = Path(sys.argv[1])
        _, mark, others = (file.read_text() if file.exists() else "").partition("<!--")  # hostile_trial.py's part
        own = "\n".join([*lines, *(f"| {what} | {figure} |" for what, figure in fleet.rows)]) + "\n"
        file.write_text(own + (f"\n{mark}{others}" if mark else ""))


if __name__ == "__main__":
    main()
