"""The batch that a rank failed on, or that was held, on disk and back: a safetensors file of its tensors, arrays and lists by their path in the batch.

Owns the file's form and place: nothing in it is ever unpickled, it is readable by this user only, bounded, and only the newest are kept. After a
failure what lies on a GPU is left out: once a device-side assertion has failed nothing can be read from the device any more.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_watchdog_agent.contract.flatten import ALL_LISTS, replaced, taken_apart

if TYPE_CHECKING:
    from torch_watchdog_proto.messages import Violation

__all__ = ["FOLDER", "MAX_BYTES", "MAX_HELD_BYTES", "as_told_before", "held_name", "keep_newest", "read_into", "write"]

FOLDER = "bundles"  # in the run directory
MAX_BYTES = 256 << 20
MAX_HELD_BYTES = 64 << 20  # the other ranks wait meanwhile
MAX_HELD = 20  # a rank
_FORMS = "forms"  # in the file: which tensors are an array or a list in the batch


def held_name(*, attempt: int, rank: int, step: int) -> str:
    return f"{attempt}-{rank}-step-{step}.safetensors"


def keep_newest(folder: Path, *, attempt: int, rank: int) -> None:
    """Under the policy skip a run may hold many."""
    held = sorted(
        folder.glob(held_name(attempt=attempt, rank=rank, step=0).replace("-0.", "-*.")), key=lambda path: path.stat().st_mtime_ns
    )
    for path in held[:-MAX_HELD]:
        path.unlink(missing_ok=True)


def write(path: Path, batch: object, *, max_bytes: int = MAX_BYTES, from_device: bool = False) -> bool:
    """True where something was written. `from_device`: the GPU still answers. Raises OSError."""
    from safetensors.torch import save

    apart = taken_apart(batch, ALL_LISTS)
    leaves = {key: tensor.detach() for key, tensor in apart.leaves.items() if from_device or not tensor.is_cuda}
    if not leaves or sum(tensor.numel() * tensor.element_size() for tensor in leaves.values()) > max_bytes:
        return False
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    data = save({key: tensor.cpu().contiguous().clone() for key, tensor in leaves.items()}, metadata={_FORMS: json.dumps(apart.forms)})
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
    except OSError:
        path.unlink(missing_ok=True)  # half a batch helps nobody
        raise
    return True


def read_into(path: Path, batch: Any) -> Any:
    """`batch` with the recorded tensors in the place of its own: the loop's own containers stay as they are. Raises OSError, ValueError."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        recorded = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  no mapping
        forms = json.loads((file.metadata() or {}).get(_FORMS, "{}"))
    apart = taken_apart(batch, ALL_LISTS)
    there = apart.leaves.keys() | {path.rpartition(".")[0] for path, _ in apart.scalars}  # a list may have been shorter, or ragged
    missing = sorted(recorded.keys() - there)
    if missing:
        raise ValueError(f"the loop's batches have no {missing[0]}: is this the script that the bundle was recorded from?")
    return replaced(batch, recorded, {key: forms.get(key, "tensor") for key in recorded})


def as_told_before(path: Path, violation: Violation) -> Violation:
    """With cause and fix of the incident that the bundle was kept for, where that is of the same value: they were found among many batches, these in one."""
    fact = violation.batch
    here = violation.kind, fact.key, list(fact.element or ()), fact.value
    for file in sorted(path.parent.parent.glob("incidents/*/incident.json")):
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
            of_it, there = (told["evidence"] or {}).get("bundle") == f"{path.parent.name}/{path.name}", told["batch"]
            if of_it and (told["kind"], there["key"], there["element"] or [], there["value"]) == here:
                return replace(violation, cause=str(told["cause"]), fix=str(told["fix"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return violation
