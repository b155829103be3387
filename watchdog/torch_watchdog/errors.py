"""The errors that the outside-the-rank code raises on purpose: each says what happened, what was waited for, and what to do next.

One base class, fields and not only text. Bugs stay AssertionError or TypeError and are not caught.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "AlertError",
    "BadJobNameError",
    "ConfigError",
    "DaemonAnswerError",
    "DaemonRefusedError",
    "DaemonStartError",
    "DaemonUnreachableError",
    "DiskAwayError",
    "JobElsewhereError",
    "JobForbiddenError",
    "JobNameTakenError",
    "JobWaitsForStoreError",
    "MissingExtraError",
    "NoTokenError",
    "OrderLostError",
    "OrderRefusedError",
    "OutputError",
    "RunDirectoryError",
    "SlowReaderError",
    "StoreError",
    "TooManyJobsError",
    "UnknownJobError",
    "UnknownRankError",
    "VersionSkewError",
    "WatchdogError",
]


class WatchdogError(Exception):
    """Base of everything that torch-watchdog raises for a person to read."""


class ConfigError(WatchdogError):
    """A setting is not what it must be; `where` is the flag, variable or file that holds it."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where


class AlertError(WatchdogError):
    """Somebody who should be told of an incident did not take the message. Its URL holds secrets and is not in here."""

    def __init__(self, receiver: str, reason: str, *, advice: str = "Try `watchdog alert test URL`") -> None:
        super().__init__(f"alert receiver {receiver} {reason}. {advice}")
        self.receiver, self.reason = receiver, reason


class OrderRefusedError(WatchdogError):
    """A job cannot be asked for a stop or a checkpoint, or said no."""

    def __init__(self, job: str, reason: str) -> None:
        super().__init__(f"job {job} did not take the order: {reason}. See `watchdog status {job}`")
        self.job, self.reason = job, reason


class OrderLostError(WatchdogError):
    """A job took an order, and no checkpoint of it is known that can be used."""

    def __init__(self, job: str, reason: str) -> None:
        super().__init__(f"job {job}: no verified checkpoint came of what was asked: {reason}. See `watchdog status {job}`")
        self.job, self.reason = job, reason


class DaemonUnreachableError(WatchdogError):
    """No daemon answered in time."""

    def __init__(self, address: str, waited_s: float, *, why: str = "") -> None:
        """`why`: what keeps us from trusting who listens there."""
        super().__init__(
            f"no daemon answered at {address} that can be trusted: {why}"
            if why
            else f"no daemon answered at {address} within {waited_s:g} s: start one with `watchdog serve`, "
            "pass --daemon HOST:PORT, or read the run directory (--dir) without a daemon"
        )
        self.address, self.waited_s = address, waited_s


class DaemonRefusedError(WatchdogError):
    """The daemon answered, and said no."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"the daemon at {address} refused: {reason}")
        self.address, self.reason = address, reason


class DaemonAnswerError(WatchdogError):
    """The daemon answered in words that are not known here."""

    def __init__(self, address: str, what: str) -> None:
        super().__init__(
            f"the daemon at {address} answers what this version does not know ({what[:200]}): use the `watchdog` of its version"
        )
        self.address = address


class NoTokenError(WatchdogError):
    """Nothing says that the daemon at a port is this user's."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"there is no token for {address}: start a daemon with `watchdog serve` on this machine, or let TORCH_WATCHDOG_TOKEN_FILE name a file "
            "that holds the token of the one that is there"
        )
        self.address = address


