"""How many ranks one daemon takes: `python tests/bench/scale.py 1024 4096 16384`, a step a second of each, reported by nodes of 8 ranks over real gRPC.

The daemon is `watchdog serve` with its store (run directory and index), rules, page and metrics; nodes are simulated in other processes. Of the last half of
each run: CPU seconds of the daemon per second, memory, bytes on disk, how long a report waits for its ack (it is on disk and judged then), and how long
an Xid takes from the node to the incident's file. `--profile`: where its time goes (py-spy). Each result is kept at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))
from measuring import RESULTS, about, keep, percentile
from ports import free_port

HERE = Path(__file__).parent
LOADERS = 2
PAGE_S, XID_S = 5.0, 4.0
_WAITS = ("EpollSelector.select", "Condition.wait", "sigwait", "_worker (concurrent")
COMMAND = "python tests/bench/scale.py 1024 4096 16384 --profile"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int, nargs="*", default=[1024, 4096, 16384])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "scale.json")
    given = parser.parse_args()
    found: dict[str, Any] = about(COMMAND) | {"seconds": given.seconds, "points": []}
    for ranks in given.ranks:
        found["points"].append(measured(ranks, given))
        print(json.dumps(found["points"][-1]), flush=True)
        keep(found, given.out)


def measured(ranks: int, given: argparse.Namespace) -> dict[str, Any]:
    root = Path(tempfile.mkdtemp(prefix="scale-"))
    try:
        with Daemon(root) as daemon, contextlib.ExitStack() as stack:
            loaders = [stack.enter_context(Loader(daemon, number, ranks, given)) for number in range(LOADERS)]
            begun = time.monotonic()
            until(lambda: _joined(loaders, of=ranks // given.per_node), 300)
            progress(f"{ranks} ranks have joined within {time.monotonic() - begun:.0f} s")
            return Run(ranks, given, daemon, loaders).measured()
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _joined(loaders: list[Loader], *, of: int) -> bool:
    count = sum(loader.newest.get("joined", 0) for loader in loaders)
    progress(f"{count} of {of} nodes have joined")
    time.sleep(1.0)
    return count >= of


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Daemon:
    """A real `watchdog serve`, and what a person's page and a Prometheus ask of it meanwhile."""

    def __init__(self, root: Path) -> None:
        self.root, self.runs, self.port, self.web = root, root / "runs", free_port(), free_port()
        (root / "token").write_text("t" * 43)
        self.environment = {**os.environ, "TORCH_WATCHDOG_TOKEN_FILE": str(root / "token"), "HOME": str(root), "XDG_RUNTIME_DIR": str(root)}
        self.environment.pop("XDG_CACHE_HOME", None)

    def __enter__(self) -> Daemon:
        command = [
            sys.executable,
            *("-m", "torch_watchdog.cli", "serve", "--port", str(self.port), "--web", f"127.0.0.1:{self.web}", "--dir", str(self.runs)),
        ]
        self.log = self.root / "daemon.log"
        with self.log.open("w") as log:
            self.process = psutil.Popen(command, env=self.environment, stderr=log, cwd=self.root)
        until(lambda: "daemon at " in self.log.read_text(), 60)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.web}", headers={"authorization": "Bearer " + "t" * 43}, timeout=60)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def disk_bytes(self) -> int:
        files = [*self.runs.rglob("*"), *(self.root / ".cache").rglob("*")]
        return sum(path.stat().st_size for path in files if path.is_file())

    def asked(self, path: str) -> float:
        """Seconds until it was answered."""
        begun = time.monotonic()
        self.http.get(path).raise_for_status()
        return time.monotonic() - begun


class Loader:
    """A process that simulates a part of the nodes."""

    def __init__(self, daemon: Daemon, number: int, ranks: int, given: argparse.Namespace) -> None:
        nodes = ranks // given.per_node
        first, last = number * nodes // LOADERS, (number + 1) * nodes // LOADERS
        arguments = [f"127.0.0.1:{daemon.port}", first, last, given.per_node, given.seconds, ranks]
        self.nodes = range(first, last)
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "simulated_nodes.py"), *map(str, arguments)],
            env=daemon.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.newest: dict[str, Any] = {}
        self.acks: list[tuple[float, float]] = []  # when, how long
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.newest = json.loads(line)
            self.acks += [(time.monotonic(), one) for one in self.newest["acks_s"]]


