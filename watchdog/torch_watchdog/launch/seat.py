"""The place of this launch in its job: its run directory, its session, and the daemon that decides, which this node hosts or joins.

Owns the choice between one node, the host of several, a node that joins, and one that only looks on. It must not know the command's process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from torch_watchdog.config import LaunchConfig
from torch_watchdog.daemon.config import AlertsConfig, DaemonConfig
from torch_watchdog.daemon.embedded import EmbeddedDaemon
from torch_watchdog.daemon.token import named_authority, token_for
from torch_watchdog.errors import ConfigError, DaemonStartError, RunDirectoryError
from torch_watchdog.launch import signals
from torch_watchdog.launch.nodes import Meeting, accelerate_settings, is_host
from torch_watchdog.launch.plan import job_name, sees_all_ranks
from torch_watchdog.launch.rendezvous import Rendezvous, rendezvous_of
from torch_watchdog.launch.say import say
from torch_watchdog.store.run_directory import RunDirectory, make_folder
from torch_watchdog_proto.envelopes import JoinAnswer

__all__ = ["Seat", "take_seat"]

MAX_JOBS_OF_ONE_NAME = 1000
LINGER_S = 15.0  # of the host's daemon, for the nodes that end after its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """`daemon` and `token` are what this node calls, `network` is where other machines reach the daemon. `joined` None: this node owns the job's record."""

    config: LaunchConfig
    directory: RunDirectory
    session: str
    node: str
    daemon: str
    token: Callable[[], str | None]
    authority: bytes | None = None
    network: str | None = None
    rendezvous: Rendezvous | None = None
    joined: JoinAnswer | None = None


def take_seat(stack: contextlib.ExitStack, config: LaunchConfig, command: Sequence[str], *, session: str, runtime_dir: Path) -> Seat:
    """What is opened for it is closed by `stack`. Raises whatever keeps a part of ours from starting."""
    accelerate = accelerate_settings(command, os.environ)
    rendezvous = rendezvous_of(command, os.environ, accelerate)
    if config.policy == "observe" or rendezvous is None:
        alone = (
            config
            if rendezvous is None and sees_all_ranks(command, os.environ, accelerate)
            else _only_observed(config, "its line does not say where they meet")
        )
        return _alone(stack, alone, command, session, runtime_dir)
    meeting = Meeting(rendezvous, config.directory, config.daemon, os.environ)
    if not is_host(rendezvous):
        found = meeting.join(is_over=lambda: signals.pending_end() is not None, say=say)
        if not isinstance(found, str):
            return _joined(config, rendezvous, *found)
        return _alone(stack, _only_observed(replace(config, daemon="auto"), found), command, session, runtime_dir)
    if config.daemon != "auto":
        return replace(_alone(stack, config, command, session, runtime_dir), rendezvous=rendezvous)
    try:
        return _host(stack, config, command, session, runtime_dir, meeting)
    except (DaemonStartError, OSError) as error:
        return _alone(stack, _only_observed(config, str(error)), command, session, runtime_dir)


def _only_observed(config: LaunchConfig, why: str) -> LaunchConfig:
    if config.policy != "observe":
        say(f"this launch holds only some of the job's ranks, so it is only observed: nothing is stopped or skipped from here ({why})")
    return replace(config, policy="observe")


def _alone(stack: contextlib.ExitStack, config: LaunchConfig, command: Sequence[str], session: str, runtime_dir: Path) -> Seat:
    daemon = _embedded(stack, config, runtime_dir)[0] if config.daemon == "auto" else config.daemon
    token, authority = _token_source(daemon), None if config.daemon == "auto" else named_authority(os.environ)
    directory = _own_directory(stack, config, command)
    return Seat(
        config=config, directory=directory, session=session, node=socket.gethostname(), daemon=daemon, token=token, authority=authority
    )


def _host(
    stack: contextlib.ExitStack, config: LaunchConfig, command: Sequence[str], session: str, runtime_dir: Path, meeting: Meeting
) -> Seat:
    token = meeting.new_token()
    with contextlib.ExitStack() as opening:
        by_socket, by_network = _embedded(opening, config, runtime_dir, meeting.listen(), token=token, linger_s=LINGER_S)
        network = opening.enter_context(meeting.told(by_network, token))
        stack.push(opening.pop_all())
    return Seat(
        config=config, directory=_own_directory(stack, config, command), session=session, node=socket.gethostname(), daemon=by_socket, token=str,
        network=network, rendezvous=meeting.rendezvous,
    )  # fmt: skip