def _some(names: Sequence[str], most: int = 10) -> str:
    """Never a part of them as if it were all."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") if names else "none"


class UnknownJobError(WatchdogError):
    """No job of that name, in the daemon or on disk."""

    def __init__(self, job: str, known: tuple[str, ...] | None = None, *, at: str | None = None, told: str | None = None) -> None:
        """`at`: another daemon that has it. `told`: what a daemon has answered."""
        names = "" if known is None else f" (known: {_some(known)})"
        advice = (
            "see `watchdog jobs`, or pass the --dir that the launch was given" if at is None else f"it is at the daemon {at}: ask that one"
        )
        super().__init__(told or f"there is no job {job!r} here{names}: {advice}")
        self.job, self.known, self.at = job, known, at


class UnknownRankError(WatchdogError):
    """The job has no such rank, or it has not reported."""

    def __init__(self, job: str, rank: int, known: tuple[int, ...] = ()) -> None:
        names = f"ranks {min(known)} to {max(known)}" if known else "no rank"
        super().__init__(f"job {job} has no steps of rank {rank}: {names} reported. See `watchdog status {job}`")
        self.job, self.rank, self.known = job, rank, known


class BadJobNameError(WatchdogError):
    """A name that cannot be a folder's, a label's and a word on a command line at once."""

    def __init__(self, job: str) -> None:
        super().__init__(
            f"{job[:120]!r} cannot be a job's name: use up to 100 letters, digits, '.', '_' and '-', the first a letter or digit"
        )
        self.job = job


class JobNameTakenError(WatchdogError):
    """A second launch under a name that is in use."""

    def __init__(self, job: str, run_dir: Path) -> None:
        super().__init__(f"a job named {job!r} already has its files in {run_dir}: pass another --job NAME, or another --dir")
        self.job, self.run_dir = job, run_dir


class JobElsewhereError(WatchdogError):
    """Another daemon over the same store decides for the job: the node must ask that one, or this one again later."""

    def __init__(self, job: str, owner: str) -> None:
        super().__init__(f"job {job} is at the daemon {owner}, until that one has been silent for long enough: ask there, or here again")
        self.job, self.owner = job, owner


class TooManyJobsError(WatchdogError):
    """The daemon's quota of running jobs is used up."""

    def __init__(self, job: str, limit: int) -> None:
        super().__init__(
            f"job {job} must wait: {limit} jobs run at this daemon, which is its quota (`[quotas] jobs` in its settings); the node asks again, "
            "and the training goes on unwatched meanwhile"
        )
        self.job, self.limit = job, limit


class JobForbiddenError(WatchdogError):
    """A token that is for other jobs."""

    def __init__(self, job: str, token: str) -> None:
        super().__init__(f"the token {token!r} is not for job {job[:120]!r}: use one whose jobs include it (`watchdog token list`)")
        self.job, self.token = job, token


class StoreError(WatchdogError):
    """The shared store did not answer, or is none of ours. Its password is not in here."""

    def __init__(self, store: str, reason: str, advice: str, *, is_refusal: bool = False) -> None:
        """`is_refusal`: it answers, and will never take this."""
        super().__init__(f"the store {store} cannot be used ({reason}). {advice}")
        self.store, self.reason, self.is_refusal = store, reason, is_refusal


class JobWaitsForStoreError(WatchdogError):
    """A job that this daemon does not know yet, while the store that says whose it is does not answer."""

    def __init__(self, job: str, error: StoreError) -> None:
        super().__init__(
            f"job {job} is new there, and the store that says whose jobs are whose does not answer ({error.store}: {error.reason[:120]}): "
            "start that, or launch without --daemon"
        )
        self.job = job


class VersionSkewError(WatchdogError):
    """Node process and daemon are more than one minor version apart."""

    def __init__(self, theirs: str, ours: str) -> None:
        super().__init__(
            f"the node process is torch-watchdog {theirs}, the daemon {ours}: they may be one minor version apart, "
            "so upgrade the older of the two (the training goes on unwatched)"
        )
        self.theirs, self.ours = theirs, ours


class DaemonStartError(WatchdogError):
    """The daemon cannot listen where it was told to."""

    def __init__(self, address: str, reason: str, advice: str) -> None:
        super().__init__(f"the daemon cannot listen at {address}: {reason}. {advice}")
        self.address, self.reason = address, reason


class RunDirectoryError(WatchdogError):
    """A run directory that cannot be read or written."""

    def __init__(self, path: Path, reason: str, advice: str) -> None:
        super().__init__(f"{path}: {reason}. {advice}")
        self.path, self.reason = path, reason


class DiskAwayError(WatchdogError):
    """A folder that does not answer."""

    def __init__(self, folder: Path, waited_s: float) -> None:
        waited = f"has not answered within {waited_s:g} s" if waited_s else "does not answer, and many wait for it already"
        super().__init__(f"{folder}: it {waited}. Is its disk there? What reports now is not held up by it: ask again later")
        self.folder, self.waited_s = folder, waited_s


class SlowReaderError(WatchdogError):
    """A caller that asks for much and reads none of it."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"the answer was given up: nothing of it was read for {waited_s:g} s. Ask again, for fewer steps")
        self.waited_s = waited_s


class MissingExtraError(WatchdogError):
    """A library that only some need is not installed."""

    def __init__(self, wanted_by: str, library: str) -> None:
        super().__init__(f"{wanted_by} needs a library that is not installed here: pip install '{library}'")


class OutputError(WatchdogError):
    """A file that was asked for cannot be written, or what it should be made from cannot be read."""

    def __init__(self, path: Path, reason: str, advice: str) -> None:
        super().__init__(f"{path}: {reason}. {advice}")
        self.path, self.reason = path, reason
