"""gpu.ecc: the memory of a GPU loses bits, or has lost so many that rows were replaced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch_watchdog.rules.gpus import sign_of
from torch_watchdog.rules.settings import Timing, at_least
from torch_watchdog.rules.sign import About, Rule, Severity, Sign
from torch_watchdog.rules.streams import GpuStream, View

__all__ = ["RULE", "Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """`corrected` errors within a minute are many; one that could not be corrected is one too many. Older errors than the job's are none of its."""

    corrected: int = at_least(1, 1000)


ABOUT = About(
    name="gpu_ecc",
    kind="gpu.ecc",
    watches="NVML's counts of memory errors and remapped rows, since the job began",
    says="GPU 0 of node-2 (rank 0): 1 memory error could not be corrected since the job began: data were lost",
    action="an incident, critical where data were lost or a row cannot be replaced; a job that fails after that exits with 75",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    for gpu, ranks in view.used_gpus():
        for what, severity, said, fix in _findings(gpu, settings):
            yield sign_of(gpu, ranks, said, cause="memory cells of this GPU fail", fix=fix, what=what, severity=severity)


def _findings(gpu: GpuStream, settings: Settings) -> Iterable[tuple[str, Severity, str, str]]:
    lost = _since(gpu.first.ecc_uncorrected, gpu.newest.ecc_uncorrected)
    if lost:
        said = f"{lost} memory error{'s' if lost > 1 else ''} could not be corrected since the job began: data were lost"
        yield "lost", "critical", said, "drain the node and reset the GPU; do not trust what was computed since; replace it if this repeats"
    if gpu.newest.remap_failed and not gpu.first.remap_failed:
        yield "failed", "critical", "a bad memory row could not be replaced", "drain the node; the GPU must be replaced"
    if gpu.newest.remap_pending and not gpu.first.remap_pending:
        yield "pending", "warning", "a bad memory row waits to be replaced by a spare", "let the job end, then reset the GPU"
    corrected = _since(gpu.samples[0].ecc_corrected, gpu.newest.ecc_corrected) if gpu.samples else 0
    if corrected >= settings.corrected:
        said = f"{corrected} memory errors were corrected within the newest {len(gpu.samples)} samples (limit {settings.corrected})"
        yield "corrected", "warning", said, "data are right so far; plan a diagnosis of this GPU"


def _since(first: int | None, newest: int | None) -> int:
    return 0 if first is None or newest is None else max(0, newest - first)


RULE = Rule(about=ABOUT, settings=Settings, judge=judge)
