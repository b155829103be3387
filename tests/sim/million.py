"""A million schedules and the deliberate bugs, once a release, for RESULTS.json beside this file: `python tests/sim/million.py [--for SECONDS] [--count N]`.

Seeds follow each other from 0, so that anybody can run the same. Goes on from what is there, as long as the protocol is the same.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from driver import problem_of, run_all
from mutants import MUTANTS
from plan import draw

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.json"
PIECE = 20_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    protocol, ends = _git("rev-parse", "HEAD:proto/torch_watchdog_proto/stop"), time.monotonic() + options.seconds
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if known.get("protocol") != protocol:
        known = {"schedules": 0, "first_seed": 0, "failure": None, "seconds": 0.0, "protocol": protocol}
    while known["schedules"] < options.count and known["failure"] is None and time.monotonic() < ends:
        began = time.monotonic()
        failure = run_all(known["schedules"], PIECE)
        known |= {"failure": None if failure is None else str(failure), "schedules": known["schedules"] + PIECE}
        known["seconds"] = round(known["seconds"] + time.monotonic() - began, 1)
        _write(known)
    if "bugs_found_after_schedules" not in known and time.monotonic() < ends:
        _write(known | {"bugs_found_after_schedules": {name: _found_after(name) for name in MUTANTS}})
    return known["failure"] is not None


def _found_after(name: str) -> int:
    return next(seed + 1 for seed in itertools.count() if problem_of(draw(seed), seed, **MUTANTS[name]) is not None)


def _write(known: dict[str, Any]) -> None:
    made = {
        "commit": _git("rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
    }
    RESULTS.write_text(json.dumps(known | made, indent=2) + "\n")
    print(json.dumps(known), flush=True)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
