"""Chaos: `python tests/faults/chaos.py --seeds 0:100` kills, stops, cuts, slows and fills the parts of a watched training at random, by its seed.

Each trial is a real training of two ranks under a launch whose daemon is another process, behind a line that can be cut, with its record on a small disk
of its own where this machine lets one be mounted. However many blows fall, the parameters and losses must come out as those of a training that nobody
watched, to the last bit; or, where a part was hit of which the job must end, it must end in time and leave nothing behind. Resumable: what
is in the results is not run again. Results: results/chaos.json, results/chaos.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).parents[1] / "bench"))
sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent))

from cuttable import Line
from measuring import about, keep
from ports import free_port

HERE = Path(__file__).parent
RESULTS = HERE / "results"
BIN = Path(sys.executable).parent
STEPS = 720  # most of a trial is not its beginning and end: more blows in the same time
MARK = "CHAOS_TRIAL"  # in the environment of all that a trial starts: what of it is left is found by it
LATEST_S = 90.0
COMMAND = "python tests/faults/chaos.py --seeds 0:100"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:20")
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"), help="begin no trial after so many seconds")
    parser.add_argument("--out", type=Path, default=RESULTS / "chaos.json")
    given = parser.parse_args()
    known: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else about(COMMAND) | {"trials": {}}
    until, (first, last) = time.monotonic() + given.seconds, map(int, given.seeds.split(":"))
    wanted = undisturbed()
    for seed in range(first, last):
        if str(seed) in known["trials"] or time.monotonic() > until:
            continue
        known["trials"][str(seed)] = result = trial(seed, wanted)
        print(f"seed {seed}: {result['blows']} blows in {result['seconds']} s: {result['outcome']}", flush=True)
        keep(known, given.out)
        given.out.with_suffix(".md").write_text(table(known))
    print(table(known))
    sys.exit(any(one["outcome"] == "WRONG" for one in known["trials"].values()))


def undisturbed(steps: int = STEPS) -> list[str]:
    """What each rank comes to without a watchdog."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        subprocess.run(
            training(Path(folder), steps), env=environment(Path(folder), "none"), check=True, timeout=LATEST_S, capture_output=True
        )
        return digests(Path(folder))


def training(folder: Path, steps: int) -> list[str]:
    return ["bash", str(HERE / "two_ranks.sh"), str(HERE / "chaos_train.py"), str(folder), str(steps)]


def digests(folder: Path) -> list[str]:
    return [path.read_text() if path.exists() else "" for path in (folder / "digest-0", folder / "digest-1")]


