"""The guard over every model class of the installed transformers that can be built tiny from its configuration, with random weights.

    python tests/sweep/models.py [--jobs 2] [--only GLOB] [--json results.json] [--table RESULTS.md]

Each class: clean batches (no alarm may come), then one bad id, one bad label and one batch that is too long, each against the truth: whether the
step without a guard raises. Classes run in child processes, a few in each, because a bad index may take its process along.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import fnmatch
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHUNK, CLASS_TIMEOUT_S = 24, 120
TASKS = (
    "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "MULTIPLE_CHOICE",
    "NEXT_SENTENCE_PREDICTION", "SPEECH_SEQ_2_SEQ", "CTC", "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT", "QUESTION_ANSWERING",
)  # fmt: skip
PROBES = ("id", "label", "position")
EXPLAINED = {
    "Longformer*: position: *": "the model pads its input to a multiple of its window before it counts positions; that length is no size of the batch "
    "that can be foreseen, so the computed positions are listed as not covered (the ids themselves are guarded whole)",
}


def explanation(line: str) -> str | None:
    """Why a miss (`Class: probe: outcome`) is one, where that is known."""
    return next((why for pattern, why in EXPLAINED.items() if fnmatch.fnmatch(line, pattern)), None)


def class_names() -> list[str]:
    """The classes of the automatic mappings, once each."""
    from transformers.models.auto import modeling_auto

    names: dict[str, None] = {}
    for task in TASKS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES", {})
        for classes in mapping.values():
            for name in classes if isinstance(classes, (tuple, list)) else [classes]:
                names[name] = None
    return list(names)


# The parent: chunks of classes in child processes


def swept(names: list[str], *, jobs: int, known: dict[str, dict[str, Any]], keep: Callable[[dict[str, dict[str, Any]]], None]) -> None:
    """Adds one result a class to `known`; `keep` is called with it after each child, so that a sweep can go on where it was ended."""
    left = [name for name in names if name not in known]
    chunks = [left[start : start + CHUNK] for start in range(0, len(left), CHUNK)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in concurrent.futures.as_completed([pool.submit(_chunk, chunk) for chunk in chunks]):
            known.update({result["class"]: result for result in done.result()})
            keep(known)
            print(f"{len(known)} {dict(Counter(result['status'] for result in known.values()))}", file=sys.stderr, flush=True)


def _chunk(names: list[str]) -> list[dict[str, Any]]:
    """A child for the classes; where it dies or hangs, its class is noted and another child goes on."""
    results: list[dict[str, Any]] = []
    while len(results) < len(names):
        left = names[len(results) :]
        made, why = _child(left)
        results += made
        if len(made) < len(left) and why:
            results.append({"class": left[len(made)], "status": "ended", "why": why})
    return results


def _child(names: list[str]) -> tuple[list[dict[str, Any]], str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as out:
        command = [sys.executable, str(HERE / "one_model.py"), "--out", out.name, *names]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
            why = _watched(child, Path(out.name))
        lines = [json.loads(line) for line in out.read().splitlines()]
    return lines, why


def _watched(child: subprocess.Popen[bytes], out: Path) -> str:
    """Waits while lines come; the words for an end that is none of the classes' own."""
    size, since = -1, time.monotonic()
    while child.poll() is None:
        if out.stat().st_size != size:
            size, since = out.stat().st_size, time.monotonic()
        if time.monotonic() - since > CLASS_TIMEOUT_S:
            child.kill()
            return f"no end after {CLASS_TIMEOUT_S} s"
        try:
            child.wait(0.5)
        except subprocess.TimeoutExpired:
            continue
    return "" if child.returncode == 0 else f"the process ended with {child.returncode}"


# The table


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    ran = [result for result in results if result["status"] == "swept"]
    probes = {probe: Counter(result[probe]["outcome"] for result in ran) for probe in PROBES}
    return {
        "classes": len(results), "swept": len(ran), "false_alarms": sum(bool(result["alarms"]) for result in ran),
        "guard_off": sum(bool(result["said"]) for result in ran), **{probe: dict(counts) for probe, counts in probes.items()},
    }  # fmt: skip


