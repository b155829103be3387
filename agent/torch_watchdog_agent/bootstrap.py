"""At interpreter start: am I a rank? If so: a keeper, the log, and hooks that wait for torch. Never raises, imports neither torch nor grpc.

Knows which process it is in and nothing about training. What happens in the rank from its first sign of a training on is in `rank.py`.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from torch_watchdog_agent.config import PID_MARK, RANKS_MARK, AgentConfig
from torch_watchdog_agent.say import Voice

if TYPE_CHECKING:  # what only annotations need is not paid for in every Python of a launch
    from collections.abc import Mapping
    from importlib.machinery import ModuleSpec

__all__ = ["activate", "is_rank"]

_BY_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def activate() -> None:
    """Called once by the shim."""
    say = Voice()
    try:
        config = AgentConfig.from_env(os.environ)
        if os.environ.pop(RANKS_MARK, None) is not None and "LOCAL_RANK" in os.environ:  # on one node they are the same
            os.environ.setdefault("RANK", os.environ["LOCAL_RANK"])
        if config is not None and is_rank(config, os.environ, pid=os.getpid(), parent_pid=os.getppid()):
            _become_rank(config, say)
    except Exception as error:  # noqa: BLE001  whatever it is: the training must not notice
        say(f"the agent could not start ({type(error).__name__}: {error}); this process runs without it")


def is_rank(config: AgentConfig, environment: Mapping[str, str], *, pid: int, parent_pid: int) -> bool:
    """True where a launcher made this process a rank, or where the one process of a plain command may become one.

    Children of a rank (loader workers, helper scripts) inherit RANK: the mark that the rank set tells them apart.
    """
    marked = environment.get(PID_MARK)
    if marked is not None and marked != str(pid):
        return False
    if "RANK" in environment:
        return True
    if config.by_accelerate and (parent_pid == config.launcher_pid or any(name in environment for name in _BY_MPI)):
        return False  # accelerate itself; or one of many, whose numbers are told to their script only
    return config.solo


def _become_rank(config: AgentConfig, say: Voice) -> None:
    if "RANK" in os.environ or os.getppid() == config.launcher_pid:
        _keep(config, say)
        os.environ[PID_MARK] = str(os.getpid())
    if "torch" in sys.modules:
        _hook(config, say)
    else:
        sys.meta_path.insert(0, _UntilTorch(config, say))


class _UntilTorch:
    """Waits in the import system until torch is looked for: what the hooks need is not loaded into a Python that never trains."""

    def __init__(self, config: AgentConfig, say: Voice) -> None:
        self._config, self._say = config, say

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002 - a finder's signature
        if name != "torch" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        _hook(self._config, self._say)
        return find_spec(name)  # from the beginning: the hooks' own finder is among them now


def _hook(config: AgentConfig, say: Voice) -> None:
    try:
        from torch_watchdog_agent.hooks import install

        install.when_torch_is_imported(config)
    except ModuleNotFoundError as error:
        say(f"{error.name} is missing in this Python: the rank runs without the watchdog (pip install {error.name})")
    except Exception as error:  # noqa: BLE001  whatever it is: torch must be imported
        say(f"the hooks could not be prepared ({type(error).__name__}: {error}); this process runs without the watchdog")


def _keep(config: AgentConfig, say: Voice) -> None:
    """The keeper where a launcher watches this process as a session of its own; else only the log."""
    from torch_watchdog_agent import copied, keeper
    from torch_watchdog_agent.attempt_mark import mark_attempt
    from torch_watchdog_agent.holdback import HoldBack, begun_file, released_file

    log_path = Path(config.run_dir) / "logs" / f"rank-{os.environ.get('RANK') or 0}.log"
    _flush()
    attempt, rank = (int(os.environ.get(name) or 0) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
    with suppress(OSError):
        mark_attempt(log_path, attempt)
    with suppress(OSError):  # at worst the end of a launch names an earlier attempt
        begun_file(Path(config.runtime_dir), attempt).touch(mode=0o600)
    try:
        if config.keeper and config.policy != "observe" and os.getsid(0) == os.getpid():
            released = released_file(Path(config.runtime_dir), attempt=attempt, rank=rank)
            hold = HoldBack(released, launcher_pid=config.launcher_pid, grace_s=config.grace_s)
            keeper.stand_guard(log_path=log_path, say=say, hold=hold)
        else:
            copied.tee_only(log_path=log_path, say=say)
    except OSError as error:
        say(f"no keeper and no log of this rank ({error})")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
