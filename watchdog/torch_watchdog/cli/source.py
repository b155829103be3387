"""Finding jobs for the commands: on disk, in the live daemon that job.json names, or in the daemon that --daemon names.

One look at a job, wherever it is, with the same fields. It must not know how anything is printed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from torch_watchdog.cli.on_disk import status_on_disk
from torch_watchdog.daemon.client import DaemonClient, UnreadStatus, client_of
from torch_watchdog.errors import DaemonUnreachableError, RunDirectoryError, UnknownJobError, WatchdogError
from torch_watchdog.job.incident import is_order
from torch_watchdog.launch.nodes import shared_token
from torch_watchdog.launch.places import here
from torch_watchdog.launch.record import resumed_from
from torch_watchdog.launch.say import say
from torch_watchdog.launch.survivors import Survivors, survivors
from torch_watchdog.report.history import JobHistory, history_of
from torch_watchdog.report.last_words import last_words
from torch_watchdog.report.steps import RankTrack, tracks
from torch_watchdog.scan.record import incidents_told, record_told
from torch_watchdog.scan.results import is_scan, read_results
from torch_watchdog.scan.tell import headline
from torch_watchdog.store.read import holds_steps, read_blocks, read_contract, read_events, read_incidents, read_job, read_reports
from torch_watchdog.store.run_directory import RunDirectory
from torch_watchdog_proto.envelopes import JobStatus
from torch_watchdog_proto.messages import NodeReport, StepBlock, StepTable

__all__ = ["JobLook", "all_jobs", "find_job", "has_own_daemon", "listed", "live_client", "live_daemon"]


class JobLook(Protocol):
    """What can be seen of one job. Every method raises WatchdogError."""

    @property
    def name(self) -> str: ...
    def record(self) -> Mapping[str, Any]: ...
    def status(self) -> JobStatus: ...
    def incidents(self) -> Sequence[Mapping[str, Any]]: ...
    def blocks(self, rank: int | None) -> Sequence[StepBlock]: ...
    def contract(self, rank: int) -> Mapping[str, Any]: ...
    def history(self, rank: int | None) -> JobHistory: ...
    def folder(self) -> Path | None:
        """Its run directory, where that can be seen from here."""

    def last_words(self, *, elsewhere: bool = False) -> Sequence[str]:
        """What its launch said at its end, for a person who stands here now, or anywhere; nothing where that is not known."""


@dataclass(frozen=True, slots=True)
class DiskJob:
    """A job by its run directory; its state comes from its own daemon where that still answers."""

    directory: RunDirectory

    @property
    def name(self) -> str:
        return self.directory.root.name

    def record(self) -> Mapping[str, Any]:
        return record_told(self.directory.root, read_job(self.directory.root))

    def status(self) -> JobStatus:
        live = self._live_status()
        return live if live is not None else self._status_on_disk(tracks(self.blocks(None)))

    def short_status(self) -> JobStatus:
        """Without the ranks, and without reading the steps."""
        return self._live_status() or replace(self._status_on_disk(()), ranks=())

    def _status_on_disk(self, found: Sequence[RankTrack]) -> JobStatus:
        return status_on_disk(self.directory.root, self.record(), found, num_incidents=sum(not is_order(one) for one in self.incidents()))

    def _live_status(self) -> JobStatus | None:
        try:
            with live_client(self) as client:
                return client.job(self.name)
        except WatchdogError:
            return None

    def incidents(self) -> Sequence[Mapping[str, Any]]:
        return incidents_told(self.directory.root, read_incidents(self.directory.root))

    def blocks(self, rank: int | None) -> Sequence[StepBlock]:
        return tuple(read_blocks(self.directory.root, rank))

    def contract(self, rank: int) -> Mapping[str, Any]:
        path = self.directory.contract_file(rank)
        try:
            return read_contract(path)
        except FileNotFoundError:
            raise RunDirectoryError(path, "is not there", f"Rank {rank} has learned nothing yet, or is none of this job's ranks") from None
        except OSError as error:
            raise RunDirectoryError(path, f"cannot be read ({error.strerror})", "Look at the file, or at another --rank") from error

    def history(self, rank: int | None) -> JobHistory:
        root = self.directory.root
        reports = (
            (node, session, replace(report, steps=StepTable.of(list(holds_steps(report.blocks, rank)))))
            for node, session, report in read_reports(root)
        )
        record = self.record()
        left = self._left(record)
        if left is not None:
            record = {**record, "exit_reason": left.words}
        history = history_of(self.name, record, reports, incidents=self.incidents(), events=read_events(root))
        return replace(history, scan=headline(read_results(root))) if is_scan(root) else history

    def folder(self) -> Path | None:
        return self.directory.root

    def last_words(self, *, elsewhere: bool = False) -> Sequence[str]:
        record = self.record()
        left = self._left(record)
        is_dead = left is not None and left.state != "running"
        return last_words(self.directory, record, self.incidents(), here="" if elsewhere else here(), is_dead=is_dead)

    def _left(self, record: Mapping[str, Any]) -> Survivors | None:
        """Of a launch that has written no end, and that nobody answers for."""
        is_silent = record.get("exit_code") is None and self._live_status() is None
        return survivors(record, events=read_events(self.directory.root)) if is_silent else None


@dataclass(frozen=True, slots=True)
class DaemonJob:
    """A job by the daemon that was named."""

    address: str
    name: str

    def record(self) -> Mapping[str, Any]:
        status = self.status()
        return {"job": status.job, "started": datetime.fromtimestamp(status.started_s, UTC).isoformat(), "exit_code": status.exit_code}

    def status(self) -> JobStatus:
        with client_of(self.address, os.environ) as client:
            return client.job(self.name)

    def incidents(self) -> Sequence[Mapping[str, Any]]:
        with client_of(self.address, os.environ) as client:
            return client.incidents(self.name)

    def blocks(self, rank: int | None) -> Sequence[StepBlock]:
        with client_of(self.address, os.environ) as client:
            return client.steps(self.name, rank)

    def contract(self, rank: int) -> Mapping[str, Any]:
        with client_of(self.address, os.environ) as client:
            return client.contract(self.name, rank)

    def history(self, rank: int | None) -> JobHistory:
        node_of = {found.rank: found.node for found in self.status().ranks}
        reports = (
            (node_of.get(block.rank, ""), "", NodeReport(seq=0, time_ns=0, steps=StepTable.of((block,)))) for block in self.blocks(rank)
        )
        return history_of(self.name, self.record(), reports, incidents=self.incidents())

    def folder(self) -> Path | None:
        """On this host it may be there to read."""
        root = Path(self.status().run_dir)
        return root if RunDirectory(root).job_file.is_file() else None

    def last_words(self, *, elsewhere: bool = False) -> Sequence[str]:  # noqa: ARG002 - as the others
        return ()


@dataclass(frozen=True, slots=True)
class CentralJob(DaemonJob):
    """A job whose launch wrote its folder here, and whose record a central daemon keeps: asked there, with the launch's own facts from here."""

    directory: RunDirectory

    def record(self) -> Mapping[str, Any]:
        return read_job(self.directory.root)

    def contract(self, rank: int) -> Mapping[str, Any]:
        """Ranks write it beside their launch."""
        return DiskJob(self.directory).contract(rank)

    def folder(self) -> Path | None:
        return self.directory.root

    def last_words(self, *, elsewhere: bool = False) -> Sequence[str]:
        return last_words(self.directory, self.record(), self.incidents(), here="" if elsewhere else here())