def table(document: dict[str, Any]) -> str:
    results, total = document["results"], document["summary"]
    lines = [
        "# The guard over the model classes of transformers", "",
        f"Made by `tests/sweep/models.py` on {document['date']}: Python {document['python']}, torch {document['torch']}, transformers "
        f"{document['transformers']}. {total['swept']} of the {total['classes']} classes that were tried (of {document['all']}) could be built tiny "
        f"from their configuration and trained; "
        f"alarms on clean batches in {total['false_alarms']}, guard turned off in {total['guard_off']}.", "",
        "The truth is whether the step without a guard raises. *held*: before the step; *refused*: before the operator, inside the step; *named*: "
        "the library's own exception was explained; *harmless*: the step runs, and the guard is silent.", "",
        "| | held | refused | named | harmless | missed | false alarm | not applicable |", "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for probe in PROBES:
        counts = Counter(total[probe])
        row = [counts[outcome] for outcome in ("held", "refused", "named", "harmless", "missed", "false alarm", "not applicable")]
        lines.append(f"| bad {probe} | {' | '.join(map(str, row))} |")
    lines += ["", "## Misses and alarms", "", *(_misses(results) or ["None."])]
    lines += ["", "## Classes", "", "| class | clean batches, traced | id | label | position |", "|---|---|---|---|---|"]
    lines += [_row(result) for result in results if result["status"] == "swept"]
    lines += ["", "## Not swept", "", *_not_swept(results)]
    return "\n".join(lines) + "\n"


def _row(result: dict[str, Any]) -> str:
    cells = [result[probe]["outcome"] + (f" `{result[probe]['key']}`" if result[probe].get("key") else "") for probe in PROBES]
    return f"| {result['class']} | {result['clean']}, {result['traced']} | {' | '.join(cells)} |"


def _misses(results: list[dict[str, Any]]) -> list[str]:
    grouped: dict[str, list[str]] = {}
    for result in results:
        if result["status"] != "swept":
            continue
        for probe in PROBES:
            if result[probe]["outcome"] in ("missed", "false alarm"):
                known = explanation(f"{result['class']}: {probe}: {result[probe]['outcome']}")
                line = f"{probe}, {result[probe]['outcome']}: {result[probe]['why']}" + (f": {known}" if known else "")
                grouped.setdefault(line, []).append(result["class"])
        for alarm in result["alarms"] + result["said"]:
            grouped.setdefault(f"clean: {alarm}", []).append(result["class"])
    return [f"- {why} ({', '.join(classes)})" for why, classes in sorted(grouped.items())]


def _not_swept(results: list[dict[str, Any]]) -> list[str]:
    grouped: dict[str, list[str]] = {}
    for result in results:
        if result["status"] != "swept":
            grouped.setdefault(f"{result['status']}: {result['why']}", []).append(result["class"])
    return [f"- {why} ({len(classes)}: {', '.join(classes)})" for why, classes in sorted(grouped.items(), key=lambda item: -len(item[1]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="*", help="classes by name; others keep the result that they have")
    parser.add_argument("--again", action="store_true", help="also classes that have a result")
    parser.add_argument("--json", type=Path, default=HERE / "results.json")
    parser.add_argument("--table", type=Path, default=HERE / "RESULTS.md")
    options = parser.parse_args()
    names = [name for name in class_names() if any(fnmatch.fnmatch(name, part) for part in options.only.split(","))]
    known = {result["class"]: result for result in json.loads(options.json.read_text())["results"]} if options.json.exists() else {}
    known = {name: result for name, result in known.items() if not (options.again and name in names)}
    swept(names, jobs=options.jobs, known=known, keep=lambda known: written(known, options.json, options.table))


def written(known: dict[str, dict[str, Any]], path: Path, table_path: Path) -> None:
    import torch
    import transformers

    results = [known[name] for name in class_names() if name in known]
    document = {
        "date": datetime.date.today().isoformat(), "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "all": len(class_names()), "summary": summary(results), "results": results,
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=1) + "\n")
    table_path.write_text(table(document))


if __name__ == "__main__":
    main()
