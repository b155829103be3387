"""Who may see and who may order: tokens, roles, and the sessions of browsers.

Owns the sessions, in memory only: a daemon that was started anew asks for the token again. A token or session is compared without telling by its
time how much of it was right, and never logged. Knows nothing of HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from enum import IntEnum

__all__ = ["Access", "Role"]

_SESSION_S = 12 * 3600.0
_MAX_SESSIONS = 1_000


class Role(IntEnum):
    """Each may do what those before it may."""

    VIEWER = 1
    OPERATOR = 2


class Access:
    """`role_of_token` says what the bearer of a token may do; None where it is none of ours."""

    def __init__(self, role_of_token: Callable[[str], Role | None], *, clock: Callable[[], float]) -> None:
        self.role_of_token = role_of_token
        self._clock = clock
        self._sessions: dict[str, tuple[Role, float]] = {}  # by digest, so that a look-up tells nothing of its key

    @classmethod
    def by_one_token(cls, token: str, *, clock: Callable[[], float]) -> Access:
        """Who has the daemon's token may do everything."""

        def role_of(given: str) -> Role | None:
            return Role.OPERATOR if token and hmac.compare_digest(given.encode(), token.encode()) else None

        return cls(role_of, clock=clock)

    def begin_session(self, token: str) -> str | None:
        """A new session's secret, for a cookie; None where the token is none of ours."""
        role = self.role_of_token(token)
        if role is None:
            return None
        while len(self._sessions) >= _MAX_SESSIONS:
            self._sessions.pop(next(iter(self._sessions)))
        secret = secrets.token_urlsafe(32)
        self._sessions[_digest(secret)] = (role, self._clock() + _SESSION_S)
        return secret

    def role_of_session(self, secret: str) -> Role | None:
        role, until_s = self._sessions.get(_digest(secret), (None, 0.0))
        return role if self._clock() < until_s else None

    def end_session(self, secret: str) -> None:
        self._sessions.pop(_digest(secret), None)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
