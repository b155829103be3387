"""Who may do what at a daemon: the daemon's own token may do everything, the tokens of a file what the file says of them.

Owns that file: names, roles, jobs and digests, never a token. A token is random and long, so its digest needs no salt; it is compared without telling by
its time how much of it was right. The file is read again when it changes: a token is taken away without a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from torch_watchdog.alerts.alert import lineage_of
from torch_watchdog.errors import ConfigError, JobForbiddenError
from torch_watchdog.store.run_directory import FileVersion, file_version, write_json

__all__ = [
    "OWNER",
    "OWNER_NAME",
    "Grant",
    "Grants",
    "Power",
    "RoleName",
    "TokenEntry",
    "new_entry",
    "read_tokens",
    "told_as",
    "write_tokens",
]

Power: TypeAlias = Literal["report", "look", "order"]
RoleName: TypeAlias = Literal["agent", "viewer", "operator"]
_POWERS: Mapping[str, frozenset[Power]] = {
    "agent": frozenset({"report"}),
    "viewer": frozenset({"look"}),
    "operator": frozenset({"look", "order"}),
}
_MAX_FILE_BYTES = 4 << 20
_PATTERN_CHARACTERS = frozenset("*?[")  # none of them can be in a job's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What the bearer of a token may do. `jobs` are shell patterns; what fits a job fits its requeues, `nightly.2` for `nightly`, too."""

    name: str
    powers: frozenset[Power]
    jobs: tuple[str, ...] = ("*",)

    @property
    def is_for_all_jobs(self) -> bool:
        return "*" in self.jobs

    def fits(self, job: str) -> bool:
        """Of a shell pattern: whether that very one is granted. As a name `[!x]*` would fit `run-?`, and then stand for every job."""
        if _PATTERN_CHARACTERS & set(job):
            return self.is_for_all_jobs or job in self.jobs
        names = {job, lineage_of(job, lambda _: True)}
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.jobs)

    def check(self, job: str) -> None:
        """Raises JobForbiddenError."""
        if not self.fits(job):
            raise JobForbiddenError(job, self.name)


OWNER_NAME = "owner"
OWNER = Grant(name=OWNER_NAME, powers=frozenset(get_args(Power)))


def told_as(who: str, says: str) -> str:
    """The caller in what others read. `who` is the name of its token, which is proven; only the daemon's own token is no person's, so that `says` counts."""
    return says if who == OWNER_NAME else who


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEntry:
    """A line of the file. `until_s` None: until it is removed."""

    name: str
    role: RoleName
    jobs: tuple[str, ...]
    digest: str
    until_s: float | None = None


class Grants:
    """`own` is the daemon's token; empty: everybody may do everything, which is only so behind a socket. `now` is seconds since the epoch."""

    def __init__(self, own: str, file: Path | None = None, *, now: Callable[[], float]) -> None:
        """Raises ConfigError."""
        self.own, self._file, self._now = own, file, now
        self._read_at: FileVersion | None = None
        self._by_digest: dict[str, TokenEntry] = {}
        if file is not None:
            self._by_digest = {entry.digest: entry for entry in read_tokens(file)}
            self._read_at = file_version(file)

    def of(self, token: str) -> Grant | None:
        """None where it is none of ours."""
        if not self.own or hmac.compare_digest(token.encode(), self.own.encode()):
            return OWNER
        self._read_again()
        entry = self._by_digest.get(digest_of(token)) if token else None
        if entry is None or (entry.until_s is not None and self._now() >= entry.until_s):
            return None
        return _grant(entry)

    def _read_again(self) -> None:
        """A file that is broken or gone lets nobody in: what was taken away must not come back by a typing error."""
        if self._file is None or file_version(self._file) == self._read_at:
            return
        self._read_at = file_version(self._file)
        try:
            self._by_digest = {entry.digest: entry for entry in read_tokens(self._file)}
        except ConfigError:
            self._by_digest = {}


def _grant(entry: TokenEntry) -> Grant:
    """Who reports for jobs that are named sees these, too: its launches' own words. One that reports for all of a site lies in every pod, and sees none."""
    known = Grant(name=entry.name, powers=_POWERS[entry.role], jobs=entry.jobs)
    sees = entry.role == "agent" and not known.is_for_all_jobs
    return replace(known, powers=known.powers | {"look"}) if sees else known


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def new_entry(name: str, role: RoleName, jobs: Sequence[str], until_s: float | None) -> tuple[str, TokenEntry]:
    """A new token, and what the file keeps of it."""
    token = secrets.token_urlsafe(32)
    return token, TokenEntry(name=name, role=role, jobs=tuple(jobs) or ("*",), digest=digest_of(token), until_s=until_s)


def read_tokens(path: Path) -> tuple[TokenEntry, ...]:
    """Raises ConfigError."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MAX_FILE_BYTES))
        return tuple(_entry(one) for one in found["tokens"])
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror}): make it with `watchdog token add`") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(str(path), "is no file of tokens: make it with `watchdog token add`") from error


def write_tokens(path: Path, entries: Sequence[TokenEntry]) -> None:
    """For this user only."""
    lines = [
        {"name": one.name, "role": one.role, "jobs": list(one.jobs), "sha256": one.digest, "until": _shown(one.until_s)} for one in entries
    ]
    write_json(path, {"schema_version": 1, "tokens": lines}, mode=0o600)


def _entry(one: Mapping[str, Any]) -> TokenEntry:
    if one["role"] not in _POWERS or len(one["sha256"]) != 64 or not isinstance(one["jobs"], list):
        raise ValueError("no token")
    until = one.get("until")
    until_s = None if until is None else datetime.fromisoformat(until).timestamp()
    return TokenEntry(name=str(one["name"]), role=one["role"], jobs=tuple(map(str, one["jobs"])), digest=one["sha256"], until_s=until_s)


def _shown(until_s: float | None) -> str | None:
    return None if until_s is None else datetime.fromtimestamp(until_s, UTC).isoformat(timespec="seconds")
