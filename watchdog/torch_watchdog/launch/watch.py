"""Everything of ours that is open while the command runs: folders, daemon, node agent, job.json.

Owns their order of opening and closing. It must not know signals or the terminal's words at the end.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import platform
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch_watchdog.config import LaunchConfig
from torch_watchdog.daemon.client import client_of
from torch_watchdog.daemon.config import DaemonConfig
from torch_watchdog.daemon.embedded import EmbeddedDaemon
from torch_watchdog.daemon.token import token_for
from torch_watchdog.errors import ConfigError, RunDirectoryError, WatchdogError
from torch_watchdog.launch.places import open_ring_dir, open_runtime_dir
from torch_watchdog.launch.plan import LaunchPlan, is_by_accelerate, is_solo, job_name, plan_launch, sees_all_ranks
from torch_watchdog.launch.record import JobStart, at_end, at_start
from torch_watchdog.launch.say import PREFIX, say
from torch_watchdog.launch.summary import JobEnd, as_typed
from torch_watchdog.store.run_directory import RunDirectory, write_json
from torch_watchdog_agent.config import AgentConfig
from torch_watchdog_agent.node.agent import NodeAgent
from torch_watchdog_agent.node.config import JobOutcome, NodeConfig
from torch_watchdog_proto import __version__
from torch_watchdog_proto.envelopes import JobStatus

__all__ = ["Watch", "open_watch", "shim_dir"]

QUESTION_TIMEOUT_S = 2.0
MAX_JOBS_OF_ONE_NAME = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A launch that is ready to run `plan.command`."""

    job: str
    plan: LaunchPlan
    directory: RunDirectory
    ring_dir: Path
    daemon: str
    node: NodeAgent
    record: Mapping[str, Any]

    def heard_from_a_rank(self) -> bool:
        """A rank's first act is to make its ring."""
        return next(self.ring_dir.glob("*.ring"), None) is not None

    def unused_resume(self) -> str | None:
        """The checkpoint of --resume, where no rank said that it took it."""
        resume = self.record.get("resume")
        return str(resume) if resume and not (self.directory.root / "resumed").exists() else None

    def ranks_heard(self) -> int:
        """How many ranks of this launch have left a trace here: a log, or what they learned. For where no daemon can tell."""
        traces = [*self.directory.logs.glob("rank-*.log"), *self.directory.contract_file(0).parent.glob("rank-*.json")]
        return len({path.stem for path in traces})

    def finish(self, exit_code: int, signal: int | None) -> JobOutcome:
        return self.node.finish(exit_code, signal)

    def last_status(self) -> JobStatus | None:
        """The job as the daemon has it after the goodbye; None where it does not answer."""
        try:
            with client_of(self.daemon, os.environ, timeout_s=QUESTION_TIMEOUT_S) as client:
                return client.job(self.job)
        except WatchdogError:
            return None

    def write_end(self, end: JobEnd, exit_reason: str, *, world_size: int) -> None:
        ended = at_end(self.record, end, ended=datetime.now(UTC), exit_reason=exit_reason, world_size=world_size)
        write_json(self.directory.job_file, ended)


@contextlib.contextmanager
def open_watch(config: LaunchConfig, command: Sequence[str], options: Sequence[str]) -> Iterator[Watch]:
    """Raises whatever keeps a part of ours from starting: the caller runs the command without us."""
    session = secrets.token_hex(8)
    config = _only_observed(config) if not sees_all_ranks(command, os.environ) else config
    with contextlib.ExitStack() as stack:
        directory = _claim_directory(config.directory, config.job or job_name(command, datetime.now()), given=config.job is not None)
        if config.quarantine is not None:
            shutil.copyfile(config.quarantine, directory.quarantine_file)
        runtime_dir = stack.enter_context(open_runtime_dir(session, os.environ))
        stack.callback(_remove_if_empty, directory.root)
        ring_dir = _ring_dir(stack, session, runtime_dir)
        daemon = _daemon(stack, config, runtime_dir)
        node_config = _node_config(config, command, session, directory, runtime_dir, ring_dir, daemon)
        node = NodeAgent(node_config, say=_without_prefix)
        node.start()
        plan = plan_launch(command, os.environ, shim_dir=shim_dir(), agent=_agent_config(config, node_config, command).to_env())
        record = at_start(_job_start(config, node_config, options), list(os.environ))
        write_json(directory.job_file, record)
        say(f"job {directory.root.name}: policy {config.policy}, files in {as_typed(str(directory.root), str(Path.cwd()))}")
        yield Watch(job=node_config.job, plan=plan, directory=directory, ring_dir=ring_dir, daemon=daemon, node=node, record=record)