def environment(folder: Path, mark: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_WATCHDOG", "PYTEST"))}
    own = {
        "OMP_NUM_THREADS": "1",
        "PYTHON": str(BIN / "python"),
        "MASTER_PORT": str(free_port()),
        MARK: mark,
        "TORCH_WATCHDOG_TOKEN_FILE": str(folder / "token"),
    }
    return kept | own


def trial(seed: int, wanted: list[str], steps: int = STEPS) -> dict[str, Any]:
    """One training. `outcome`: identical, ended (as it must), or WRONG, with `why`."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    (folder / "token").write_text("t" * 43)
    begun = time.monotonic()
    world = World(folder, f"{os.getpid()}-{seed}", steps)
    try:
        world.begin()
        blows = Blows(world, random.Random(seed))
        blows.fall()
        why = world.judged(wanted, blows.fatal)
    except TimeoutError as error:
        blows, why = None, [str(error)]
    finally:
        tail = world.said()[-3000:]
        world.end()
        shutil.rmtree(folder, ignore_errors=True)
    fatal = blows.fatal if blows else None
    return {
        "outcome": "WRONG" if why else "ended" if fatal else "identical",
        "fatal": fatal,
        "blows": sum(blows.count.values()) if blows else 0,
        "count": dict(blows.count) if blows else {},
        "seconds": round(time.monotonic() - begun, 1),
        "exit_code": world.exit_code,
        **({"why": why, "tail": tail} if why else {}),
    }


class World:
    """All parts of one trial, by name."""

    def __init__(self, folder: Path, mark: str, steps: int) -> None:
        self.folder, self._mark, self._steps = folder, mark, steps
        self._environment = environment(folder, mark)
        self._daemon_port = free_port()
        self.line = Line(self._daemon_port)
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.mounted = (
            os.geteuid() == 0
            and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(self.disk)], check=False).returncode == 0
        )
        self._log = (folder / "launch.log").open("wb")
        self.exit_code: int | None = None
        self._tree: dict[str, psutil.Process] = {}

    def begin(self) -> None:
        self.start_daemon()
        command = [str(BIN / "watchdog"), "--dir", str(self.folder / "runs"), "--job", "chaos", "--daemon", f"127.0.0.1:{self.line.port}"]
        self.launch = subprocess.Popen(
            [*command, *training(self.folder, self._steps)], env=self._environment, stdout=self._log, stderr=self._log, cwd=self.folder
        )
        self._tree["node"] = psutil.Process(self.launch.pid)
        wait_for(
            lambda: all((self.folder / f"began-{rank}").exists() for rank in range(2)) or self.launch.poll() is not None, "the first step"
        )
        for rank in range(2):
            self._tree[f"rank {rank}"], self._tree[f"keeper {rank}"] = self._rank(rank)

    def start_daemon(self) -> None:
        command = [str(BIN / "watchdog"), "serve", "--port", str(self._daemon_port), "--dir", str(self.disk / "runs")]
        self._daemon = subprocess.Popen(command, env=self._environment, stdout=self._log, stderr=self._log, cwd=self.folder)
        self._tree["daemon"] = psutil.Process(self._daemon.pid)

    def reap_daemon(self) -> None:
        self._daemon.wait(10)

    def _rank(self, rank: int) -> tuple[psutil.Process, psutil.Process]:
        """The process that trains, and its keeper: both have the rank in their environment, and one is the other's child."""
        of_rank = [
            one for one in self._mine() if one.info["environ"].get("RANK") == str(rank) and "chaos_train.py" in " ".join(one.cmdline())
        ]
        parents = {one.pid: one for one in of_rank}
        child = next(one for one in of_rank if one.ppid() in parents)
        return child, parents[child.ppid()]

    def _mine(self) -> list[Any]:
        return [one for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get(MARK) == self._mark]

    def signal(self, part: str, number: int) -> None:
        with suppress(psutil.NoSuchProcess):
            self._tree[part].send_signal(number)

    @property
    def is_over(self) -> bool:
        """The command has ended, or where nobody watches it any more, its ranks."""
        if self.launch.poll() is None:
            return False
        return not any(
            self._tree[f"rank {rank}"].is_running() and self._tree[f"rank {rank}"].status() != psutil.STATUS_ZOMBIE for rank in range(2)
        )

    def judged(self, wanted: list[str], fatal: str | None) -> list[str]:
        """What is not as it must be."""
        try:
            wait_for(lambda: self.is_over, "the end of the job")
        except TimeoutError as error:
            return [str(error)]
        self.exit_code = self.launch.wait(10)
        found, why = digests(self.folder), []
        if fatal is None or fatal == "kill node":  # then the training goes on without it
            why += [] if found == wanted else [f"the training came out as {found}, not {wanted}"]
        if fatal is None and self.exit_code != 0:
            why.append(f"exit code {self.exit_code} of a job of which no part was hit that must end it")
        if fatal not in (None, "kill node"):
            if self.exit_code == 0 and found != wanted:
                why.append("exit code 0 of a job that did not train to its end")
            if any(one not in ("", expected) for one, expected in zip(found, wanted, strict=True)):
                why.append(f"a rank came to its end with {found}, not {wanted}")
        with suppress(TimeoutError):  # a keeper or witness ends a moment after its rank
            wait_for(lambda: not self._others_than_daemon(), "the end of what is left", 10)
        left = [f"{one.pid} {' '.join(one.cmdline())[:80]}" for one in self._others_than_daemon()]
        return why + ([f"left: {left}"] if left else [])

    def _others_than_daemon(self) -> list[psutil.Process]:
        return [one for one in self._mine() if one.pid != self._daemon.pid and one.status() != psutil.STATUS_ZOMBIE]

    def said(self) -> str:
        return (self.folder / "launch.log").read_text(errors="replace")

    def end(self) -> None:
        for one in self._mine():
            with suppress(psutil.NoSuchProcess):
                one.kill()
        for process in (self._daemon, self.launch):
            with suppress(subprocess.TimeoutExpired, AttributeError):
                process.wait(10)
        self.line.close()
        self._log.close()
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.disk)], check=False)


