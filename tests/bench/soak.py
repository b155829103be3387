"""Does anything grow? `python tests/bench/soak.py --steps 10000000`: so many steps through one ring, its node process and a daemon, in compressed time.

Real parts in processes of their own: a rank's recorder in shared memory, the node process's agent, and the daemon with its store, rules, page and index.
Only training is left out, so that an hour holds the steps of weeks. Once a second every process is looked at: memory, files, threads, blocks that
Python's allocator has given out; and the folder of the ring. The growth over the last four fifths is fitted by a line and held against a limit per
million steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent))
from measuring import RESULTS, about, keep

JOB, TOKEN = "soak", "t" * 43
PARTS = ("rank", "node", "daemon")
WARM = 0.2  # of the run: windows fill, pools are made
LIMITS = {"rss_mib": 4.0, "fds": 0.5, "threads": 0.2, "blocks": 5_000.0}  # per million steps
# Over the whole run: in a short one a page more is a steep line, and so is the map of ranks and time, which takes up to 60,000 blocks of the daemon and gives
# them back as it gets coarser (a saw of a minute or two).
NOISE = {"rss_mib": 2.0, "fds": 0.5, "threads": 0.5, "blocks": 60_000.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--rate", type=float, default=6000, help="steps a second: what the node process can read on this machine")
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.json")
    parser.add_argument("--trace", type=float, metavar="SECONDS", help="name the lines whose memory has grown since then; makes all slower")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        PART[given.part](given)
        return
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    rings = Path(tempfile.mkdtemp(prefix="soak-", dir="/dev/shm"))
    try:
        found = about(f"python tests/bench/soak.py --steps {given.steps} --rate {given.rate:g}") | Watched(root, rings, given).measured()
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(rings, ignore_errors=True)
    keep(found, given.out)
    print(said_of(found))
    for part, lines in found.get("grown", {}).items():
        print(f"{part}:", *(lines or []), sep="\n  ")
    sys.exit(0 if found["holds"] else 1)


def said_of(found: dict[str, Any]) -> str:
    grown = [
        f"{part} {rates['rss_mib']:+.1f} MiB" + (f" and {rates['blocks']:+.0f} blocks" if "blocks" in rates else "")
        for part, rates in found["growth_per_million_steps"].items()
        if "rss_mib" in rates
    ]
    return (
        f"{found['steps']} steps in {found['seconds']} s, {found['steps_read']} read: per million steps {', '.join(grown)}; "
        f"{'nothing is over its limit' if found['holds'] else found['over_the_limit'] or 'it does not hold, see the file'}"
    )


# The parts


def rank(given: argparse.Namespace) -> None:
    """What `History` writes of a step of two tensors, without the step. The rings' folder is named in `rings`."""
    from torch_watchdog_agent.recorder import Recorder
    from torch_watchdog_proto.record import MicroStep, StepDone, TensorSeen

    folder = Path((given.root / "rings").read_text())
    recorder = Recorder(folder, rank=0, attempt=0, world_size=1, local_world_size=1)
    begun = time.monotonic()
    for step in range(given.steps):
        if step % 64 == 0:
            time.sleep(max(0.0, begun + step / given.rate - time.monotonic()))
        now_ns = time.time_ns()
        for key, high in (("input_ids", 31_000.0 + step % 7), ("labels", 900.0)):
            number = recorder.key_id(key, (0.0, 32_000.0))
            recorder.write(
                TensorSeen(
                    key_id=number,
                    dtype="int64",
                    step=step,
                    micro_step=0,
                    low=0.0,
                    high=high,
                    negatives=0,
                    ignored=0,
                    finite=True,
                    shape=(8, 1024),
                )
            )
        recorder.write(MicroStep(step=step, micro_step=0, time_ns=now_ns, loader_ns=10_000, loss=2.0 + step % 5 / 10, loss_known=True))
        recorder.write(
            StepDone(
                step=step, time_ns=now_ns, step_ns=160_000, micro_steps=1, allocated_bytes=1, reserved_bytes=2, peak_bytes=3, vetoed=False,
                updates_applied=step + 1, backward_ns=50_000,
            )
        )  # fmt: skip
        if step % 10_000 == 9_999:
            tell(steps=step + 1)
    tell(steps=given.steps)


