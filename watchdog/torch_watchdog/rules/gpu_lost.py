"""gpu.lost: the driver says that a GPU of this job is gone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch_watchdog.rules.gpus import sign_of
from torch_watchdog.rules.settings import Timing
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import View

__all__ = ["RULE", "Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """A driver that does not answer for a moment is no lost GPU: only its own word for it is."""


ABOUT = About(
    name="gpu_lost",
    kind="gpu.lost",
    watches="NVML's answer for each GPU",
    says="GPU 3 of node-7 (rank 3): the driver says that this GPU is lost",
    severity="critical",
    action="an incident; a job that fails after it exits with 75",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:  # noqa: ARG001 - a rule's shape
    for gpu, ranks in view.used_gpus():
        if gpu.newest.lost:
            yield sign_of(
                gpu, ranks, "the driver says that this GPU is lost", cause="the GPU does not answer over PCIe any more",
                fix="drain the node and restart it with a power cycle; check power, heat and seating; replace the GPU if it repeats",
            )  # fmt: skip


RULE = Rule(about=ABOUT, settings=Settings, judge=judge)
