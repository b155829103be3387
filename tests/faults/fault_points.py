"""kill -9 of every process before and after every word of the stop protocol, on real launches: `python tests/faults/fault_points.py`.

Writes results/fault-points.json and .md, and goes on from what is there. `--for SECONDS` (begin nothing new after them), `--jobs 2`, `--only TEXT`,
`--fresh` (forget what is there, of `--only` those).
The words are the protocol's own; which story each comes in, and who says it to whom there, is in STORIES. A trial is good where the point was reached,
the launch ended within the timeouts, no two ranks have different parameters after the same update, the bad batch moved none, and every checkpoint that is
called good is whole.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from launching import Ended, ended, launch, script, start, torchrun, until, watchdog
from ports import free_port

from torch_watchdog_agent.checkpoint import manifest
from torch_watchdog_proto.checkpoint_names import COMMITTED
from torch_watchdog_proto.fault_points import MARK, VARIABLE

OUT = Path(__file__).parent / "results" / "fault-points.json"
LONGEST_S = 200.0  # start, the steps, the timeouts of an order (10 s each) or of the process group (60 s), torchrun's own end of a failed launch (30 s)
BAD, FIRST, BAD_STEP = 38, 18, 4  # samples that meet rank 1 at step 4, at step 0
BOTH = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A launch, and the words in it: by which ranks said, to which ranks told."""

    script: tuple[object, ...]
    said: dict[str, tuple[int, ...]]
    told: dict[str, tuple[int, ...]]
    options: tuple[str, ...] = ()
    updates: tuple[int, ...] = ()  # of a checkpoint that is called good: one of these, where there are any
    saves: str = ""  # at these points there must be one all the same
    asked: str = ""  # what somebody does meanwhile


STORIES = {
    "stop": Story(
        script=("--bad", BAD), updates=(BAD_STEP,),
        # the other rank holds everything, a bad batch in its hand or not; all know that all is whole
        saves=r"(keeper-of-)?rank-\d before Sav(ing|ed)|rank-0 (before Ack|got Prepare)|node (got Sav(ing|ed)|before WriteCommitted)",
        said={"RankHello": BOTH, "Hold": (1,), "Ack": BOTH, "Saving": BOTH, "Saved": BOTH, "Committed": (0,), "Left": BOTH},
        told={"Prepare": BOTH, "Commit": BOTH, "WriteCommitted": (0,), "Leave": BOTH},
    ),
    "skip": Story(
        script=("--bad", BAD), options=("--policy", "skip"),
        said={"Hold": (1,), "Ack": BOTH, "Vetoed": BOTH, "Finished": BOTH}, told={"Prepare": BOTH, "Commit": BOTH},
    ),
    "a stop that is cancelled": Story(
        script=("--fault", "native"), asked="cancel", said={"Ack": (0,)}, told={"Prepare": BOTH, "Abandon": BOTH},
    ),
    "a rank that can promise nothing": Story(script=("--fault", "off"), asked="stop", said={"CannotPromise": (1,)}, told={}),
    "preemption": Story(
        script=("--fault", "meet", "--rows", "2400"), asked="signal",  # steps enough that the order finds them at work
        said={"Signalled": BOTH, "Ack": BOTH}, told={"Prepare": BOTH, "Commit": BOTH},
    ),
    "rescue, a rank raises": Story(
        script=("--fault", "raise"), updates=(4, 5),  # the healthy rank may not have made the update that the other had before it raised
        said={"Failed": (1,), "Freed": (0,), "Saved": (0,), "Committed": (0,)},
        told={"Free": (0,), "Rescue": (0,), "WriteCommitted": (0,), "Leave": BOTH, "Release": ()},
    ),
    "rescue, a rank stands still": Story(script=("--fault", "stop"), updates=(5,), said={"Looked": (0,)}, told={"Look": (0,)}),
    "a bad batch in the very first step": Story(script=("--bad", FIRST), said={"Refused": (1,)}, told={}),
    "observed": Story(script=("--bad", BAD), options=("--policy", "observe"), said={"Noticed": (1,)}, told={}),
}  # fmt: skip


