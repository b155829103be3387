"""A million schedules once, for RESULTS.json beside this file: `python tests/sim/million.py [FIRST_SEED] [COUNT]`.

Seeds follow each other, so that anybody can run the same.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

from driver import run_all

HERE = Path(__file__).parent


def main(first: int, count: int) -> int:
    began = time.monotonic()
    failure = run_all(first, count)
    took = time.monotonic() - began
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()
    result = {
        "schedules": count, "first_seed": first, "failure": None if failure is None else str(failure), "seconds": round(took),
        "schedules_a_second": round(count / took), "commit": commit, "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
    }  # fmt: skip
    (HERE / "RESULTS.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return failure is not None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0, int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000))
