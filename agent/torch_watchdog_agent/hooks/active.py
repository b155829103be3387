"""Which rank this process is, for the hooks; made at the first sign of a training, gone in forked children.

Also the one guard around every hook body: a failure of ours turns that hook off and says so once; only what stops a rank on purpose passes.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from torch_watchdog_agent.config import PID_MARK, AgentConfig
from torch_watchdog_agent.errors import BadBatchError, of_a_lost_device, of_a_signal, text_of
from torch_watchdog_agent.identity import Identity
from torch_watchdog_agent.rank import Rank
from torch_watchdog_agent.rescue.ending import Ending, hear_ends_at_once, hear_exits
from torch_watchdog_agent.rescue.saving import needed
from torch_watchdog_agent.rescue.words import is_interrupt
from torch_watchdog_agent.rescue.workers import unheard_children
from torch_watchdog_agent.say import Voice
from torch_watchdog_agent.turned_off import turned_off

__all__ = [
    "arm",
    "collective_failed",
    "disown",
    "failing_rank",
    "guarded",
    "is_training_thread",
    "joined_others",
    "launch_config",
    "made_rank",
    "rank",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MAIN_THREAD = threading.main_thread().ident
_config: AgentConfig | None = None
_rank: Rank | None = None
_ending: Ending | None = None
_noted: BaseException | None = None
_say = Voice()


def arm(config: AgentConfig) -> None:
    """From now on the first sign of a training makes this process a rank."""
    global _config
    _config = config
    os.register_at_fork(after_in_child=_disarm_in_child)
    if config.replay is not None:
        _replay_where_it_can()


def _replay_where_it_can() -> None:
    """A replay is for the CPU, whatever the script was written for, unless a GPU was asked for and is there."""
    import torch

    from torch_watchdog_agent.hooks.on_cpu import instead_of_gpus

    if torch.cuda.is_available():
        return
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        _say("no GPU can be used here: what follows runs on the CPU")
    instead_of_gpus()


def guarded(name: str, *, at_end: bool = False) -> Callable[[Callable[_P, _R]], Callable[_P, _R | None]]:
    """Wraps the body of a hook: None where it is off. Never put the user's own call inside.

    What a handler of a signal raises in the middle of it is the script's (torch's own says so that a loader's worker has died), and passes; not `at_end`,
    when an error is on its way already, which must come first. A GPU that is lost says so to the training itself.
    """

    def wrap(body: Callable[_P, _R]) -> Callable[_P, _R | None]:
        off = False

        def guarded_body(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
            nonlocal off
            if off:
                return None
            try:
                return body(*args, **kwargs)
            except (BadBatchError, SystemExit):
                raise
            except Exception as error:  # fail open
                if of_a_signal(error):
                    if at_end:
                        return None
                    raise
                off = True
                turned_off(name)
                if not of_a_lost_device(error):
                    _say(f"the {name} hook turned itself off ({type(error).__name__}: {error}); training goes on")
                return None

        return guarded_body

    return wrap


def rank() -> Rank | None:
    """The rank of this process on its main thread, made when first asked for; None elsewhere and after a failure. Never raises."""
    if _config is None or get_ident() != _MAIN_THREAD:
        return None
    return _begin() if _rank is None else _rank


@guarded("rank")
def _begin() -> Rank | None:
    global _config, _rank
    if _config is None:
        return None
    config, _config = _config, None  # a failure below must not be met again at every batch
    from torch_watchdog_agent import keeper

    os.environ[PID_MARK] = str(os.getpid())
    _rank = Rank(config, Identity.from_env(os.environ), leave=keeper.announce_leave)
    _config = config
    atexit.register(_finish, os.getpid())
    sys.excepthook = _noting(sys.excepthook)
    _keep_evidence(_rank)
    _hear_exits(_rank)
    return _rank


@guarded("exception")
def joined_others() -> None:
    """This process is one of a job's ranks, whatever else is to come: an error that ends it before its first batch is told as any other."""
    if _config is not None and _rank is None:
        sys.excepthook = _noting(sys.excepthook)
    if _rank is not None:
        _rank.rescuer.lost_peer.went_on()  # its script has made a new group in the place of the one that broke


@guarded("lost peer", at_end=True)
def collective_failed(error: BaseException) -> None:
    """What couples ranks has raised it; the script may catch it."""
    if _rank is not None and is_training_thread():
        _rank.rescuer.lost_peer.met(error)


