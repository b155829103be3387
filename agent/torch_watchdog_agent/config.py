"""What a rank must know, in one environment variable: read once at interpreter start, frozen from then on."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what only annotations need is not paid for in every Python of a launch
    from collections.abc import Mapping

    from torch_watchdog_proto.messages import Policy

__all__ = ["ENVIRONMENT", "PID_MARK", "RANKS_MARK", "AgentConfig", "ConfigError"]

ENVIRONMENT = "TORCH_WATCHDOG_AGENT"
PID_MARK = "TORCH_WATCHDOG_PID"  # set to the pid that became a rank: its children inherit RANK, and must not become ranks too
RANKS_MARK = "TORCH_WATCHDOG_RANKS"  # set while a rank starts the other ranks of its node by itself, which are told LOCAL_RANK and no RANK


class ConfigError(ValueError):
    """TORCH_WATCHDOG_AGENT is not what a launcher of this version writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The launcher's word to its ranks.

    `solo`: one process without RANK may be the rank; `by_accelerate`: the command's own process is not it. `signal_grace_s`: how long a signal may be held
    back for a checkpoint; None: not at all. `resume`: the checkpoint that `restore()` takes by default. `bounds`: declared for tensors of the batch.

    `scan`: look at the data instead of training on it; `scan_after`: the folder of an interrupted scan. `replay`: a recorded batch that takes the place of
    the first. `device_gate`: try to save from a GPU after a failure. `bundles`: keep the batches that were held or that a rank failed on. `watch_modules`:
    look at the output of every module, for a loss that is no number. `watch_gradients`: compute the norm of the gradients in steps whose loop does not.
    `outlier_times`: so many times as large as the largest batch so far, and one is told of.
    """

    job: str
    session: str
    policy: Policy
    run_dir: str
    runtime_dir: str
    ring_dir: str
    version: str
    launcher_pid: int
    hold_timeout_s: float = 10.0
    grace_s: float = 300.0
    keeper: bool = True
    signal_grace_s: float | None = None
    solo: bool = False
    by_accelerate: bool = False
    resume: str | None = None
    bounds: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    scan: bool = False
    scan_after: str | None = None
    replay: str | None = None
    device_gate: bool = True
    bundles: bool = True
    watch_modules: bool = False
    watch_gradients: bool = False
    outlier_times: float = 10.0

    def to_env(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_env(cls, environment: Mapping[str, str]) -> AgentConfig | None:
        """None where no launcher of ours is around. Raises ConfigError."""
        text = environment.get(ENVIRONMENT)
        if not text:
            return None
        try:
            value = json.loads(text)
            known = {field.name for field in dataclasses.fields(cls)}
            return cls(**{name: item for name, item in value.items() if name in known})
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{ENVIRONMENT} cannot be read ({error}): unset it, or launch with `watchdog ...`") from error
