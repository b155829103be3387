"""The words that rank, node process and daemon say to each other, as frozen dataclasses of the standard library.

Owns the vocabulary; knows nothing of sockets, protobuf, torch or clocks. Steps are optimizer steps, 0-based; ranks are global; times are
nanoseconds since the epoch unless a name says otherwise. `frames.py` turns them into JSON frames (rank <-> node process), `codec.py` into
protobuf (node process <-> daemon).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch_watchdog_proto.rescue_words import Failed, Free, Freed, Look, Looked, Release, Rescue
from torch_watchdog_proto.step_words import NO_STEPS
from torch_watchdog_proto.step_words import StepBlock as StepBlock
from torch_watchdog_proto.step_words import StepTable as StepTable
from torch_watchdog_proto.step_words import TensorColumns as TensorColumns
from torch_watchdog_proto.violation_words import KEPT_BATCH as KEPT_BATCH
from torch_watchdog_proto.violation_words import BatchFact as BatchFact
from torch_watchdog_proto.violation_words import BoundFact as BoundFact
from torch_watchdog_proto.violation_words import Derived as Derived
from torch_watchdog_proto.violation_words import Number as Number
from torch_watchdog_proto.violation_words import Sample as Sample
from torch_watchdog_proto.violation_words import Violation as Violation

Policy: TypeAlias = Literal["stop", "skip", "observe"]
Phase: TypeAlias = Literal["start", "train", "eval", "saving", "end"]

EXIT_FAILED = 1  # a rank failed, and nothing else says it: as a launcher has it
EXIT_BAD_DATA = 65
EXIT_DIVERGED = 70
EXIT_MACHINE = 75


# Control: rank -> daemon. The node process adds (job, attempt); a participant ignores generations older than its own.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHello:
    """First words of a rank's control thread."""

    rank: int
    local_rank: int
    world_size: int
    pid: int
    attempt: int
    host: str
    version: str
    torch_version: str = ""
    backend: str = ""
    coupled: bool = True  # False where ranks share no process group: orders that need lockstep are refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Rank holds a bad batch at hand-over for `step`; it has not entered any collective of that step."""

    rank: int
    step: int
    micro_step: int
    violation: Violation
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A traced step refused an op inside the forward (or nothing could repair the batch): the rank raises and cannot finish the step."""

    rank: int
    step: int
    micro_step: int
    violation: Violation


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """A violation that changes nothing: policy observe, or only a warning."""

    rank: int
    step: int
    micro_step: int
    violation: Violation


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The rank's promise: it has passed gate `passed` (-1: none) and will not pass the gates that the order names."""

    rank: int
    generation: int
    passed: int
    phase: Phase = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class CannotPromise:
    """In the place of an Ack: the rank does not know how far it is, or cannot keep to it. It promises nothing, and goes on."""

    rank: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Vetoed:
    """The rank skipped the update of `step`."""

    rank: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The rank is at the boundary and begins to write."""

    rank: int
    generation: int
    updates_applied: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """One file that a rank wrote, relative to the checkpoint's folder."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The rank's part is written and read back, or `error` says why not. `finite`: no NaN or Inf in its part."""

    rank: int
    generation: int
    updates_applied: int
    path: str = ""
    format: str = ""
    finite: bool = True
    files: tuple[SavedFile, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The rank has written manifest and COMMITTED, or `error` says why not; without a daemon also of one that has seen that another did."""

    rank: int
    generation: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The rank raises SystemExit now."""

    rank: int
    generation: int
    updates_applied: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """No gate will follow: the rank's interpreter ends by itself, or a signal ends it behind its training."""

    rank: int
    passed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Signalled:
    """The rank got a signal that asks for its end, and trains on until the job stops with it, or its grace is over."""

    rank: int
    signal: int


