"""gpu.xid: the driver has reported an error of a GPU that this job computes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_watchdog.rules.gpus import sign_of
from torch_watchdog.rules.settings import Timing
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import GpuStream, View
from torch_watchdog.rules.xid import XidCode

__all__ = ["Settings", "rule_with"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """An event is over when it is told: it stays in the list of incidents until the job ends."""

    keep_s: float = 0.0


ABOUT = About(
    name="gpu_xid",
    kind="gpu.xid",
    watches="Xid events of the driver (NVML)",
    says="GPU 3 of node-7 (rank 3): Xid 79, GPU fell off the bus: The GPU is not reachable over PCIe any more (hardware)",
    severity="warning",
    action="an incident, critical where the hardware is at fault; a job that fails after it exits with 75 (hardware, fabric) or 65 (application)",
)


def rule_with(codes: Mapping[int, XidCode]) -> Rule:
    """The rule, knowing these codes."""
    return Rule(about=ABOUT, settings=Settings, judge=_judge_with(codes))


def _judge_with(codes: Mapping[int, XidCode]) -> Callable[[View, Any], Iterable[Sign]]:
    def judge(view: View, settings: Settings) -> Iterable[Sign]:  # noqa: ARG001 - a rule's shape
        for gpu, ranks in view.used_gpus():
            for number in gpu.xids:
                yield _sign(gpu, ranks, number, codes.get(number))

    return judge


def _sign(gpu: GpuStream, ranks: tuple[int, ...], number: int, code: XidCode | None) -> Sign:
    meaning = (
        f"Xid {number}, which the catalogue does not know" if code is None else f"Xid {number}, {code.name}: {code.meaning} ({code.owner})"
    )
    return sign_of(
        gpu,
        ranks,
        meaning,
        what=str(number),
        severity="warning" if code is None else code.severity,
        cause="the driver reported an error that is not known here" if code is None else f"usually the {code.owner}: {code.meaning}",
        fix="look the code up in the driver's documentation" if code is None else code.action,
        evidence={"xid": [{"code": number, "time_ns": gpu.xids[number]}]},
    )
