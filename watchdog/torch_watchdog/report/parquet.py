"""A job's steps as a Parquet table: one row per attempt, rank and step, one row group per rank.

Owns the columns. pyarrow is the extra [parquet] and imported here only. Its file says which job it is in the metadata.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch_watchdog.errors import MissingExtraError
from torch_watchdog.report.history import JobHistory
from torch_watchdog.report.steps import RankTrack, in_seconds

__all__ = ["write_parquet"]


def write_parquet(history: JobHistory, path: Path) -> int:
    """Returns the number of rows. Raises MissingExtraError, and OSError where the file cannot be written."""
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtraError("--parquet", "pyarrow") from error
    schema = _schema(arrow, history.name)
    rows = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for track in history.tracks:
            columns = _columns(track, history)
            rows += len(columns["step"])
            writer.write_table(arrow.table(columns, schema=schema))
    return rows


def _schema(arrow: Any, job: str) -> Any:
    number, whole = arrow.float64(), arrow.int64()
    fields = {
        "job": arrow.string(),
        "attempt": arrow.int32(),
        "rank": arrow.int32(),
        "node": arrow.string(),
        "gpu": arrow.string(),
        "step": whole,
        "updates_before": whole,
    }
    fields |= {
        "time": arrow.timestamp("ns", tz="UTC"),
        "step_s": number,
        "loader_s": number,
        "forward_s": number,
        "update_s": number,
        "loss": number,
    }
    fields |= {
        "grad_norm": number,
        "allocated_bytes": whole,
        "peak_bytes": whole,
        "vetoed": arrow.bool_(),
        "evaluation_before": arrow.bool_(),
    }
    return arrow.schema(list(fields.items()), metadata={"torch_watchdog_job": job})


def _columns(track: RankTrack, history: JobHistory) -> dict[str, list[Any]]:
    steps, before, loader, forward = track.steps, track.updates_before, track.loader_ns(), track.forward_ns()
    same = {"job": history.name, "attempt": track.attempt, "rank": track.rank, "gpu": track.gpu}
    same["node"] = history.node_of.get((track.attempt, track.rank), "")
    return {
        **{name: [value] * len(steps) for name, value in same.items()},
        "step": steps,
        "updates_before": [before.get(step) for step in steps],
        "time": [track.time_ns[step] for step in steps],
        "step_s": [in_seconds(track.duration_ns.get(step)) for step in steps],
        "loader_s": [in_seconds(loader.get(step)) for step in steps],
        "forward_s": [in_seconds(forward.get(step)) for step in steps],
        "update_s": [in_seconds(track.update_ns.get(step)) for step in steps],
        **{name: [getattr(track, name).get(step) for step in steps] for name in ("loss", "grad_norm", "allocated_bytes", "peak_bytes")},
        "vetoed": [step in track.vetoed for step in steps],
        "evaluation_before": [step in track.evaluated for step in steps],
    }
