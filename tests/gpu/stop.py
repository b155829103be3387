"""The main promise on real GPUs: run by hand on a machine that has them, `python tests/gpu/stop.py --out FILE.json`.

For each number of ranks that there are GPUs for: a clean run with and without the watchdog is bit-identical; a planted bad sample stops every rank
before its step, with no device-side assert, every time; the resumed run equals, bit for bit, one in which that step never happened, and so does one that
skips the step. `--resident`: the loader's batches are on the GPU already.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from launching import Ended, launch, script, torchrun
from machine import machine

WATCHDOG = [sys.executable, "-m", "torch_watchdog.cli"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


MORE: list[str] = []  # arguments of every launch
ROWS_PER_RANK = 24


def launched(folder: Path, name: str, ranks: int, wrapper: list[str], *arguments: object) -> Ended:
    place = folder / name
    place.mkdir(parents=True)
    more = [*MORE, *(["--fixed-buckets"] if ranks > 2 else [])]
    command = torchrun(*script("train.py", "--device", "cuda", "--rows", _rows(ranks), *more, *arguments), ranks=ranks)
    return launch(place, [*wrapper, *TORCHRUN, *command[1:]])


def numbers(run: Ended) -> tuple[list[str], list[str]]:
    return run.lines("step .* loss"), [path.read_text() for path in sorted((run.folder / "d").iterdir())] if (
        run.folder / "d"
    ).exists() else []


def _rows(ranks: int) -> int:
    return ROWS_PER_RANK * max(2, ranks)


def bad_sample(ranks: int) -> int:
    """A sample that the last rank meets at step 4, by the samplers of the script."""
    rng = torch.Generator().manual_seed(0)
    order = torch.randperm(_rows(ranks), generator=rng).tolist()
    return int(order[ranks - 1 :: ranks][3 * 4 + 2])


def scenario(folder: Path, ranks: int) -> dict[str, Any]:
    """One table row a claim, each with what was seen."""
    rows: dict[str, Any] = {}
    plain = launched(folder, "plain", ranks, [], "--epochs", 1, "--out", "d")
    watched = launched(folder, "watched", ranks, WATCHDOG, "--epochs", 1, "--out", "d")
    rows["clean run bit-identical"] = plain.code == watched.code == 0 and numbers(plain) == numbers(watched)
    bad = bad_sample(ranks) if ranks > 1 else 20
    began = time.monotonic()
    stopped = launched(folder, "stopped", ranks, WATCHDOG, "--epochs", 2, "--bad", bad)

    def again(trial: int) -> Ended:
        return launched(folder, f"stopped-{trial}", ranks, WATCHDOG, "--epochs", 2, "--bad", bad)

    rows["seconds of the stopped run"] = round(time.monotonic() - began, 1)
    rows["exit code"] = stopped.code
    text = stopped.out + stopped.err
    rows["no device-side assert"] = "device-side assert" not in text and "CUDA error" not in text
    incidents = stopped.incidents
    rows["stopped cleanly at step 4, of 4 trials"] = sum(_clean_stop(one) for one in [stopped, *(again(trial) for trial in range(3))])
    rows["incidents"] = [{name: incident[name] for name in ("kind", "step", "summary")} for incident in incidents]
    if not incidents:
        rows["output"] = text[-3000:]
        return rows
    action = incidents[0]["action"]
    rows["action"] = action
    checkpoint = action.get("checkpoint") or {}
    if checkpoint.get("committed"):
        (Path(checkpoint["path"]) / "quarantine.jsonl").unlink()  # the data is mended for the resumed run: the sample may come back
        resumed = launched(folder, "resumed", ranks, [*WATCHDOG, "--resume", checkpoint["path"]], "--restore", "--out", "d")
        reference = launched(folder, "reference", ranks, [], "--never", incidents[0]["step"], "--out", "d")
        rows["resumed bit-identical"] = numbers(resumed)[1] == numbers(reference)[1] != []
        rows["resumed exit code"] = resumed.code
        skipped = launched(folder, "skipped", ranks, [*WATCHDOG, "--policy", "skip"], "--epochs", 1, "--bad", bad, "--out", "d")
        once = launched(folder, "once", ranks, [], "--epochs", 1, "--never", incidents[0]["step"], "--out", "d")
        rows["skipped bit-identical"] = skipped.code == once.code == 0 and numbers(skipped)[1] == numbers(once)[1] != []
        if not rows["skipped bit-identical"]:
            rows["skipped output"] = (skipped.out + skipped.err)[-3000:]
        if not rows["resumed bit-identical"]:
            rows["resumed output"] = (resumed.out + resumed.err)[-3000:]
    else:
        rows["output"] = text[-3000:]
    return rows


def _clean_stop(run: Ended) -> bool:
    action = run.incidents[0]["action"] if run.incidents else {}
    return run.code == 65 and action.get("stopped_at_step") == 4 and bool((action.get("checkpoint") or {}).get("committed"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="numbers of ranks; those without a GPU each are left out")
    parser.add_argument("--resident", action="store_true")
    args = parser.parse_args()
    MORE[:] = ["--resident"] * args.resident
    results: dict[str, Any] = {"machine": machine(), "command": " ".join(["python tests/gpu/stop.py --out FILE.json", *MORE])}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in [number for number in args.ranks if number <= torch.cuda.device_count()]:
            results[f"{ranks} rank" + ("s" if ranks > 1 else "")] = scenario(Path(folder) / str(ranks), ranks)
            Path(args.out).write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
