"""What a run directory tells of a scan, in the scan's own words: the launch beneath it knows only that it trained under policy skip, and how that ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch_watchdog.scan.results import is_scan, read_results
from torch_watchdog.scan.tell import headline

__all__ = ["incidents_told", "record_told"]


def record_told(run_dir: Path, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """job.json with the policy and, once it is over, the end that are the scan's. Of any other run as it is."""
    if not is_scan(run_dir):
        return record
    told = {**record, "policy": "scan"}
    if record.get("exit_code") is None:
        return told
    results = read_results(run_dir)
    return told | {"exit_code": results.exit_code(record["exit_code"]), "exit_reason": headline(results)}


def incidents_told(run_dir: Path, incidents: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Those that the steps of learning brought, with the scan's policy in the place of skip."""
    if not is_scan(run_dir):
        return tuple(incidents)
    return tuple(
        {**found, "action": {**action, "policy": "scan"}} if (action := found.get("action") or {}).get("policy") == "skip" else found
        for found in incidents
    )
