"""The batch of an assertion, again: run by hand on a machine with a GPU, `python tests/gpu/replay.py --out FILE.json`.

A launch that only observes meets an index past its table on the GPU. Its bundle is replayed on the CPU, on the GPU behind CUDA_LAUNCH_BLOCKING, and so
with the option typed behind the bundle. Each must end by the error, with the stack down to the script's own line and the finding that the guard had.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from launching import launch, script, torchrun, watchdog

ERRORS = {"on the CPU": "index out of range in self", "on the GPU": "device-side assert triggered"}
LINE = re.compile(r'File "[^"]*train\.py", line \d+, in forward\n\s*(.*)')


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="of the launch that is observed")
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "command": "python tests/gpu/replay.py --out FILE.json"}
    with tempfile.TemporaryDirectory() as folder:
        observed = launch(
            Path(folder), [*watchdog("--policy", "observe"), *torchrun(*script("train.py", "--device", args.device, "--bad", 38), ranks=1)]
        )
        bundle = next((observed.run_dir / "bundles").glob("*.safetensors"))
        said = re.search(r"  what   (.*)", observed.err)
        results["observed"] = {"exit code": observed.code, "assertion": "device-side assert" in observed.err, "what": said and said[1]}
        for title, words in {
            "replay BUNDLE": [bundle],
            "replay --cuda BUNDLE": ["--cuda", bundle],
            "replay BUNDLE --cuda": [bundle, "--cuda"],
        }.items():
            again = launch(Path(folder), watchdog("replay", *map(str, words)))
            where, line = "on the GPU" if "--cuda" in words else "on the CPU", LINE.search(again.err)
            results[title] = {
                "exit code": again.code,
                "the error": ERRORS[where] in again.err,
                "where": where in again.err,
                "the script's line": line and line[1].strip(),
                "what": bool(said and said[1] in again.err),
            }
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
