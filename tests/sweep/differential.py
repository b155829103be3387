"""Random corruption of the batches of many model families, and what the guard says, against the truth: whether the step without a guard raises.

    python tests/sweep/differential.py [--rounds 100] [--clean 200] [--hash-seeds 0,1,2] [--only GLOB] [--again] [--json FILE] [--table FILE]

The families of the guard's own tests, and classes of transformers, tiny and with random weights. Each runs in a child process, because a bad index may
take its process along, and one for each hash seed, because what is learned must not depend on the order of a set; results are kept after each family, so
that a run can go on where it was ended.
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


def _with_seed(known: dict[str, Any] | None, name: str, rounds: int, clean: int, hash_seed: str) -> dict[str, Any]:
    """What became of a family under the first hash seed, and under which others it was not the same."""
    made = _in_a_child(name, rounds, clean, hash_seed)
    if known is None or known["commit"] != _commit():
        return {**made, "commit": _commit(), "hash_seeds": [hash_seed], "differs": []}
    first = {key: value for key, value in known.items() if key not in ("commit", "hash_seeds", "differs")}
    differs = [*known["differs"], hash_seed] if made != first else known["differs"]
    return {**known, "hash_seeds": [*known["hash_seeds"], hash_seed], "differs": differs}


def _in_a_child(name: str, rounds: int, clean: int, hash_seed: str) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": hash_seed}
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        command = [sys.executable, __file__, "--child", name, "--rounds", str(rounds), "--clean", str(clean), "--json", out.name]
        try:
            code = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, timeout=FAMILY_TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            code = -1
        text = out.read()
    return json.loads(text) if text else {"family": name, "ended": code}


def _commit() -> str:
    """The newest commit that changed what is tried here."""
    command = ["git", "log", "-1", "--format=%h", "--", str(HERE.parents[1] / "agent")]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True).stdout.strip()


# The table


def summary(results: list[dict[str, Any]]) -> dict[str, int]:
    ran = [one for one in results if "ended" not in one]
    counted = ("clean", "harmful", "held", "refused", "named", "harmless", "undecided")
    listed = {key: sum(len(one[key]) for one in ran) for key in ("alarms", "missed", "blamed")}
    return {
        "families": len(ran),
        **{key: sum(one[key] for one in ran) for key in counted},
        **listed,
        "differ": sum(bool(one["differs"]) for one in ran),
    }


def caught_share(total: dict[str, int]) -> float:
    return 1 - total["missed"] / max(1, total["harmful"])


def table(document: dict[str, Any]) -> str:
    total = document["summary"]
    states = sorted({one["commit"] for one in document["results"]})
    seeds = sorted({seed for one in document["results"] for seed in one["hash_seeds"]})
    several = sum(len(one["hash_seeds"]) > 1 for one in document["results"])
    lines = [
        "# Random corruption of batches", "",
        f"Made by `python tests/sweep/differential.py` on {document['date']}: Python {document['python']}, torch {document['torch']}, transformers "
        f"{document['transformers']}; code of {', '.join(states)}. {total['families']} families; {total['alarms']} alarms in {total['clean']} clean batches of "
        f"many shapes. Hash seeds: {', '.join(seeds)}; of {several} families that ran under more than one, {total['differ']} came out otherwise "
        "under another.", "",
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
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--clean", type=int, default=200)
    parser.add_argument("--hash-seeds", default="0,1,2", type=lambda text: text.split(","))
    parser.add_argument("--only", default="*", help="families by name")
    parser.add_argument("--again", action="store_true", help="from the beginning")
    parser.add_argument("--json", type=Path, default=HERE / "differential.json")
    parser.add_argument("--table", type=Path, default=HERE / "DIFFERENTIAL.md")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        warnings.filterwarnings("ignore")
        given.json.write_text(json.dumps(result_of(given.child, given.rounds, given.clean)))
        return 0
    known = {one["family"]: one for one in json.loads(given.json.read_text())["results"]} if given.json.exists() and not given.again else {}
    for seed in given.hash_seeds:
        for name in names():
            if any(fnmatch.fnmatch(name, part) for part in given.only.split(",")) and seed not in known.get(name, {}).get("hash_seeds", ()):
                known[name] = _with_seed(known.get(name), name, given.rounds, given.clean, seed)
                written(known, given.json, given.table)
                print(seed, _row(known[name]), flush=True)
    total = summary(list(known.values()))
    print(json.dumps({**total, "caught": round(caught_share(total), 4)}))
    return int(bool(total["alarms"] or total["blamed"] or total["differ"]) or caught_share(total) < MIN_CAUGHT)


if __name__ == "__main__":
    sys.exit(main())
