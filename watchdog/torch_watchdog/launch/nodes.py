"""How the nodes of one launch find the daemon of the node that hosts it, and the secret that they share.

The host is the node of rank 0 (or the one at whose address the launcher's own rendezvous is). What a port that leaves the machine asks for, a token,
comes from the file that TORCH_WATCHDOG_TOKEN_FILE names on all nodes; else the host leaves a file of mode 0600 in `DIR/.nodes`, which every node reads
that shares DIR. Owns that file and the wait for it. It must not know what is said over the line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.daemon.token import TOKEN_FILE, named_authority, named_token, new_token, token_for
from torch_watchdog.errors import DaemonRefusedError, DaemonUnreachableError, NoTokenError, UnknownJobError
from torch_watchdog.launch.places import make_private
from torch_watchdog.launch.rendezvous import Rendezvous, accelerate_file
from torch_watchdog.store.run_directory import write_json
from torch_watchdog_proto import __version__
from torch_watchdog_proto.address import is_loopback
from torch_watchdog_proto.envelopes import JoinAnswer, JoinRequest

__all__ = ["Meeting", "accelerate_settings", "is_host", "shared_address", "shared_token"]

FOLDER = ".nodes"
POLL_S = 0.2
ANSWER_S = 5.0
LONGEST_WAIT_S = 900.0  # torchrun gives nodes as long to come
_MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the nodes of this launch meet. `daemon` is "auto", or the address of one that all nodes were told.

    `patience_s`: once the launcher's own rendezvous answers the host has begun, and so long later its daemon is there, or never will be.
    """

    rendezvous: Rendezvous
    directory: Path
    daemon: str
    environment: Mapping[str, str]
    patience_s: float = 10.0
    worth_a_line_s: float = 5.0

    @property
    def _file(self) -> Path:
        return self.directory / FOLDER / f"{self.rendezvous.key}.json"

    @property
    def _has_named_token(self) -> bool:
        return bool(self.environment.get(TOKEN_FILE))

    # The host's side

    def listen(self) -> str:
        """Where the host's daemon listens for the others: where they look without being told, or on any port, which the file will tell."""
        host = "127.0.0.1" if is_loopback(self.rendezvous.host) else "[::]"
        return f"{host}:{self.rendezvous.daemon_port if self._has_named_token else 0}"

    def new_token(self) -> str:
        """Raises ConfigError."""
        return new_token(self.environment)

    @contextlib.contextmanager
    def told(self, listening: str, token: str) -> Iterator[str]:
        """While the host's daemon lives, the others find it. Gives the address that they use. Raises OSError."""
        address = self._address(listening.rpartition(":")[2])
        if self._has_named_token:
            yield address
            return
        make_private(self._file.parent, parents=True)
        write_json(self._file, {"address": address, "token": token}, mode=0o600)
        try:
            yield address
        finally:
            if shared_address(self._file) == (address, token):  # not that of a later launch
                self._file.unlink(missing_ok=True)

    # The others' side

    def join(self, *, is_over: Callable[[], bool], say: Callable[[str], None]) -> tuple[JoinAnswer, str, str] | str:
        """The job that the host has begun, its daemon's address and the token; or why this node goes without.

        Waits as long as the launcher on this node would have to wait for the host anyway, and not longer. Raises ConfigError.
        """
        begun, answered_at, said = time.monotonic(), None, False
        while not is_over():
            found = self._ask()
            if not isinstance(found, str):
                return found
            now = time.monotonic()
            answered_at = answered_at or (now if self._host_has_begun() else None)
            if now - (answered_at or now) > self.patience_s or now - begun > LONGEST_WAIT_S:
                return found
            if not said and now - begun > self.worth_a_line_s:
                said = True
                say(f"waiting for the node at {self.rendezvous.host}, as the launcher will ({found})")
            time.sleep(POLL_S)
        return "the launch was ended before it began"

    def _ask(self) -> tuple[JoinAnswer, str, str] | str:
        found = self._found()
        if isinstance(found, str):
            return found
        address, token = found
        question = JoinRequest(rendezvous=self.rendezvous.key, host=socket.gethostname(), version=__version__)
        try:
            with DaemonClient(address, token=token, timeout_s=ANSWER_S, authority=self._authority) as client:
                return client.join(question), address, token
        except UnknownJobError:
            return f"the daemon at {address} knows of no launch at {self.rendezvous.host}:{self.rendezvous.port}"
        except DaemonUnreachableError:
            return f"no daemon answers at {address} with the token of this node"
        except DaemonRefusedError as error:
            return str(error)

    @property
    def _authority(self) -> bytes | None:
        """Only of a central daemon: a node that hosts makes its certificate from the token."""
        return None if self.daemon == "auto" else named_authority(self.environment)

    def _found(self) -> tuple[str, str] | str:
        if self.daemon != "auto":
            return self._central()
        if self._has_named_token:
            return self._address(self.rendezvous.daemon_port), named_token(self.environment)
        found = shared_address(self._file)
        return (
            found
            or f"it has left no word in {self._file.parent}: do the nodes share this folder? Else let {TOKEN_FILE} name a token on each"
        )

    def _central(self) -> tuple[str, str] | str:
        token = token_for(self.daemon, self.environment)
        return str(NoTokenError(self.daemon)) if token is None else (self.daemon, token)

    def _address(self, port: int | str) -> str:
        host = self.rendezvous.host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _host_has_begun(self) -> bool:
        try:
            socket.create_connection((self.rendezvous.host, self.rendezvous.port), timeout=1.0).close()
        except OSError:
            return False
        return True


def is_host(rendezvous: Rendezvous) -> bool:
    """Whether this node hosts the launch's daemon."""
    rank = rendezvous.node_rank
    if rank is None and is_loopback(rendezvous.host):
        rank = rendezvous.unused_rank
    return rank == 0 if rank is not None else _is_of_this_machine(rendezvous.host)


def _is_of_this_machine(host: str) -> bool:
    """Whether a socket can be bound to what the name stands for."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return host == socket.gethostname()
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def shared_address(file: Path) -> tuple[str, str] | None:
    """Address and token that the host left; None where there are none, or where somebody else could have put them there."""
    try:
        os.listdir(file.parent)  # noqa: PTH208 - asks a network disk for the folder as it is now
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as opened:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            return None
        try:
            told = json.loads(opened.read(_MAX_FILE_BYTES))
            return str(told["address"]), str(told["token"])
        except (ValueError, TypeError, KeyError):
            return None


def shared_token(directory: Path, address: str) -> str | None:
    """The token that the host at `address` left in DIR, for a person's command on another machine."""
    left = [shared_address(file) for file in (directory / FOLDER).glob("*.json")]
    return next((found[1] for found in left if found is not None and found[0] == address), None)


_SETTING = re.compile(r"""^\s*["']?(\w+)["']?\s*:\s*["']?([^"',#]*?)["']?\s*,?\s*$""")


def accelerate_settings(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The plain values of accelerate's file, YAML or JSON, one a line. Empty where there is none."""
    try:
        lines = Path(accelerate_file(command, environment)).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    return {match[1]: match[2] for match in map(_SETTING.match, lines) if match}
