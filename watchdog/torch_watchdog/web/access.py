"""Who may see and who may order: tokens, roles, and the sessions of browsers.

Owns the sessions, in memory only: a daemon that was started anew asks for the token again. A token or session is compared without telling by its
time how much of it was right, and never logged. Knows nothing of HTTP.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_watchdog.daemon.grants import Grants

__all__ = ["Access", "Role"]

_SESSION_S = 12 * 3600.0
_MAX_SESSIONS = 1_000


class Role(IntEnum):
    """Each may do what those before it may."""

    VIEWER = 1
    OPERATOR = 2


class Access:
    """`role_of_token` says what the bearer of a token may do; None where it is none of ours."""

    def __init__(
        self,
        role_of_token: Callable[[str], Role | None],
        *,
        clock: Callable[[], float],
        name_of_token: Callable[[str], str] = lambda _: "owner",
    ) -> None:
        self.role_of_token, self.name_of_token = role_of_token, name_of_token
        self._clock = clock
        self._sessions: dict[str, tuple[Role, str, float]] = {}  # by digest, so that a look-up tells nothing of its key

    @classmethod
    def by_grants(cls, grants: Grants, *, clock: Callable[[], float]) -> Access:
        """The pages show all jobs, so a token that is for some of them is not let in here."""

        def role_of(token: str) -> Role | None:
            grant = grants.of(token)
            if grant is None or not grant.is_for_all_jobs or "look" not in grant.powers:
                return None
            return Role.OPERATOR if "order" in grant.powers else Role.VIEWER

        def name_of(token: str) -> str:
            grant = grants.of(token)
            return "" if grant is None else grant.name

        return cls(role_of, clock=clock, name_of_token=name_of)

    def begin_session(self, token: str) -> str | None:
        """A new session's secret, for a cookie; None where the token is none of ours."""
        role = self.role_of_token(token)
        if role is None:
            return None
        while len(self._sessions) >= _MAX_SESSIONS:
            self._sessions.pop(next(iter(self._sessions)))
        secret = secrets.token_urlsafe(32)
        self._sessions[_digest(secret)] = (role, self.name_of_token(token), self._clock() + _SESSION_S)
        return secret

    def role_of_session(self, secret: str) -> Role | None:
        role, _, until_s = self._sessions.get(_digest(secret), (None, "", 0.0))
        return role if self._clock() < until_s else None

    def name_of_session(self, secret: str) -> str:
        """Of the token that it was begun with."""
        return self._sessions.get(_digest(secret), (None, "", 0.0))[1]

    def end_session(self, secret: str) -> None:
        self._sessions.pop(_digest(secret), None)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