def node(given: argparse.Namespace) -> None:
    from torch_watchdog_agent.node.agent import NodeAgent
    from torch_watchdog_agent.node.config import NodeConfig

    (given.root / "runtime").mkdir(mode=0o700)
    agent = NodeAgent(
        NodeConfig(
            job=JOB, node="node-0", session="s", policy="observe", command=("train",), run_dir=given.root / "runs" / JOB,
            runtime_dir=given.root / "runtime", ring_dir=Path((given.root / "rings").read_text()), daemon=address(given), gpu_interval_s=3600.0,
        ),
        say=lambda line: tell(said=line),
    )  # fmt: skip
    agent.start()
    tell_until_eof(given.trace)
    tell(ended=agent.finish(0, timeout_s=60).exit_code)


def daemon(given: argparse.Namespace) -> None:
    from torch_watchdog.daemon.config import DaemonConfig
    from torch_watchdog.daemon.embedded import EmbeddedDaemon

    (given.root / "d").mkdir(mode=0o700)
    config = DaemonConfig(
        runs_dir=given.root / "runs", listen=(address(given),), index_file=given.root / "index.sqlite", web="127.0.0.1:0", web_token=TOKEN
    )
    with EmbeddedDaemon(config, say=lambda line: tell(said=line)):
        tell_until_eof(given.trace)


PART = {"rank": rank, "node": node, "daemon": daemon}


def address(given: argparse.Namespace) -> str:
    return f"unix:{given.root / 'd' / 's'}"


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def tell_until_eof(trace_from_s: float | None) -> None:
    """How many blocks of memory Python has given out, now and then, until standard input ends."""
    ended, since, before = threading.Event(), time.monotonic(), None
    if trace_from_s is not None:
        tracemalloc.start()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    tell(ready=True)
    while not ended.wait(5.0):
        gc.collect()
        tell(blocks=sys.getallocatedblocks())  # not gc.get_objects(): a tuple that another thread is making then cannot be finished
        if trace_from_s is not None and before is None and time.monotonic() - since >= trace_from_s:
            before = tracemalloc.take_snapshot()
    if before is not None:
        tell(grown=grown_since(before))


def grown_since(before: tracemalloc.Snapshot) -> list[str]:
    differences = tracemalloc.take_snapshot().compare_to(before, "lineno")
    largest = sorted(differences, key=lambda one: one.size_diff, reverse=True)[:25]
    return [f"{one.size_diff} bytes in {one.count_diff} blocks (of {one.size}): {one.traceback}" for one in largest]


# Watching them