def listed(job: JobStatus) -> dict[str, Any]:
    """Its fields, and what it resumed; a scan's as those of one: with its bad samples for incidents, and the exit code that `watchdog scan` had."""
    if isinstance(job, UnreadStatus):
        return asdict(job) | {"resumed_from": ""}
    run_dir, fields = Path(job.run_dir), asdict(job) | {"resumed_from": _resumed_from(Path(job.run_dir))}
    if not is_scan(run_dir):
        return fields
    results = read_results(run_dir)
    code = results.exit_code(job.exit_code or 0) if job.state == "ended" else None
    return fields | {"policy": "scan", "incidents": len(results.bad), "exit_code": code}


def _resumed_from(run_dir: Path) -> str:
    """As far as its record can be seen from here."""
    try:
        return resumed_from(read_job(run_dir))
    except WatchdogError:
        return ""


def find_job(name: str | None, *, directory: Path, daemon: str) -> JobLook:
    """The job of that name, or the newest where none is named; `name` may be the path of a run directory, or a Slurm job's number."""
    if daemon != "auto":
        return DaemonJob(daemon, name or _newest_of(daemon))
    if name is None:
        return _where_it_is_kept(_newest_in(directory))
    path = Path(name) if "/" in name else directory / name
    look = DiskJob(RunDirectory(path.absolute()))
    if not _is_job(look.directory.root):
        of_slurm = _newest_of_slurm(name, directory) if name.isdecimal() else None
        if of_slurm is not None:
            return _where_it_is_kept(of_slurm)
        raise UnknownJobError(name, tuple(path.name for path in _job_directories(directory)))
    return _where_it_is_kept(look)


