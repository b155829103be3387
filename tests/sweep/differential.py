"""Random corruption of the batches of many model families, and what the guard says, against the truth: whether the step without a guard raises.

    python tests/sweep/differential.py [--rounds 150] [--clean 200] [--only GLOB] [--again] [--json FILE] [--table FILE]

The families of the guard's own tests, and classes of transformers, tiny and with random weights. Each runs in a child process, because a bad index may
take its process along; results are kept after each, so that a run can go on where it was ended.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "agent" / "contract")]

FAMILY_TIMEOUT_S = 900
CLASSES = (
    "BertForMaskedLM", "RobertaForSequenceClassification", "DistilBertForMaskedLM", "AlbertForMaskedLM", "ElectraForTokenClassification",
    "DebertaV2ForSequenceClassification", "MPNetForMaskedLM", "BigBirdForMaskedLM", "LayoutLMForTokenClassification", "LayoutLMv3ForTokenClassification",
    "GPT2LMHeadModel", "GPTNeoXForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "GemmaForCausalLM", "MixtralForCausalLM",
    "OPTForCausalLM", "BloomForCausalLM", "BartForConditionalGeneration", "PegasusForConditionalGeneration", "T5ForConditionalGeneration",
    "M2M100ForConditionalGeneration", "BertForMultipleChoice",
)  # fmt: skip
MIN_CAUGHT = 0.97


def names() -> list[str]:
    from guard_zoo import FAMILIES

    return [name for name, make in FAMILIES.items() if make().corrupt] + list(CLASSES)


def family_of(name: str) -> Any:
    """A family of the guard's tests, or one made of a class of transformers."""
    import torch
    from guard_zoo import FAMILIES, Family
    from tiny import LENGTH, tiny

    torch.manual_seed(0)
    if name in FAMILIES:
        return FAMILIES[name]()
    made = tiny(name)
    return Family(name, made.model, lambda: made.batch(random.choice((2, 2, 2, 3, 1)), LENGTH + random.choice((0, 0, 1, 2, 4))), made.step)


def result_of(name: str, rounds: int, clean: int) -> dict[str, Any]:
    """What became of one family. Runs in the child."""
    from corruption import compared

    found = compared(family_of(name), rounds, clean=clean)
    return {
        "family": name, "clean": found.clean, "alarms": found.alarms, "harmful": found.harmful, "harmless": found.harmless, "undecided": found.undecided,
        "held": found.caught["held"], "refused": found.caught["refused"], "named": found.caught["named"], "missed": found.missed, "blamed": found.blamed,
    }  # fmt: skip


def _in_a_child(name: str, rounds: int, clean: int) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        command = [sys.executable, __file__, "--child", name, "--rounds", str(rounds), "--clean", str(clean), "--json", out.name]
        try:
            code = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, timeout=FAMILY_TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            code = -1
        text = out.read()
    return json.loads(text) if text else {"family": name, "ended": code}


# The table


def summary(results: list[dict[str, Any]]) -> dict[str, int]:
    ran = [one for one in results if "ended" not in one]
    counted = ("clean", "harmful", "held", "refused", "named", "harmless", "undecided")
    listed = {key: sum(len(one[key]) for one in ran) for key in ("alarms", "missed", "blamed")}
    return {"families": len(ran), **{key: sum(one[key] for one in ran) for key in counted}, **listed}


def caught_share(total: dict[str, int]) -> float:
    return 1 - total["missed"] / max(1, total["harmful"])


def table(document: dict[str, Any]) -> str:
    total = document["summary"]
    lines = [
        "# Random corruption of batches", "",
        f"Made by `python tests/sweep/differential.py` on {document['date']}: Python {document['python']}, torch {document['torch']}, transformers "
        f"{document['transformers']}. {total['families']} families; {total['alarms']} alarms in {total['clean']} clean batches of many shapes.", "",
        f"Of {total['harmful']} corruptions that make the step without a guard raise, {total['harmful'] - total['missed']} were caught "
        f"({caught_share(total):.1%}): *held* before the step, *refused* before the operator inside it, or *named* when the library raised. "
        f"Of {total['harmless'] + total['blamed']} that it takes, {total['blamed']} were called bad. "
        "*Undecided*: a mean over nothing (NaN, no exception) and bags that run backwards.", "",
        "A batch is spoiled at random: one cell gets another value, all values of a sample are moved by as much, one tensor gets another length, "
        "or another dtype.", "",
        "| family | clean, alarms | harmful | held | refused | named | missed | harmless | called bad | undecided |", "|" + "---|" * 10,
    ]  # fmt: skip
    lines += [_row(one) for one in document["results"]]
    lines += ["", "## Misses, and harmless batches that were called bad", "", *(_listed(document["results"]) or ["None."])]
    return "\n".join(lines) + "\n"


def _row(one: dict[str, Any]) -> str:
    if "ended" in one:
        return f"| {one['family']} | its process ended with {one['ended']} | | | | | | | | |"
    parts = [f"{one['clean']}, {len(one['alarms'])}", *(one[key] for key in ("harmful", "held", "refused", "named"))]
    parts += [len(one["missed"]), one["harmless"], len(one["blamed"]), one["undecided"]]
    return f"| {one['family']} | {' | '.join(map(str, parts))} |"


def _listed(results: list[dict[str, Any]]) -> list[str]:
    ran = [one for one in results if "ended" not in one]
    return [f"- {one['family']}, {kind}: {text}" for one in ran for kind in ("alarms", "missed", "blamed") for text in one[kind]]


def written(known: dict[str, dict[str, Any]], path: Path, table_path: Path) -> None:
    import torch
    import transformers

    results = [known[name] for name in names() if name in known]
    document = {
        "date": datetime.date.today().isoformat(), "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "summary": summary(results), "results": results,
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=1) + "\n")
    table_path.write_text(table(document))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--clean", type=int, default=200)
    parser.add_argument("--only", default="*", help="families by name; others keep the result that they have")
    parser.add_argument("--again", action="store_true", help="also families that have a result")
    parser.add_argument("--json", type=Path, default=HERE / "differential.json")
    parser.add_argument("--table", type=Path, default=HERE / "DIFFERENTIAL.md")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        warnings.filterwarnings("ignore")
        given.json.write_text(json.dumps(result_of(given.child, given.rounds, given.clean)))
        return 0
    known = {one["family"]: one for one in json.loads(given.json.read_text())["results"]} if given.json.exists() else {}
    for name in names():
        if any(fnmatch.fnmatch(name, part) for part in given.only.split(",")) and (given.again or name not in known):
            known[name] = _in_a_child(name, given.rounds, given.clean)
            written(known, given.json, given.table)
            print(_row(known[name]), flush=True)
    total = summary(list(known.values()))
    print(json.dumps({**total, "caught": round(caught_share(total), 4)}))
    return int(bool(total["alarms"] or total["blamed"]) or caught_share(total) < MIN_CAUGHT)


if __name__ == "__main__":
    sys.exit(main())
