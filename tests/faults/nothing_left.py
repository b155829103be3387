"""Launch after launch in namespaces of their own (processes, /tmp and /dev/shm; needs root): `python tests/faults/nothing_left.py` counts what is left.

Writes results/nothing-left.json and .md, and goes on from what is there. `--launches 200`, `--for SECONDS` (begin nothing new after them), `--jobs 2`,
`--fresh`, `--out FILE`. Every fourth launch ends well, has a rank that raises, has one that is killed, or is stopped by a bad batch.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from launching import launch, script, torchrun, watchdog

OUT = Path(__file__).parent / "results" / "nothing-left.json"
INSIDE = "NOTHING_LEFT_INSIDE"
ENDS_WITHIN_S = 10.0  # of a launch, for what still copies output or is being reaped
KINDS = {
    "ends well": (("failing.py", "--steps", "6"), 0),
    "a rank raises": (("failing.py", "--fault", "raise"), 1),
    "a rank is killed": (("failing.py", "--fault", "kill"), 1),
    "a bad batch": (("train.py", "--bad", "38"), 65),
}
WORDS = """Written by `python tests/faults/nothing_left.py`: real launches of two ranks under the watchdog, two at a time, in namespaces of their own, so that
every process, every file in /dev/shm and every file in /tmp is one of theirs. Looked at while none runs, after each round. In /tmp `torchelastic_*` and
`torchinductor_*` are torch's own; `torch-watchdog-UID`, here and in /dev/shm, is one folder a user, which stays."""


def main() -> None:
    options = arguments()
    if INSIDE not in os.environ:
        sys.exit(enter())
    known: list[dict[str, Any]] = [] if options.fresh or not options.out.exists() else json.loads(options.out.read_text())["rounds"]
    ends = time.monotonic() + options.seconds
    while (done := sum(sum(one["launches"].values()) for one in known)) < options.launches and time.monotonic() < ends:
        known.append(round_of(min(2 * len(KINDS), options.launches - done), options.jobs))
        write(options.out, known)
        print(json.dumps(known[-1]), flush=True)
    write(options.out, known)
    print(table(known))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"))
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def enter() -> int:
    """The same command in namespaces of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "XDG_RUNTIME_DIR")}
    return subprocess.run(entering([sys.executable, *sys.argv]), env={**kept, INSIDE: "1"}, check=False).returncode


def entering(command: list[str]) -> list[str]:
    """The command as the first process of a machine with nothing in /tmp and /dev/shm."""
    within = 'mount -t tmpfs none /tmp && mount -t tmpfs none /dev/shm && exec "$@"'
    return ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", within, "sh", *command]


def round_of(count: int, jobs: int) -> dict[str, Any]:
    """So many launches, then a look at what there is."""
    kinds, wrong = list(KINDS) * count, []

    def one(kind: str) -> None:
        words, expected = KINDS[kind]
        folder = Path(tempfile.mkdtemp(prefix="launch-"))
        ended = launch(folder, [*watchdog(), *torchrun(*script(*words))])
        if ended.code != expected:
            wrong.append(f"{kind}: exit code {ended.code}, not {expected}: {ended.err[-300:]}")
        shutil.rmtree(folder)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, kinds[:count]))
    return {"launches": dict(Counter(kinds[:count])), "wrong": wrong} | left()


def left() -> dict[str, list[str]]:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while (processes := others()) and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    return {"processes": processes, "shm": sorted(os.listdir("/dev/shm")), "tmp": sorted(os.listdir("/tmp"))}


def others() -> list[str]:
    """Every process but this one, the machine's first. Zombies too: there is nobody else here who would reap them, so they are reaped first."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            break
    found = [path for path in Path("/proc").iterdir() if path.name.isdigit() and int(path.name) != os.getpid()]
    return [words for path in found if (words := command_of(path))]


def command_of(path: Path) -> str:
    try:
        return (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200] or (path / "comm").read_text().strip()
    except OSError:
        return ""


def write(out: Path, rounds: list[dict[str, Any]]) -> None:
    import torch

    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, gloo"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"about": f"{datetime.now(UTC).date().isoformat()}, {versions}.", "rounds": rounds}, indent=1) + "\n")
    told = f"# What launches leave behind\n\n{WORDS}\n\n{table(rounds)}\n\n{json.loads(out.read_text())['about']}\n"
    out.with_suffix(".md").write_text(told)


def table(rounds: list[dict[str, Any]]) -> str:
    counts: Counter[str] = Counter()
    for one in rounds:
        counts.update(one["launches"])
    lines = ["| launch | count |", "|---|---|", *(f"| {kind} | {count} |" for kind, count in counts.items())]
    processes, wrong = (sum(len(one[what]) for one in rounds) for what in ("processes", "wrong"))
    last = rounds[-1] if rounds else {"shm": [], "tmp": []}
    lines += [
        "",
        f"{counts.total()} launches, {len(rounds)} looks: {processes} processes left, {wrong} launches with another exit code than expected.",
        f"After the last look there are in /dev/shm: {named(last['shm'])}; in /tmp: {named(last['tmp'])}.",
    ]
    return "\n".join(lines)


def named(files: list[str]) -> str:
    """Names that differ in what was drawn for them only, once and counted."""
    kinds = Counter(re.sub(r"_[a-z0-9_]{8}$", "_*", name) for name in files)
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in sorted(kinds.items())) or "nothing"


if __name__ == "__main__":
    main()