def failing_rank(error: BaseException) -> Rank | None:
    """The rank of this process, made now where an error ends it before its first batch."""
    return _rank if _rank is not None or isinstance(error, SystemExit) or is_interrupt(error) else rank()


def made_rank() -> Rank | None:
    """The rank of this process on any thread, once the main thread has made it."""
    return _rank


def launch_config() -> AgentConfig | None:
    """What the launch has told this process; None where it is not to be a rank. Makes none."""
    return _config


def disown(why: str, instead: str, *, even_unmade: bool) -> bool:
    """This process turned out to be one of several ranks that nobody told us of: from now on it is none of ours, which is said. False where it is none yet."""
    global _config, _rank
    was, told = _rank, _config
    if told is None or (was is None and not even_unmade):
        return False
    _config, _rank = None, None
    _say(f"{why}: they train on without the watchdog ({instead})")
    if was is not None:
        was.hang_up()
    return True


def is_training_thread() -> bool:
    return get_ident() == _MAIN_THREAD


def _disarm_in_child() -> None:
    global _config, _rank
    parents, _config, _rank = _rank, None, None
    if parents is not None:
        parents.forget_in_child()


@guarded("exit", at_end=True)
def _finish(pid: int) -> None:
    if _rank is not None and os.getpid() == pid:
        _tell_exit(_rank)
        try:
            _rank.finish()
        finally:
            _let_go()


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _noting(theirs: _Hook) -> _Hook:
    """An uncaught exception is noted in the ring before the user's own hook sees it."""

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> object:
        is_known = _is_called_by_the_program() or _note_exception(kind, error)
        try:
            return theirs(kind, error, traceback)
        finally:
            if not is_known:
                _await_word(error)

    return hook


def _is_called_by_the_program() -> bool:
    """To have an error printed that it has caught, and then it goes on. Of one that nothing caught the stack is unwound: only hooks are on it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in ("<module>", "_run_module_as_main")


@guarded("exception", at_end=True)
def _note_exception(kind: type[BaseException], error: BaseException) -> bool:
    """True where that was done already: a script's own hook may call the one that was there before it."""
    global _noted
    if error is _noted:
        return True
    _noted, here = error, failing_rank(error)
    if here is not None:
        if _ending is not None:
            _ending.forget()
        first_line = text_of(error).partition("\n")[0]
        here.history.note(f"{kind.__name__}: {first_line}", level=2)
        here.interrupted = is_interrupt(error)
        if here.interrupted:
            here.rescuer.lost_peer.went_on()  # who interrupts waits for nothing
        else:
            with unheard_children():
                here.failed(error)
    return False


@guarded("exception", at_end=True)
def _await_word(error: BaseException) -> None:
    """The state that this rank holds may be needed: it ends once that was asked."""
    if _rank is not None and not is_interrupt(error):
        _rank.rescuer.await_word()


@guarded("exits", at_end=True)
def _hear_exits(rank: Rank) -> None:
    global _ending
    _ending = Ending()
    rank.rescuer.lingering.status = _ending.status
    hear_exits(_exit_asked)
    hear_ends_at_once(_about_to_end)


@guarded("exits", at_end=True)
def _about_to_end() -> None:
    """By `os._exit`, in the rank itself: in a process that it has forked there is no rank."""
    if _rank is not None and is_training_thread():
        _rank.rescuer.await_word()


@guarded("exits", at_end=True)
def _exit_asked(status: object) -> Callable[[], None] | None:
    ending = _ending
    here = _rank
    if here is None or ending is None or not is_training_thread():
        return None
    error = ending.exit_asked(status, batches=here.loop.batches_seen, holding=lambda: needed(here))
    if error is None:
        return None
    here.rescuer.noticed(error)
    return lambda: ending.gone(error)


@guarded("exits", at_end=True)
def _tell_exit(rank: Rank) -> None:
    exit_taken = _ending.taken(batches=rank.loop.batches_seen) if _ending is not None else None
    if exit_taken is not None:
        rank.exits(*exit_taken)


def _let_go() -> None:
    if _ending is not None:
        _ending.let_go()


@guarded("evidence", at_end=True)
def _keep_evidence(rank: Rank) -> None:
    from torch_watchdog_agent.rescue import evidence

    who = rank.identity
    evidence.keep_stacks(Path(rank.config.run_dir), who.rank)
    evidence.hear_threads(lambda name, error: _note_of_thread(name, error))


@guarded("evidence", at_end=True)
def _note_of_thread(name: str, error: BaseException) -> None:
    if _rank is not None:
        _rank.history.note(f"thread {name}: {type(error).__name__}: {error}", level=1)