class Blows:
    """What falls on the parts, one after the other, until the job is over. At most one of them is fatal, near the end of some trials."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world, self._rng = world, rng
        self.count: Counter[str] = Counter()
        self.fatal: str | None = None
        self._fatal_after = rng.choice([None, None, rng.randint(3, 25)])
        self._undo: list[tuple[float, Callable[[], None]]] = []

    def fall(self) -> None:
        world, rng = self._world, self._rng
        kinds = [self.stop, self.stop, self.kill_daemon, self.cut, self.slow, self.fill]
        while not world.is_over:
            self._undo_what_is_due(time.monotonic())
            if self._fatal_after is not None and sum(self.count.values()) >= self._fatal_after and self.fatal is None:
                self._kill_for_good()
            elif self.fatal is None:
                rng.choice(kinds)()
            pause = time.monotonic() + rng.uniform(0.02, 0.3)
            while time.monotonic() < pause and not world.is_over:
                self._undo_what_is_due(time.monotonic())
                time.sleep(0.01)
            if self.fatal is not None and not self._undo:
                break
        self._undo_what_is_due(float("inf"))

    def _undo_what_is_due(self, now: float) -> None:
        due = [undo for when, undo in self._undo if when <= now]
        self._undo = [one for one in self._undo if one[0] > now]
        for undo in due:
            undo()

    def _later(self, longest_s: float, undo: Callable[[], None]) -> None:
        self._undo.append((time.monotonic() + self._rng.uniform(0.02, longest_s), undo))

    def stop(self) -> None:
        """SIGSTOP, and after a while SIGCONT: of the agent's thread in a rank only together with its rank."""
        part = self._rng.choice(["node", "daemon", "keeper 0", "keeper 1", "rank 0", "rank 1"])
        self.count[f"stop {part.partition(' ')[0]}"] += 1
        self._world.signal(part, signal.SIGSTOP)
        self._later(1.0, lambda: self._world.signal(part, signal.SIGCONT))

    def kill_daemon(self) -> None:
        self.count["kill daemon"] += 1
        self._world.signal("daemon", signal.SIGKILL)
        self._world.reap_daemon()
        self._world.start_daemon()

    def cut(self) -> None:
        self.count["cut the line"] += 1
        self._world.line.cut()
        self._later(1.5, self._world.line.mend)

    def slow(self) -> None:
        self.count["slow the line"] += 1
        self._world.line.delay_s = self._rng.uniform(0.01, 0.3)
        self._later(1.5, lambda: setattr(self._world.line, "delay_s", 0.0))

    def fill(self) -> None:
        """The daemon's disk has no room for a while."""
        if not self._world.mounted:
            return
        self.count["fill the disk"] += 1
        filler = self._world.disk / f"filler-{sum(self.count.values())}"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
        self._later(1.5, lambda: filler.unlink(missing_ok=True))

    def _kill_for_good(self) -> None:
        part = self._rng.choice(["node", "keeper 0", "keeper 1", "rank 0", "rank 1"])
        self.fatal = f"kill {part.partition(' ')[0]}"
        self.count[self.fatal] += 1
        self._world.signal(part, signal.SIGKILL)


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = LATEST_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(0.02)


def table(known: dict[str, Any]) -> str:
    trials = known["trials"]
    blows: Counter[str] = Counter()
    for one in trials.values():
        blows.update(one["count"])
    outcomes = Counter((one["fatal"] or "nothing fatal", one["outcome"]) for one in trials.values())
    lines = [
        "# Chaos",
        "",
        f"Written by `{known['command']}`: {len(trials)} trainings of two ranks, {sum(blows.values())} blows; begun {known['date']}, torch "
        f"{known['versions']['torch']}, Python {known['versions']['python']}, {known['machine']['cores']} cores.",
        "",
        "| blow | how often |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in sorted(blows.items())),
        "",
        "| what had to end the job | came out | trainings |",
        "|---|---|---|",
        *(f"| {fatal} | {outcome} | {count} |" for (fatal, outcome), count in sorted(outcomes.items())),
        "",
        *(f"* seed {seed}: {'; '.join(one['why'])}" for seed, one in trials.items() if one["outcome"] == "WRONG"),
    ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
