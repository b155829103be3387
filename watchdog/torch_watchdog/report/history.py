"""Everything that is kept of one job, put together for those who look back: its record, tracks, GPUs, events and incidents.

Pure: what the readers of a run directory found goes in. It must not know files, or how any of it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch_watchdog.launch.summary import first_to_tell
from torch_watchdog.report.steps import RankTrack, tracks
from torch_watchdog_proto.messages import GpuSample, NodeReport, StepBlock

__all__ = ["GpuTrack", "JobHistory", "history_of"]

Incident = Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class GpuTrack:
    """One GPU: its polls, oldest first."""

    uuid: str
    node: str
    samples: list[GpuSample] = field(default_factory=list)

    @property
    def name(self) -> str:
        return next((sample.name for sample in reversed(self.samples) if sample.name), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHistory:
    """`record` is job.json, `node_of` tells where a rank of an attempt ran, `gpus` are by UUID."""

    name: str
    record: Mapping[str, Any]
    tracks: Sequence[RankTrack]
    incidents: Sequence[Incident] = ()
    events: Sequence[Mapping[str, Any]] = ()
    gpus: Mapping[str, GpuTrack] = field(default_factory=dict)
    node_of: Mapping[tuple[int, int], str] = field(default_factory=dict)
    scan: str = ""  # what came of it, where the launch only looked at its data

    @property
    def ranks(self) -> list[int]:
        return sorted({track.rank for track in self.tracks})

    @property
    def attempts(self) -> list[int]:
        return sorted({track.attempt for track in self.tracks})

    @property
    def main_incident(self) -> Incident | None:
        """The one that a person wants to hear of first."""
        return first_to_tell(self.incidents, ended_in=self.last_attempt if self.record.get("exit_code") else None)

    @property
    def last_attempt(self) -> int:
        """As the launch has written it at its end; of one that has not ended: the newest that has trained."""
        end = self.record.get("end") or {}
        return int(end.get("attempt") or max(self.attempts, default=0))

    def of_attempt(self, attempt: int) -> JobHistory:
        """Only what belongs to it. How the job ended is not how an earlier attempt did, which the launcher started again."""
        is_last = attempt >= self.last_attempt
        ended = {} if is_last else {"ended": None, "exit_code": None, "exit_reason": None, "started_again": attempt + 1}
        return replace(
            self,
            record={**self.record, **ended},
            tracks=[track for track in self.tracks if track.attempt == attempt],
            incidents=[found for found in self.incidents if found.get("attempt", 0) == attempt],
            events=[event for event in self.events if event.get("attempt", 0) == attempt],
        )

    def of_rank(self, rank: int) -> JobHistory:
        """Only its steps; incidents and events stay, because others' may be why."""
        return replace(self, tracks=[track for track in self.tracks if track.rank == rank])


def history_of(
    name: str,
    record: Mapping[str, Any],
    reports: Iterable[tuple[str, str, NodeReport]],
    *,
    incidents: Sequence[Incident] = (),
    events: Sequence[Mapping[str, Any]] = (),
) -> JobHistory:
    """`reports` as the store has them: (node, session, report)."""
    blocks, node_of, gpus = list[StepBlock](), dict[tuple[int, int], str](), dict[str, GpuTrack]()
    for node, _, report in reports:
        blocks.extend(report.blocks)
        node_of.update(((attempt, rank), node) for attempt, rank in zip(report.steps.attempt, report.steps.rank, strict=True))
        for sample in report.gpus:
            gpus.setdefault(sample.uuid, GpuTrack(uuid=sample.uuid, node=node)).samples.append(sample)
    for gpu in gpus.values():
        gpu.samples.sort(key=lambda sample: sample.time_ns)
    return JobHistory(
        name=name, record=record, tracks=tracks(blocks), incidents=tuple(incidents), events=tuple(events), gpus=gpus, node_of=node_of
    )