def has_own_daemon(look: JobLook) -> bool:
    """One that ends with the launch, and whose files lie here. A central one that is away comes back, and with it what it had open."""
    return isinstance(look, DiskJob) and _central_daemon(look) is None


def _where_it_is_kept(look: DiskJob) -> JobLook:
    """Steps and incidents lie with the daemon that judged the job: here, unless that was a central one."""
    address = _central_daemon(look)
    if address is None:
        return look
    central = CentralJob(address, look.name, look.directory)
    try:
        told = central.status().run_dir
    except WatchdogError as error:
        say(
            f"what lies here of job {look.name} is not all: the daemon at {address} keeps its steps and incidents, and cannot be asked ({error})"
        )
        return look
    if Path(told).resolve() != look.directory.root.resolve():
        say(
            f"what lies here of job {look.name} is not all: the daemon at {address} kept its steps and incidents, and knows another job of that name"
        )
        return look
    return central


def _central_daemon(look: DiskJob) -> str | None:
    if look.directory.events_file.exists() or look.directory.blocks.exists():
        return None
    try:
        record = look.record()
    except WatchdogError:
        return None
    address = str(record.get("daemon") or "")
    return None if not address or address.endswith(f"/{record.get('session')}/daemon.sock") else address


def _newest_of(address: str) -> str:
    with client_of(address, os.environ) as client:
        found = client.jobs()
    if not found:
        raise UnknownJobError("", ())
    return found[0].job


def _newest_in(directory: Path) -> DiskJob:
    found = _job_directories(directory)
    if not found:
        raise RunDirectoryError(directory, "holds no job", "Pass the --dir that the launch was given")
    return _newest(found)


def _newest_of_slurm(number: str, directory: Path) -> DiskJob | None:
    """A requeued job keeps its number: the newest run counts."""
    found = [path for path in _job_directories(directory) if _slurm_job(path) == number]
    return _newest(found) if found else None


def _newest(paths: Sequence[Path]) -> DiskJob:
    return DiskJob(max(map(RunDirectory, paths), key=lambda directory: directory.job_file.stat().st_ctime))


def _slurm_job(path: Path) -> str | None:
    try:
        return (read_job(path).get("scheduler") or {}).get("slurm_job_id")
    except WatchdogError:
        return None


def all_jobs(*, directory: Path, daemon: str) -> list[JobStatus]:
    """Newest first. A folder whose job.json cannot be read is left out: it says nothing about the others."""
    if daemon != "auto":
        with client_of(daemon, os.environ) as client:
            return list(client.jobs())
    found: list[JobStatus] = []
    for path in _job_directories(directory):
        try:
            found.append(DiskJob(RunDirectory(path)).short_status())
        except WatchdogError:
            continue
    return sorted(found, key=lambda status: status.started_s, reverse=True)


def _job_directories(directory: Path) -> list[Path]:
    try:
        return [path for path in sorted(directory.iterdir()) if _is_job(path)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirectoryError(
            directory, f"cannot be read ({error.strerror})", "Pass --dir DIR with the folder of the launches"
        ) from error


def _is_job(path: Path) -> bool:
    """As far as this user can see: another user's job hides nobody else's."""
    try:
        return RunDirectory(path).job_file.exists()
    except OSError:
        return False


def live_daemon(look: JobLook) -> str:
    """Where the job's own daemon answers, from here. Raises DaemonUnreachableError where the job has ended, or died."""
    if isinstance(look, DaemonJob):
        return look.address
    assert isinstance(look, DiskJob)  # noqa: S101 - there are these two
    record = look.record()
    address = str(record.get("daemon") or "")
    if address.startswith("unix:") and not _is_there(Path(address.removeprefix("unix:"))):
        address = str(record.get("network") or "")  # on another machine than this one, or gone
    if record.get("ended") or not address:
        raise DaemonUnreachableError(address or "its own address", 0.0)
    return address


def live_client(look: JobLook) -> DaemonClient:
    """The job's own daemon, or the one that was named. Raises DaemonUnreachableError, NoTokenError, ConfigError.

    On a machine that shares the launch's --dir its token lies where the launch's other nodes find it.
    """
    address = live_daemon(look)
    if not isinstance(look, DiskJob):
        return client_of(address, os.environ)
    token = shared_token(look.directory.root.parent, address)
    return DaemonClient(address, token=token) if token else client_of(address, os.environ)


def _is_there(path: Path) -> bool:
    """As far as this user can see: the sockets of another user's launch are not for us."""
    try:
        return path.exists()
    except OSError:
        return False