def points() -> Iterator[tuple[str, str]]:
    """Every (story, point)."""
    for name, story in STORIES.items():
        for word, ranks in story.said.items():
            yield from ((name, f"rank-{rank} before {word}") for rank in ranks)
            yield name, f"keeper-of-rank-{ranks[-1]} before {word}"
            yield from ((name, f"{who} got {word}") for who in ("node", "daemon"))
        for word, ranks in story.told.items():
            yield from ((name, f"{who} before {word}") for who in ("daemon", "node"))
            yield from ((name, f"rank-{rank} got {word}") for rank in ranks)
            yield from ((name, f"keeper-of-rank-{rank} got {word}") for rank in ranks[-1:])


def main() -> None:
    options = arguments()
    known: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    known = {one: trial for one, trial in known.items() if not (options.fresh and options.only in one)}
    left = [one for one in points() if " / ".join(one) not in known and options.only in " / ".join(one)]
    lock, ends = threading.Lock(), time.monotonic() + options.seconds

    def work(one: tuple[str, str]) -> None:
        if time.monotonic() > ends:
            return
        result = trial(*one)
        with lock:
            known[" / ".join(one)] = result
            options.out.parent.mkdir(exist_ok=True)
            options.out.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
            options.out.with_suffix(".md").write_text(table(known))
            print(" / ".join(one), json.dumps(result), flush=True)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, left))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"))
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def trial(name: str, point: str) -> dict[str, Any]:
    """One launch in a folder of its own, in which a process dies at `point`."""
    folder = Path(tempfile.mkdtemp(prefix="fault-point-"))
    began = time.monotonic()
    try:
        run = run_story(folder, STORIES[name], point)
        wrong = judge(run, STORIES[name])
    except (AssertionError, subprocess.TimeoutExpired) as error:
        run, wrong = None, [f"{type(error).__name__}: {error}".splitlines()[0][:200]]
    seconds = time.monotonic() - began
    wrong += [] if (folder / "reached").exists() else ["the point was never reached"]
    wrong += [f"it took {seconds:.0f} s"] if seconds > LONGEST_S else []
    saved = sorted(path.parent.name for path in folder.rglob(COMMITTED))
    wrong += ["nothing was saved"] if re.fullmatch(STORIES[name].saves, point) and not saved else []
    if not wrong:
        shutil.rmtree(folder)
    facts = {"code": None if run is None else run.code, "good": saved, "seconds": round(seconds, 1), "wrong": wrong}
    return facts | {"commit": commit(), "date": datetime.now(UTC).strftime("%Y-%m-%d")} | ({"folder": folder.name} if wrong else {})


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()


def run_story(folder: Path, story: Story, point: str) -> Ended:
    dies = {VARIABLE: point, MARK: str(folder / "reached")}
    options, daemon = ("--job", "dying", *story.options), None
    if point.startswith("daemon"):  # one of its own, so that nothing but it dies
        address = f"127.0.0.1:{free_port()}"
        daemon, dies = served(folder / "daemon", address, **dies), {}
        options = (*options, "--daemon", address, "--grace", "20")
    try:
        process = start(folder, [*watchdog(*options), *torchrun(*script("points.py", *story.script))], **dies)
        meddle(folder, story, process)
        run = ended(process, folder)
        if point.startswith("node"):  # its launch is over with it; the training ends by itself
            until(lambda: not ranks_of(folder), "the ranks have ended", LONGEST_S)
    finally:
        if daemon is not None:
            daemon.kill()
            daemon.wait(30)
    return Ended(run.code, (folder / "out").read_text(), (folder / "err").read_text(), folder)


def meddle(folder: Path, story: Story, process: subprocess.Popen[str]) -> None:
    """What a person or a scheduler does to the running job."""
    if not story.asked:
        return
    sign = folder / ("native" if story.asked == "cancel" else "here")
    until(lambda: sign.exists() or process.poll() is not None, "the training is there")
    if process.poll() is not None:
        return
    if story.asked == "stop":
        launch(folder, [*watchdog("stop", "dying", "--no-wait")])
        (folder / "go").touch()
    elif story.asked == "cancel":  # a rank does not answer meanwhile
        launch(folder, [*watchdog("stop", "dying", "--no-wait")])
        launch(folder, [*watchdog("stop", "dying", "--cancel")])
    else:
        process.send_signal(signal.SIGTERM)
        (folder / "go").touch()