def _only_observed(config: LaunchConfig) -> LaunchConfig:
    if config.policy != "observe":
        say("this launch holds only some of the job's ranks, so it is only observed: nothing is stopped or skipped from here")
    return replace(config, policy="observe")


def _claim_directory(parent: Path, name: str, *, given: bool) -> RunDirectory:
    """A folder of our own: a second run under one name (a requeue) gets NAME.2, because a taken name must not keep a training from running."""
    for number in range(1, MAX_JOBS_OF_ONE_NAME):
        path = parent / (name if number == 1 else f"{name}.{number}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
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


def _ring_dir(stack: contextlib.ExitStack, session: str, runtime_dir: Path) -> Path:
    try:
        return stack.enter_context(open_ring_dir(session))
    except OSError as error:
        say(f"no shared memory for the rings ({error}): they are kept in {runtime_dir}")
        return runtime_dir


def _daemon(stack: contextlib.ExitStack, config: LaunchConfig, runtime_dir: Path) -> str:
    if config.daemon != "auto":
        return config.daemon
    listen = f"unix:{runtime_dir / 'daemon.sock'}"
    token = secrets.token_urlsafe(32)
    known = DaemonConfig(
        runs_dir=config.directory, listen=(listen,), grace_s=config.grace_s, web=config.web, web_token=token, web_optional=True
    )
    address, *pages = stack.enter_context(EmbeddedDaemon(known, say=say)).addresses
    for url in pages:
        _say_page(url, token, runtime_dir)
    return address


def _say_page(url: str, token: str, runtime_dir: Path) -> None:
    """On a terminal with the token in the link; in a log, which others may read, with the name of a file that only this user can."""
    file = runtime_dir / "page-token"
    file.touch(mode=0o600)
    file.write_text(token, encoding="utf-8")
    say(f"page: {url}login?token={token}" if sys.stderr.isatty() else f"page: {url} (log in with the token in {file})")


def _node_config(
    config: LaunchConfig, command: Sequence[str], session: str, directory: RunDirectory, runtime_dir: Path, ring_dir: Path, daemon: str
) -> NodeConfig:
    return NodeConfig(
        job=directory.root.name,
        node=socket.gethostname(),
        session=session,
        policy=config.policy,
        command=tuple(command),
        run_dir=directory.root,
        runtime_dir=runtime_dir,
        ring_dir=ring_dir,
        daemon=daemon,
        token=_token_source(daemon),
    )


def _token_source(daemon: str) -> Callable[[], str | None]:
    """Raises ConfigError now, never later: a token file that is gone meanwhile leaves the token that it held."""
    last = token_for(daemon, os.environ)

    def token() -> str | None:
        nonlocal last
        with contextlib.suppress(ConfigError):
            last = token_for(daemon, os.environ)
        return last

    return token


def _agent_config(config: LaunchConfig, node: NodeConfig, command: Sequence[str]) -> AgentConfig:
    return AgentConfig(
        job=node.job,
        session=node.session,
        policy=node.policy,
        run_dir=str(node.run_dir),
        runtime_dir=str(node.runtime_dir),
        ring_dir=str(node.ring_dir),
        version=__version__,
        launcher_pid=os.getpid(),
        grace_s=config.grace_s,
        keeper=config.keeper,
        solo=is_solo(command, os.environ),
        by_accelerate=is_by_accelerate(command),
        resume=config.resume,
        bounds=config.bounds,
        scan=config.scan,
        scan_after=config.scan_after,
    )


def _job_start(config: LaunchConfig, node: NodeConfig, options: Sequence[str]) -> JobStart:
    return JobStart(
        job=node.job,
        session=node.session,
        command=node.command,
        options=tuple(options),
        policy=node.policy,
        daemon=node.daemon,
        host=node.node,
        user=_user(),
        pid=os.getpid(),
        versions={"torch_watchdog": __version__, "python": platform.python_version(), "platform": _platform()},
        resume=config.resume,
        started=datetime.now(UTC),
    )


def _platform() -> str:
    """Without `platform.platform()`, which reads the whole interpreter to tell the version of its C library."""
    system = os.uname()
    return f"{system.sysname}-{system.release}-{system.machine}"


def shim_dir() -> str:
    """Found by path: the rank's package is never imported here to find it."""
    found = importlib.util.find_spec("torch_watchdog_agent")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError("torch_watchdog_agent is not installed beside torch_watchdog")
    return str(Path(found.submodule_search_locations[0]) / "_shim")


def _user() -> str:
    """Any user id will do in a container, also one without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _without_prefix(line: str) -> None:
    say(line.removeprefix(PREFIX).lstrip())
