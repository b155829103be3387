"""The words of a scan's end. Pure: results in, lines and rows out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_watchdog.phrases import allowed_range, count
from torch_watchdog.scan.results import Results
from torch_watchdog_proto.names import spoken

__all__ = ["COLUMNS", "headline", "plain_progress", "row"]

_NOTHING_SEEN = "no batch of a DataLoader, or of torch_watchdog_agent.watch(), came to a training"
COLUMNS = ("sample", "rank", "what", "allowed", "where")


def headline(results: Results, *, goes_on: bool = False) -> str:
    """`scan: 480 samples in 120 batches, 2 ranks, 1.2 s, 400 samples/s: 1 sample would fail`; that it is not finished comes first.

    `goes_on`: what an earlier scan had looked at is not among those that are counted.
    """
    if results.saw_nothing:
        return f"scan: nothing was scanned: {_NOTHING_SEEN}"
    before = "; the rest was looked at by the scan before" if goes_on else ""
    more = f"; {results.unconfirmed} batches could only be judged by running them" if results.unconfirmed else ""
    bad = len(results.bad)
    if not results.finished:
        fail = "none" if not bad else f"{bad:,}"
        failing = f"so far {fail} of {results.samples:,} samples {'fails' if bad <= 1 else 'fail'}"
        if goes_on:  # the bad ones of the scan before are listed again
            failing = f"so far {count(bad, 'sample')} would fail, and {results.samples:,} were looked at" if bad else failing
            before = ", beside those of the scan before"
        return f"scan: not finished: {failing}{before} ({_effort(results)}){more}"
    verdict = "no sample would fail" if not bad else f"{count(bad, 'sample')} would fail"
    return f"scan: {counts(results)}: {verdict}{before}{more}"


def counts(results: Results) -> str:
    return f"{results.samples:,} samples in {_effort(results)}"


def _effort(results: Results) -> str:
    speed = f", {results.samples_per_s:,.0f} samples/s" if results.seconds else ""
    return f"{results.batches:,} batches, {count(len(results.ranks), 'rank')}, {results.seconds:.1f} s{speed}"


def plain_progress(results: Results) -> str:
    total = results.total_batches
    share = f" of {total:,}" if total else ""
    return f"scan: {results.batches:,}{share} batches, {results.samples:,} samples, {len(results.bad)} bad"


def row(entry: Mapping[str, Any]) -> Sequence[Any]:
    """Cells of one bad sample, for COLUMNS."""
    if "key" not in entry:
        return (_sample(entry), entry.get("rank"), entry.get("summary"), "", "")
    element = ",".join(map(str, entry.get("element") or ()))
    what = f"{spoken(entry['key'])}[{element}] = {entry['value']}" if entry.get("value") is not None else entry.get("summary")
    bound: dict[str, Any] = {"low": entry.get("low"), "high": entry.get("high"), "ignored": []}
    where = " in ".join(str(entry[name]) for name in ("op", "module") if entry.get(name))
    return (_sample(entry), entry.get("rank"), what, allowed_range(bound) if entry.get("high") is not None else "", where)


def _sample(entry: Mapping[str, Any]) -> str:
    if entry.get("dataset_index") is not None:
        return str(entry["dataset_index"])
    if entry.get("indices"):
        listed = [str(index) for index in entry["indices"]]
        return "one of " + ", ".join(listed) if len(listed) > 1 else listed[0]
    worker = f", worker {entry['worker']}" if entry.get("worker") is not None else ""
    place = f", position {entry['position_in_batch']}" if entry.get("position_in_batch") is not None else ""
    return f"batch {entry.get('batch')}{place}{worker}"