def served(folder: Path, address: str, **more: str) -> subprocess.Popen[str]:
    """A central daemon, once it answers."""
    folder.mkdir(exist_ok=True)
    daemon = start(folder, [*watchdog("serve"), "--port", address.rpartition(":")[2], "--dir", str(folder / "runs")], **more)
    said = (folder / "out", folder / "err")
    until(lambda: any(address in path.read_text() for path in said), "the daemon serves")
    return daemon


def ranks_of(folder: Path) -> list[str]:
    """Processes that work in this folder."""
    here = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            here += [path.parent.name] if path.readlink() == folder else []
        except OSError:
            continue
    return here


def judge(run: Ended, story: Story) -> list[str]:
    """What must never be, as far as it is."""
    steps = {rank: dict(re.findall(rf"rank {rank} step (\d+) parameters (\w+)", run.out)) for rank in BOTH}
    wrong = [f"step {step}: the ranks' parameters differ" for step in steps[0].keys() & steps[1].keys() if steps[0][step] != steps[1][step]]
    if abs(len(steps[0]) - len(steps[1])) > 1:  # a rank that was killed may not have said its last
        wrong.append(f"rank 0 made {len(steps[0])} steps, rank 1 {len(steps[1])}")
    if BAD in story.script:
        wrong += [
            f"rank {rank} applied the bad batch"
            for rank in BOTH
            if steps[rank].get(str(BAD_STEP), "") not in ("", steps[rank].get(str(BAD_STEP - 1)))
        ]
    return wrong + [found for path in run.folder.rglob(COMMITTED) for found in half(path.parent, story)]


def half(checkpoint: Path, story: Story) -> list[str]:
    """What is wrong with a checkpoint that is called good."""
    try:
        facts = manifest.verify(checkpoint)
    except Exception as error:
        return [f"{checkpoint.name} is called good: {error}"]
    if story.updates and facts["updates_applied"] not in story.updates:
        return [f"{checkpoint.name} holds {facts['updates_applied']} updates, not {' or '.join(map(str, story.updates))}"]
    return (
        []
        if sorted(facts["ranks"]) == [0, 1] or facts["kind"] == "rescue"
        else [f"{checkpoint.name} has parts of ranks {facts['ranks']} only"]
    )


HEAD = """# kill -9 between any two words

Written by `python tests/faults/fault_points.py` (its first words say what a trial must show): real launches of two ranks on one machine, in each of which one
process is killed at one point. "before": it is about to say the word; "got": it has just been told it. The daemon is one of its own where it dies.

"""


def table(known: dict[str, Any]) -> str:
    rows = []
    for name in STORIES:
        of_story = {key.partition(" / ")[2]: one for key, one in known.items() if key.startswith(f"{name} / ")}
        planned = sum(story == name for story, _ in points())
        bad = [f"{point}: {'; '.join(one['wrong'])}" for point, one in of_story.items() if one["wrong"]]
        good = sum(bool(one["good"]) for one in of_story.values())
        longest = max((one["seconds"] for one in of_story.values()), default=0.0)
        words = ", ".join(sorted({point.split()[-1] for point in of_story}))
        rows.append(
            f"| {name} | {words} | {len(of_story)} of {planned} | {len(of_story) - len(bad)} | {good} | {longest:.0f} s | {'<br>'.join(bad) or '-'} |"
        )
    columns = ("story", "words", "points tried", "as it must be", "left a checkpoint", "longest", "what was not")
    when = sorted({(one["date"], one["commit"]) for one in known.values()})
    made = "; ".join(dict.fromkeys(f"{date} at {made_at}" for date, made_at in when))
    return (
        f"{HEAD}| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n" + "\n".join(rows)
        + f"\n\n{len(known)} trials; {made}; torch {_torch()}, Python {platform.python_version()}, gloo.\n"
    )  # fmt: skip


def _torch() -> str:
    from importlib.metadata import version

    return version("torch")


if __name__ == "__main__":
    main()