class Run:
    """One point of the curve."""

    def __init__(self, ranks: int, given: argparse.Namespace, daemon: Daemon, loaders: list[Loader]) -> None:
        self._ranks, self._given, self._daemon, self._loaders = ranks, given, daemon, loaders
        self._pages: dict[str, list[float]] = {"/api/v1/jobs/scale": [], "/metrics": []}
        self._xid_s: list[float] = []

    def measured(self) -> dict[str, Any]:
        half = self._given.seconds / 2
        for loader in self._loaders:
            loader.say("begin")
        begun = time.monotonic()
        self._busy_until(begun + half)
        cpu, loads, disk, at = self._daemon.cpu_s(), self._loads(), self._daemon.disk_bytes(), time.monotonic()
        profile = self._profiled(half - 2) if self._given.profile else None
        self._busy_until(begun + self._given.seconds)
        spent_s = time.monotonic() - at
        loads_after = self._loads()
        acks = sorted(took for loader in self._loaders for when, took in list(loader.acks) if when >= at)
        disk_bytes = self._daemon.disk_bytes() - disk
        return {
            "ranks": self._ranks,
            "nodes": self._ranks // self._given.per_node,
            "daemon_cpu_s_per_s": round((self._daemon.cpu_s() - cpu) / spent_s, 3),
            "daemon_rss_mib": round(self._daemon.process.memory_info().rss / 2**20),
            "daemon_threads": self._daemon.process.num_threads(),
            "disk_mib_per_rank_hour": round(disk_bytes / spent_s * 3600 / self._ranks / 2**20, 3),
            "reports_sent_per_s": round((loads_after["sent"] - loads["sent"]) / spent_s, 1),
            "reports_acked_per_s": round(len(acks) / spent_s, 1),
            "ack_median_s": round(statistics.median(acks), 3) if acks else None,
            "ack_p99_s": round(percentile(acks, 0.99), 3) if acks else None,
            "record_to_incident_s": {"count": len(self._xid_s), "each": [round(one, 2) for one in sorted(self._xid_s)]},
            "asked_median_s": {path: round(statistics.median(took), 3) for path, took in self._pages.items() if took},
            "loaders_cpu_s_per_s": round((loads_after["cpu_s"] - loads["cpu_s"]) / spent_s, 3),
            "load": round(os.getloadavg()[0], 1),
            "said": self._daemon.log.read_text().splitlines()[2:7],
            **({"profile": profile.result()} if profile is not None else {}),
        }

    def _loads(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for loader in self._loaders:
            total.update({name: loader.newest.get(name, 0) for name in ("sent", "cpu_s")})
        return total

    def _busy_until(self, ends: float) -> None:
        """Asks as a page and a Prometheus do, and lets a GPU fail now and then."""
        pages = xids = time.monotonic()
        while (now := time.monotonic()) < ends:
            if now >= pages:
                pages += PAGE_S
                for path, took in self._pages.items():
                    took.append(self._daemon.asked(path))
            if now >= xids:
                xids += XID_S
                self._fail_a_gpu(ends)
            time.sleep(0.05)

    def _fail_a_gpu(self, ends: float) -> None:
        node = len(self._xid_s) * 7 % (self._ranks // self._given.per_node)
        folder = self._daemon.runs / "scale" / "incidents"
        before = len(list(folder.glob("*/incident.json")))
        begun = time.monotonic()
        for loader in self._loaders:
            if node in loader.nodes:
                loader.say(f"xid {node}")
        while time.monotonic() < ends:
            if len(list(folder.glob("*/incident.json"))) > before:
                self._xid_s.append(time.monotonic() - begun)
                return
            time.sleep(0.02)

    def _profiled(self, seconds: float) -> Profile:
        return Profile(self._daemon.process.pid, self._daemon.root / "profile.txt", int(seconds))


class Profile:
    """py-spy beside the run: the functions of the daemon's threads that its time is spent in."""

    def __init__(self, pid: int, out: Path, seconds: int) -> None:
        self._out = out
        command = [
            str(Path(sys.executable).parent / "py-spy"),
            "record",
            "-p",
            str(pid),
            "-d",
            str(seconds),
            "-r",
            "50",
            "-f",
            "raw",
            "-t",
            "-o",
            str(out),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def result(self) -> dict[str, Any]:
        self._process.wait(60)
        own: Counter[str] = Counter()
        within: Counter[str] = Counter()
        for line in self._out.read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            frames = [frame.rpartition(":")[0] or frame for frame in stack.split(";")]
            if frames[-1].startswith(_WAITS):
                continue
            own[frames[-1]] += int(count)
            for frame in set(frames):
                within[frame] += int(count)
        total = sum(own.values())
        return {
            "samples": total,
            "own_percent": {name: round(100 * count / total, 1) for name, count in own.most_common(25)},
            "within_percent": {name: round(100 * count / total, 1) for name, count in within.most_common(45)},
        }


def until(condition: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"it did not come about within {timeout_s:g} s")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
