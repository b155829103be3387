"""What the guard says about one batch, and a batch about which a device has yet to speak. Plain records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from torch_watchdog_agent.contract.check import Extremes, TensorStat
from torch_watchdog_agent.contract.findings import Oddity
from torch_watchdog_agent.contract.ondevice import NO_CHECKS, DeviceChecks, Sent
from torch_watchdog_agent.contract.rules import Rule
from torch_watchdog_agent.contract.signature import Signature
from torch_watchdog_agent.contract.where import Origin
from torch_watchdog_proto.messages import Violation

__all__ = ["Checked", "UnderCheck"]


@dataclass(slots=True, kw_only=True, eq=False)  # not frozen: that would triple what it costs to make one, on the hot path
class Checked:
    """What the guard says about one batch. `violation` is only one that needs no confirmation; `needs_trace`: the step must be a traced one."""

    batch_id: int
    leaves: Mapping[str, torch.Tensor] = field(default_factory=dict)
    stats: tuple[TensorStat, ...] = ()
    violation: Violation | None = None
    warnings: tuple[Violation, ...] = ()
    needs_trace: bool = False
    origin: Origin | None = None
    signature: Signature = ()
    version: int = 0
    suspects: tuple[Rule, ...] = ()
    unsettled: tuple[Rule, ...] = ()
    oddities: tuple[Oddity, ...] = ()
    legal: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()  # tensors on a device, which were not read
    on_device: DeviceChecks = NO_CHECKS
    seen: Mapping[str, Extremes] | None = None
    is_usual: bool = False  # nothing about it is new but what a device has to tell


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderCheck:
    """A batch whose values a device is looking at. What it says is asked with `Guard.said_of`, once it has `arrived`."""

    checked: Checked
    sent: Sent