def _joined(config: LaunchConfig, rendezvous: Rendezvous, answer: JoinAnswer, daemon: str, token: str) -> Seat:
    """The job's folder is the host's where the nodes share it; else one of the same name, for what is kept on this node."""
    directory = RunDirectory(config.directory / answer.job)
    make_folder(config.directory)
    try:
        directory.root.mkdir(mode=0o770, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            directory.root, f"cannot be made ({error.strerror})", "Pass --dir DIR with a folder that can be written to"
        ) from error
    if config.quarantine is not None and not directory.quarantine_file.exists():
        shutil.copyfile(config.quarantine, directory.quarantine_file)
    return Seat(
        config=replace(config, policy=answer.policy), directory=directory, session=answer.session, node=answer.node, daemon=daemon,
        token=lambda: token, rendezvous=rendezvous, joined=answer, authority=None if config.daemon == "auto" else named_authority(os.environ),
    )  # fmt: skip


def _embedded(
    stack: contextlib.ExitStack, config: LaunchConfig, runtime_dir: Path, *network: str, token: str = "", linger_s: float = 0.0
) -> tuple[str, ...]:
    """A daemon in this process; its addresses, the socket of this user's first."""
    listen, page_token = (f"unix:{runtime_dir / 'daemon.sock'}", *network), secrets.token_urlsafe(32)
    known = DaemonConfig(
        runs_dir=config.directory, listen=listen, grace_s=config.grace_s, token=token, linger_s=linger_s, web=config.web,
        web_token=page_token, web_optional=True, alerts=AlertsConfig.to_all(config.alerts, last_words=True, exit_codes=config.exit_codes),
    )  # fmt: skip
    addresses = stack.enter_context(EmbeddedDaemon(known, say=say)).addresses
    for url in addresses[len(listen) :]:
        _say_page(url, page_token, runtime_dir)
    return addresses[: len(listen)]


def _say_page(url: str, token: str, runtime_dir: Path) -> None:
    """On a terminal with the token in the link; in a log, which others may read, with the name of a file that only this user can."""
    file = runtime_dir / "page-token"
    file.touch(mode=0o600)
    file.write_text(token, encoding="utf-8")
    say(f"page: {url}login?token={token}" if sys.stderr.isatty() else f"page: {url} (log in with the token in {file})")


def _own_directory(stack: contextlib.ExitStack, config: LaunchConfig, command: Sequence[str]) -> RunDirectory:
    directory = _claim_directory(config.directory, config.job or job_name(command, datetime.now()), given=config.job is not None)
    stack.callback(_remove_if_empty, directory.root)
    if config.quarantine is not None:
        shutil.copyfile(config.quarantine, directory.quarantine_file)
    return directory


def _claim_directory(parent: Path, name: str, *, given: bool) -> RunDirectory:
    """A folder of our own: a second run under one name (a requeue) gets NAME.2, because a taken name must not keep a training from running."""
    make_folder(parent)
    for number in range(1, MAX_JOBS_OF_ONE_NAME):
        path = parent / (name if number == 1 else f"{name}.{number}")
        try:
            path.mkdir(mode=0o770)  # values of batches are in there: not for others, whatever the umask
        except FileExistsError:
            continue
        except OSError as error:
            raise RunDirectoryError(
                path, f"cannot be made ({error.strerror})", "Pass --dir DIR with a folder that can be written to"
            ) from error
        if given and number > 1:
            say(f"there is a job {name} in {parent} already: this one is {path.name}")
        return RunDirectory(path)
    raise RunDirectoryError(parent / name, "has too many runs of this name", "Pass another --job NAME")


def _remove_if_empty(path: Path) -> None:
    """A launch that came to nothing leaves no empty folder behind."""
    with contextlib.suppress(OSError):
        path.rmdir()


def _token_source(daemon: str) -> Callable[[], str | None]:
    """Raises ConfigError now, never later: a token file that is gone meanwhile leaves the token that it held."""
    last = token_for(daemon, os.environ)

    def token() -> str | None:
        nonlocal last
        with contextlib.suppress(ConfigError):
            last = token_for(daemon, os.environ)
        return last

    return token