class Watched:
    """The three processes, and what is seen of them."""

    def __init__(self, root: Path, rings: Path, given: argparse.Namespace) -> None:
        self._root, self._rings, self._given = root, rings, given
        (root / "rings").write_text(str(rings))
        self._told: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
        self._said: list[str] = []
        self._seen: list[dict[str, Any]] = []

    def measured(self) -> dict[str, Any]:
        processes = {part: self._begin(part) for part in ("daemon", "node")}
        processes["rank"] = self._begin("rank")
        begun = time.monotonic()
        while processes["rank"].poll() is None:
            self._look(processes)
            time.sleep(1.0)
        seconds = time.monotonic() - begun
        self._end(processes)
        left = [path.name for path in self._rings.iterdir()]
        read, lost = self._recorded()
        growth = {part: self._growth(part) for part in PARTS}
        over = [
            f"{part}: {name} grows by {rate} per million steps, limit {LIMITS[name]}"
            for part, rates in growth.items() for name, rate in rates.items()
            if rate > LIMITS[name] and rate * (1 - WARM) * self._given.steps / 1e6 > NOISE[name]
        ]  # fmt: skip
        return {
            "steps": self._told["rank"].get("steps"),
            "seconds": round(seconds, 1),
            "steps_read": read,
            "records_lost": lost,
            "wraps_of_the_ring": self._wraps(),
            "growth_per_million_steps": growth,
            "at_the_end": {part: self._seen[-1][part] for part in PARTS},
            "disk_bytes_per_step": round(
                sum(path.stat().st_size for path in (self._root / "runs").rglob("*") if path.is_file()) / max(1, read), 1
            ),
            "index_bytes": (self._root / "index.sqlite").stat().st_size,
            "shared_memory_bytes_most": max(seen["shm_bytes"] for seen in self._seen),
            "rings_left": left,
            "said": self._said,
            **({"grown": {part: self._told[part].get("grown") for part in PARTS}} if self._given.trace is not None else {}),
            "over_the_limit": over,
            "holds": not over and not left and not self._said and read + lost // 4 >= 0.99 * self._given.steps,
            "curve": self._curve(),
        }

    def _begin(self, part: str) -> subprocess.Popen[str]:
        arguments = ["--part", part, "--root", str(self._root), "--steps", str(self._given.steps), "--rate", str(self._given.rate)]
        if self._given.trace is not None:
            arguments += ["--trace", str(self._given.trace)]
        process = subprocess.Popen([sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._listen, args=(part, process), daemon=True).start()
        while part != "rank" and not self._told[part].get("ready"):
            assert process.poll() is None, f"the {part} has ended"
            time.sleep(0.05)
        return process

    def _listen(self, part: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            told = json.loads(line)
            self._told[part] |= told
            if "said" in told:
                self._said.append(f"{part}: {told['said']}")

    def _look(self, processes: dict[str, subprocess.Popen[str]]) -> None:
        seen: dict[str, Any] = {
            "steps": self._told["rank"].get("steps", 0),
            "shm_bytes": sum(path.stat().st_size for path in self._rings.iterdir()),
        }
        try:
            for part, process in processes.items():
                seen[part] = self._of(psutil.Process(process.pid)) | {"blocks": self._told[part].get("blocks")}
        except psutil.Error:
            return
        self._seen.append(seen)
        if len(self._seen) % 30 == 0:
            print(json.dumps({"steps": seen["steps"], **{part: seen[part]["rss_mib"] for part in PARTS}}), file=sys.stderr, flush=True)

    @staticmethod
    def _of(process: psutil.Process) -> dict[str, Any]:
        return {"rss_mib": round(process.memory_info().rss / 2**20, 2), "fds": process.num_fds(), "threads": process.num_threads()}

    def _end(self, processes: dict[str, subprocess.Popen[str]]) -> None:
        """The node reads its ring to the end, then says goodbye; the daemon writes what it has."""
        for part in ("node", "daemon"):
            stdin = processes[part].stdin
            assert stdin is not None
            stdin.close()
            processes[part].wait(180)

    def _recorded(self) -> tuple[int, int]:
        """Steps in the run directory, and records that the ring had overwritten before they were read."""
        from torch_watchdog.store.read import read_reports

        steps = lost = 0
        for _, _, report in read_reports(self._root / "runs" / JOB):
            steps += len(report.steps.step)
            lost += sum(report.steps.lost_records)
        return steps, lost

    def _wraps(self) -> int:
        from torch_watchdog_agent.recorder import ring_capacity

        return int(4 * self._given.steps // ring_capacity(1))

    def _growth(self, part: str) -> dict[str, float]:
        """By a line through what was seen after the warm-up."""
        seen = [one for one in self._seen if one["steps"] >= WARM * self._given.steps]
        rates = {}
        for name in LIMITS:
            points = [(one["steps"] / 1e6, one[part][name]) for one in seen if one[part][name] is not None]
            if len({at for at, _ in points}) >= 3:
                rates[name] = round(float(np.polyfit(*zip(*points, strict=True), 1)[0]), 3)
        return rates

    def _curve(self) -> list[dict[str, Any]]:
        """Twenty points of it, for a person."""
        return [self._seen[place] for place in sorted({int(share * (len(self._seen) - 1) / 20) for share in range(21)})]


if __name__ == "__main__":
    main()
