"""Sweeps the classes it is given, one JSON line each. Run by models.py in a process of its own."""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "agent" / "contract"))

import transformers
from guard_loop import Loop, Seen, abandon_all
from tiny import LENGTH, CannotBuildError, Tiny, tiny

CLEAN = 6
Batch = dict[str, torch.Tensor]


def result_of(name: str) -> dict[str, Any]:
    """What the guard did with this class."""
    torch.manual_seed(0)
    random.seed(0)
    try:
        made = tiny(name)
        _tried(made)
    except CannotBuildError as error:
        return {"class": name, "status": "not built", "why": str(error)}
    loop = Loop(made.model, made.step)
    seen = [loop.step(_clean(made, number)) for number in range(CLEAN)]
    alarms = [found.summary for one in seen if (found := one.violation) is not None]
    told = [f"{type(one.raised).__name__} in a clean step" for one in seen if one.raised is not None and one.diagnosed is None]
    result = {
        "class": name, "status": "swept", "clean": CLEAN, "traced": sum(one.checked.needs_trace for one in seen),
        "alarms": [*alarms, *told], "id": _probed(made, loop, _bad_id), "label": _probed(made, loop, _bad_label),
        "position": _probed(made, loop, _too_long),
    }  # fmt: skip
    return result | {"said": list(loop.said)}


def _tried(made: Tiny) -> None:
    """One step without a guard."""
    try:
        made.step(copy.deepcopy(made.model), _clean(made, 0))
    except Exception as error:
        raise CannotBuildError(f"a clean step fails ({type(error).__name__}: {_generic(error)})") from error


def _generic(error: BaseException) -> str:
    return re.sub(r"\d+", "N", str(error).splitlines()[0] if str(error) else "")[:80]


def _clean(made: Tiny, number: int) -> Batch:
    return made.batch(2 if number != 3 else 3, LENGTH + (0, 1, 0, 2, 4, 1)[number % CLEAN])


# Probes: a changed batch and the tensor to blame, or None where the class has no such input


def _bad_id(made: Tiny) -> tuple[Batch, tuple[str, ...]] | None:
    batch = _clean(made, 0)
    if "input_ids" not in batch or made.rows is None:
        return None
    batch["input_ids"][(1, *[0] * (batch["input_ids"].dim() - 2), 3)] = made.rows
    return batch, ("input_ids",)


def _bad_label(made: Tiny) -> tuple[Batch, tuple[str, ...]] | None:
    batch = _clean(made, 0)
    key = next((name for name in ("labels", "start_positions") if name in batch), None)
    if key is None or batch[key].is_floating_point() or made.kind == "QuestionAnswering":
        return None  # positions past the text are ignored by design
    batch[key][(1, *[3] * (batch[key].dim() - 1))] = made.classes
    return batch, (key,)


def _too_long(made: Tiny) -> tuple[Batch, tuple[str, ...]] | None:
    if made.longest is None or made.longest > 200 or "input_ids" not in made.names:
        return None
    batch = made.batch(2, made.longest + 5)
    return batch, tuple(batch)


def _probed(made: Tiny, loop: Loop, change: Any) -> dict[str, Any]:
    changed = change(made)
    if changed is None:
        return {"outcome": "not applicable"}
    batch, blamed = changed
    reference, again = copy.deepcopy(made.model), copy.deepcopy(batch)
    seen = loop.step(batch)
    harm = _harm(made, reference, again)
    return _judged(seen, harm, blamed)


def _harm(made: Tiny, model: Any, batch: Batch) -> BaseException | None:
    try:
        made.step(model, batch)
    except Exception as error:
        return error
    return None


def _judged(seen: Seen, harm: BaseException | None, blamed: tuple[str, ...]) -> dict[str, Any]:
    found = seen.violation
    if found is None:
        return {"outcome": "harmless"} if harm is None else {"outcome": "missed", "why": f"{type(harm).__name__}: {_generic(harm)}"}
    if harm is None:
        return {"outcome": "false alarm", "why": re.sub(r"\d+", "N", found.summary), "key": found.batch.key}
    if found.batch.key not in blamed:
        return {"outcome": "missed", "why": f"blamed {found.batch.key}: {re.sub(chr(92) + 'd+', 'N', found.summary)}"}
    how = "held" if seen.checked.violation is not None else "refused" if seen.refused is not None else "named"
    return {"outcome": how, "key": found.batch.key}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with options.out.open("a") as out:
        for name in options.names:
            try:
                result = result_of(name)
            except Exception as error:
                result = {"class": name, "status": "not built", "why": f"{type(error).__name__}: {_generic(error)}"}
            abandon_all()
            out.write(json.dumps(result) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
