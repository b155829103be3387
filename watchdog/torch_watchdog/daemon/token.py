"""The token of `watchdog serve`: who brings it on a loopback port is the user who started the daemon, or was given it by that user.

Owns where it lies: in a file of mode 0600, in a folder of the port's name that only this user can enter, gone with the daemon. The file that
TORCH_WATCHDOG_TOKEN_FILE names takes its place, for daemon and callers alike. A token is on no command line, in no record and no log. It must not
know gRPC.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch_watchdog.errors import ConfigError, DaemonStartError
from torch_watchdog.launch.places import find_in_runtime_dir, open_runtime_dir
from torch_watchdog_proto.address import is_loopback, split

__all__ = ["CA_FILE", "TOKEN_FILE", "kept_token", "named_authority", "named_token", "new_token", "token_for"]

TOKEN_FILE = "TORCH_WATCHDOG_TOKEN_FILE"  # noqa: S105 - the variable's name
CA_FILE = "TORCH_WATCHDOG_CA_FILE"
_NAME = "token"


def new_token(environment: Mapping[str, str]) -> str:
    """For a daemon that starts: the one in the named file, else a random one. Raises ConfigError."""
    return named_token(environment) or secrets.token_urlsafe(32)


@contextlib.contextmanager
def kept_token(token: str, address: str, environment: Mapping[str, str]) -> Iterator[Path]:
    """While the daemon at `address` lives, this user's commands and launches find its token, in the file that is given. Raises DaemonStartError."""
    with contextlib.ExitStack() as stack:
        file = Path(environment.get(TOKEN_FILE, ""))
        if not environment.get(TOKEN_FILE):
            try:
                file = _write(stack.enter_context(open_runtime_dir(_folder(address), environment)), token)
            except OSError as error:
                advice = f"Set XDG_RUNTIME_DIR or TMPDIR to a folder that can be written to, or {TOKEN_FILE} to a file that holds one"
                raise DaemonStartError(address, f"its token cannot be kept ({error})", advice) from error
        yield file


def token_for(address: str, environment: Mapping[str, str]) -> str | None:
    """What a call to `address` must bring; empty for a unix socket, whose folder keeps others out. Raises ConfigError.

    None where no live daemon of this user's has left one: whoever listens there now may be anybody, and must neither be asked nor obeyed. A token
    that was found by its port is never sent off this host: the port of another host is another daemon's.
    """
    host, port = split(address)
    if not port:
        return ""
    if environment.get(TOKEN_FILE):
        return named_token(environment)
    return find_in_runtime_dir(_folder(address), _NAME, environment) if is_loopback(host) else None


def _folder(address: str) -> str:
    return f"serve-{split(address)[1]}"


def _write(folder: Path, token: str) -> Path:
    """Whole or not at all, for whoever reads it at this moment."""
    part = folder / f".{_NAME}"
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(token)
    return part.rename(folder / _NAME)


def named_token(environment: Mapping[str, str]) -> str:
    """What the file holds that TORCH_WATCHDOG_TOKEN_FILE names; empty where it names none. Raises ConfigError."""
    path = environment.get(TOKEN_FILE)
    if not path:
        return ""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(TOKEN_FILE, f"{path} cannot be read ({error}): it must be a file that holds the daemon's token") from error
    if not (token.isascii() and token.isprintable() and token):
        raise ConfigError(TOKEN_FILE, f"{path} must hold one line of plain characters, the daemon's token")
    return token


def named_authority(environment: Mapping[str, str]) -> bytes | None:
    """The PEM that TORCH_WATCHDOG_CA_FILE names: who signed the certificate of a daemon on another machine. Raises ConfigError."""
    path = environment.get(CA_FILE)
    if not path:
        return None
    try:
        found = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            CA_FILE, f"{path} cannot be read ({error.strerror}): it must be the ca.crt of `watchdog certs`, or the site's own"
        ) from error
    if b"-----BEGIN CERTIFICATE-----" not in found:
        raise ConfigError(CA_FILE, f"{path} holds no certificate: it must be the ca.crt of `watchdog certs`, or the site's own, as PEM")
    return found