RankMessage: TypeAlias = (
    RankHello
    | Hold
    | Refused
    | Noticed
    | Ack
    | CannotPromise
    | Vetoed
    | Saving
    | Saved
    | Committed
    | Left
    | Finished
    | Signalled
    | Failed
    | Freed
    | Looked
)


# Control: daemon -> rank.


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Promise not to pass gate `veto` (bad batch), or any gate above passed + 1 (request: veto None), before the decision."""

    generation: int
    veto: int | None = None
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The decision. `veto`: skip the update of that step. `stop_after`: apply updates up to that step, then act.

    `save`: write a checkpoint at the boundary; `leave`: end the rank after it with `exit_code`.
    """

    generation: int
    veto: int | None = None
    stop_after: int | None = None
    save: bool = True
    leave: bool = True
    exit_code: int = EXIT_BAD_DATA
    path: str = ""
    reason: str = ""
    grace_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """The order was given up: forget its promises. `aim`: what it was for, in words."""

    generation: int
    reason: str = ""
    aim: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCommitted:
    """To the lowest saver: every part is whole; write the manifest, then COMMITTED (only where `good`)."""

    generation: int
    manifest: Mapping[str, Any] = field(default_factory=dict)
    good: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Nothing more will come of this order: leave (or go on, where the Commit said so)."""

    generation: int
    committed: bool = False


Order: TypeAlias = Prepare | Commit | Abandon | WriteCommitted | Leave | Free | Rescue | Release | Look


# Telemetry: node process -> daemon.


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One poll of one GPU through NVML; None where the card does not say."""

    time_ns: int
    index: int
    uuid: str
    name: str
    memory_used_bytes: int
    memory_total_bytes: int
    utilisation_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    pci: str = ""
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    throttle_reasons: int | None = None  # NVML's bits
    ecc_uncorrected: int | None = None  # since the driver was loaded
    ecc_corrected: int | None = None
    remapped_rows: int | None = None  # for uncorrectable errors
    remap_pending: bool = False
    remap_failed: bool = False
    pcie_replays: int | None = None
    nvlink_errors: int | None = None  # replays, recoveries and bad checksums of all links
    xids: tuple[int, ...] = ()  # codes that came since the sample before
    lost: bool = False  # the driver says that the GPU is gone: nothing else is known


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvent:
    """Something that happened to a rank, as its node saw it; `order` counts events of this node (monotonic). `asked`: its launch got `signal`, which
    asks for the end. `updates_on_device`: how many its GPU had done when it ended, where that is known."""

    rank: int
    attempt: int
    pid: int
    kind: Literal["started", "finished", "exited", "note", "log", "state", "stack", "workers", "asked"]
    time_ns: int
    order: int
    exit_code: int | None = None
    signal: int | None = None
    text: str = ""
    level: Literal["info", "warning", "error"] = "info"
    updates_on_device: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHello:
    """First words of a node process. `run_dir` is where this node keeps the job's files; `rendezvous` tells launches over several nodes apart."""

    job: str
    node: str
    version: str
    policy: Policy
    command: tuple[str, ...]
    run_dir: str
    nodes: int = 1
    node_rank: int = 0
    session: str = ""  # random per launch: tells a second launch under the same job name from a reconnect
    rendezvous: str = ""
    rules: Mapping[str, Any] = field(default_factory=dict)  # thresholds that this launch changes, by rule
    max_skips: int | None = None  # of the last 1000 steps, by policy skip; None: an older version, or as the coordinator has it


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One numbered report; the daemon answers with the number, and the node process resends what was not answered."""

    seq: int
    time_ns: int
    steps: StepTable = NO_STEPS
    events: tuple[RankEvent, ...] = ()
    gpus: tuple[GpuSample, ...] = ()
    dropped_reports: int = 0

    @property
    def blocks(self) -> tuple[StepBlock, ...]:
        """Its steps rank by rank, made anew each time."""
        return self.steps.blocks()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGoodbye:
    """The wrapped command has ended."""

    exit_code: int
    signal: int | None = None
