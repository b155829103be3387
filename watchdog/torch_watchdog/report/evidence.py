"""What else lies in a run directory and belongs into a report: tails of logs, stacks, the learned contract, and the batch around its bad element.

Reads, bounded; what is not there or cannot be read is left out. It must not know how anything is shown.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_watchdog.errors import MissingExtraError, OutputError, RunDirectoryError
from torch_watchdog.report.history import JobHistory
from torch_watchdog.store.read import read_contract
from torch_watchdog.store.run_directory import RunDirectory
from torch_watchdog_agent.attempt_mark import of_attempt

__all__ = ["Evidence", "Excerpt", "LogTail", "decoder_of", "gather"]

_TAIL_BYTES = 64 << 10
_TAIL_LINES = 60
_MAX_LOGS = 4
_MAX_CONTRACT_BYTES = 4 << 20
_AROUND = 16
_TELLING = re.compile(
    r"Assertion|device-side assert|CUDA error|Traceback \(most|^\w*(Error|Exception)\b|out of memory|Xid|NCCL WARN|Segmentation fault"
)
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTail:
    """The end of one rank's output; `telling` are the indices of lines that say what went wrong."""

    rank: int
    lines: Sequence[str]
    telling: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """Values of the batch's row around the bad element; `bad` is its place among them, `first` that of the first value in the row."""

    key: str
    row: Sequence[int]
    first: int
    bad: int
    values: Sequence[float]
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Whatever was found."""

    logs: Sequence[LogTail] = ()
    stacks: Mapping[str, str] = field(default_factory=dict)
    contract: Sequence[Mapping[str, Any]] = ()
    excerpt: Excerpt | None = None


def gather(folder: Path, history: JobHistory, decode: Decode | None) -> Evidence:
    """For the main incident: its rank first, then some that it reached."""
    found = history.main_incident or {}
    origin = (found.get("origin") or {}).get("rank")
    ranks = [rank for rank in (origin, *(found.get("ranks_affected") or ()), *history.ranks) if isinstance(rank, int)]
    directory = RunDirectory(folder)
    incident = directory.incident(str(found["id"])) if str(found.get("id", "")).isdecimal() else None
    tails = (_log_tail(directory, rank, found.get("attempt")) for rank in list(dict.fromkeys(ranks))[:_MAX_LOGS])
    return Evidence(
        logs=[tail for tail in tails if tail is not None],
        stacks=_stacks(directory, incident, ranks[:_MAX_LOGS]),
        contract=_contract(directory, incident, origin if origin is not None else 0),
        excerpt=_excerpt(_bundle(directory, incident, found), found.get("batch") or {}, decode),
    )


def _tail(path: Path, attempt: Any = None) -> str:
    """The last bytes as text, from a whole line on; empty where there is no such file. Of one attempt where one is named."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read(_TAIL_BYTES)
    except OSError:
        return ""
    data = data if size <= _TAIL_BYTES else data.partition(b"\n")[2]
    return (of_attempt(data, attempt) if isinstance(attempt, int) else data).decode("utf-8", "replace")


def _log_tail(directory: RunDirectory, rank: int, attempt: Any) -> LogTail | None:
    """Of the incident's own attempt."""
    lines = [_printable(line) for line in _tail(directory.logs / f"rank-{rank}.log", attempt).splitlines()][-_TAIL_LINES:]
    telling = frozenset(number for number, line in enumerate(lines) if _TELLING.search(line))
    return LogTail(rank=rank, lines=lines, telling=telling) if lines else None


def _printable(line: str) -> str:
    """Without the colours and cursor moves of a progress bar."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)
    return "".join(character if character.isprintable() or character == "\t" else " " for character in plain)


def _stacks(directory: RunDirectory, incident: Path | None, ranks: Sequence[int]) -> dict[str, str]:
    files = {f"rank {rank}": directory.logs / f"rank-{rank}.stacks" for rank in ranks}
    if incident is not None:
        files = {"when it was found": incident / "stacks.txt"} | files
    return {name: text for name, path in files.items() if (text := "\n".join(map(_printable, _tail(path).splitlines())))}


def _contract(directory: RunDirectory, incident: Path | None, rank: int) -> list[Mapping[str, Any]]:
    """What the batches were held to when it happened; else what the rank knows by now."""
    paths = [directory.contract_file(rank)] if incident is None else [incident / "contract.json", directory.contract_file(rank)]
    for path in paths:
        try:
            if path.stat().st_size <= _MAX_CONTRACT_BYTES:
                return list(read_contract(path).get("guarded") or ())
        except (OSError, RunDirectoryError):
            continue
    return []


def _bundle(directory: RunDirectory, incident: Path | None, found: Mapping[str, Any]) -> Path | None:
    """The file of the batch's tensors: the one that the incident names, inside the run directory, or the one beside it."""
    named = directory.root / str((found.get("evidence") or {}).get("bundle") or "")
    if named.suffix == ".safetensors" and named.resolve().is_relative_to(directory.root.resolve()):
        return named
    return None if incident is None else incident / "batch.safetensors"


def _excerpt(path: Path | None, batch: Mapping[str, Any], decode: Decode | None) -> Excerpt | None:
    """The bad element's row, some values to each side."""
    element, key = batch.get("element"), batch.get("key")
    if not element or not key or path is None or not path.is_file():
        return None
    try:
        with importlib.import_module("safetensors").safe_open(path, framework="numpy") as file:
            row = file.get_tensor(key)[tuple(element[:-1])]
    except Exception:  # noqa: BLE001 - safetensors raises its own error for a torn file, numpy others for a dtype or index that it does not know
        return None
    first = max(0, element[-1] - _AROUND)
    values = [value.item() for value in row[first : element[-1] + _AROUND + 1]]
    text = decode([value for value in values if isinstance(value, int) and value >= 0]) if decode is not None else None
    return Excerpt(key=key, row=element[:-1], first=first, bad=element[-1] - first, values=values, text=text)


def decoder_of(path: Path) -> Decode:
    """Ids to text by a local tokenizer.json, or the folder that holds one. Nothing is loaded from elsewhere. Raises WatchdogError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError as error:
        raise MissingExtraError("--tokenizer", "tokenizers") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise OutputError(file, f"this is no tokenizer ({error})", "Pass the folder that holds tokenizer.json") from error
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
