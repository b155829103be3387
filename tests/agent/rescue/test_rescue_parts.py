"""The rank's parts of a rescue, each by itself: an exception's words, freed sockets, whose state is whole, how far a device is behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import select
import signal
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_watchdog_agent.checkpoint.subjects import Subjects, TrainingState
from torch_watchdog_agent.checkpoint.window import WindowState
from torch_watchdog_agent.hooks import active
from torch_watchdog_agent.loop import Loop
from torch_watchdog_agent.rescue import replica, sockets, workers
from torch_watchdog_agent.rescue.ahead import Ahead
from torch_watchdog_agent.rescue.half_step import Place
from torch_watchdog_agent.rescue.looking import handled, is_waiting, looked_at
from torch_watchdog_agent.rescue.replica import holdings
from torch_watchdog_agent.rescue.words import is_interrupt, words_of
from torch_watchdog_agent.turned_off import is_off


def raised(work: object) -> BaseException:
    try:
        work()  # type: ignore[operator]
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def cleanup_fails_too() -> None:
    try:
        raise ValueError("no image")
    finally:
        raise RuntimeError("Connection closed by peer")


def wrapped() -> None:
    try:
        raise RuntimeError("Connection closed by peer")
    except RuntimeError as error:
        raise TypeError("the step failed") from error


def while_another_was_handled() -> None:
    try:
        iter(()).__next__()
    except StopIteration:
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("work", "text", "count"),
    [
        (cleanup_fails_too, "ValueError: no image", 2),
        (wrapped, "RuntimeError: Connection closed by peer", 2),
        (while_another_was_handled, "RuntimeError: Connection closed by peer", 1),
    ],
)
def test_the_first_of_a_chain_is_the_failure(work: object, text: str, count: int) -> None:
    words = words_of(raised(work))
    assert (words.text, len(words.chain)) == (text, count)
    assert __file__ in words.where


class ClientOSError(OSError):
    pass


def of_a_logger() -> None:
    raise ClientOSError(104, "Connection reset by peer")


def of_a_logger_and_wrapped() -> None:
    try:
        of_a_logger()
    except OSError as error:
        raise RuntimeError("could not read shard 7") from error


def of_a_logger_in_words_of_torchs() -> None:
    raise RuntimeError("Socket Timeout")


def of_a_data_set() -> None:
    class Rows(torch.utils.data.Dataset[int]):
        def __getitem__(self, index: int) -> int:
            raise ClientOSError(104, "Connection reset by peer")

        def __len__(self) -> int:
            return 1

    next(iter(torch.utils.data.DataLoader(Rows())))


def of_a_store() -> None:
    torch.distributed.TCPStore("127.0.0.1", 1, None, False, timedelta(milliseconds=20))


def of_a_store_and_wrapped() -> None:
    try:
        of_a_store()
    except RuntimeError as error:
        raise ValueError("the training failed") from error


def of_a_store_and_raised_again() -> None:
    try:
        of_a_store()
    except RuntimeError as error:
        kept = error
    raise kept


class Cache:
    def __init__(self) -> None:
        self.store = own_server()

    def read(self) -> None:
        self.store.get("never")


def own_server() -> torch.distributed.TCPStore:
    return torch.distributed.TCPStore("127.0.0.1", 0, None, True, timedelta(milliseconds=20), False)


def of_a_store_that_has_no_answer() -> None:
    Cache().read()


def of_a_store_with_a_prefix() -> None:
    torch.distributed.PrefixStore("mine", own_server()).wait(["never"], timedelta(milliseconds=20))


def of_a_store_whose_server_goes_away() -> None:
    server = own_server()
    client = torch.distributed.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=2))
    del server
    client.set("a", "b")
    client.get("a")


def of_a_store_by_torchs_rendezvous() -> None:
    next(iter(torch.distributed.rendezvous("tcp://127.0.0.1:1", rank=1, world_size=2, timeout=timedelta(milliseconds=20))))


def of_native_code() -> None:
    """In the script's own frame, as that of a work.wait()."""
    torch.ones(2) @ torch.ones(3)


@pytest.mark.parametrize(
    ("work", "by_itself"),
    [
        (of_a_logger, True),
        (of_a_logger_and_wrapped, True),
        (of_a_logger_in_words_of_torchs, True),
        (of_a_data_set, True),
        (of_a_store, True),
        (of_a_store_and_wrapped, True),
        (of_a_store_and_raised_again, True),
        (of_a_store_that_has_no_answer, True),
        (of_a_store_with_a_prefix, True),
        (of_a_store_whose_server_goes_away, True),
        (of_a_store_by_torchs_rendezvous, True),
        (of_native_code, False),
    ],
)
def test_what_torch_has_raised_is_told_from_what_a_script_or_its_data_raise(work: object, by_itself: bool) -> None:
    assert words_of(raised(work)).by_itself is by_itself


@pytest.fixture
def jobs_store() -> Iterator[torch.distributed.TCPStore]:
    store = own_server()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    torch.distributed.destroy_process_group()


def waits(store: torch.distributed.Store) -> None:
    store.wait(["never"], timedelta(milliseconds=20))


def test_the_store_of_the_jobs_process_groups_is_no_ranks_own(
    jobs_store: torch.distributed.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = SimpleNamespace(prefixed=torch.distributed.PrefixStore("mine", jobs_store))
    client = torch.distributed.TCPStore("127.0.0.1", jobs_store.port, None, False, timedelta(seconds=2))
    for work in (
        lambda: waits(jobs_store),
        lambda: waits(client),
        lambda: holder.prefixed.wait(["never"], timedelta(milliseconds=20)),
        lambda: torch.distributed.distributed_c10d._get_default_store().wait(["never"], timedelta(milliseconds=20)),
        lambda: torch.distributed.barrier(group=object()),  # type: ignore[arg-type]
    ):
        assert not words_of(raised(work)).by_itself
    assert words_of(raised(lambda: waits(own_server()))).by_itself
    monkeypatch.setenv("MASTER_PORT", "1")
    assert not words_of(raised(of_a_store)).by_itself


def in_a_worker() -> None:
    from torch._utils import ExceptionWrapper

    try:
        raise ValueError("sample 7 is no image\nfile: shard-3.tar\n  offset: 12")
    except ValueError:
        handed_on = ExceptionWrapper(where="in DataLoader worker process 0")
    handed_on.reraise()


def by_the_script() -> None:
    raise KeyboardInterrupt


def by_the_script_from_an_error() -> None:
    try:
        raise ValueError("no image")
    except ValueError as error:
        raise KeyboardInterrupt("enough") from error


def by_a_signal() -> None:
    while True:
        signal.raise_signal(signal.SIGINT)


def by_a_signal_and_handed_on() -> None:
    try:
        by_a_signal()
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped") from None


@pytest.mark.parametrize(
    ("work", "interrupts"),
    [
        (by_the_script, False),
        (by_the_script_from_an_error, False),
        (by_a_signal, True),
        (by_a_signal_and_handed_on, True),
        (wrapped, False),
    ],
)
def test_an_interrupt_that_nobody_sent_is_the_scripts_own(work: object, interrupts: bool) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        error = raised(work)
        assert is_interrupt(error) is interrupts
        if work is by_the_script:
            assert words_of(error).text == "a KeyboardInterrupt that the script itself raised"
            signal.signal(signal.SIGUSR1, lambda *_: None)  # which may have told the script to raise it
            assert is_interrupt(error) and words_of(error).text == "KeyboardInterrupt"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("steps", "why"), [(0, "no update had been applied since the checkpoint that it resumed"), (1, "")], ids=["first step", "second step"]
)
def test_a_rank_that_fails_in_its_first_step_after_a_checkpoint_has_nothing_newer(steps: int, why: str) -> None:
    """In a later attempt of the launcher's, too, which was given no --resume."""
    loop = Loop()
    loop.resumed(12)
    for _ in range(steps):
        loop.handed_over()
        loop.at_gate(1)
        loop.gate_done(applied=True)
    loop.handed_over()
    window = SimpleNamespace(changed_in_step=lambda: "", why_odd=lambda windows_back: "")
    rank = SimpleNamespace(loop=loop, window=window, saver=SimpleNamespace(busy=False), config=SimpleNamespace(scan=False))
    place = Place(rank=rank, steps=SimpleNamespace(), phase="window", standing=False)  # type: ignore[arg-type]
    assert place.why_not(SimpleNamespace(optimizers=())) == why
    rank.config.scan = True
    assert "a scan" in place.why_not(SimpleNamespace(optimizers=()))


def test_a_script_that_has_let_go_of_what_it_trains_is_said_to_have_changed_nothing() -> None:
    model, subjects, loop = torch.nn.Linear(2, 1), Subjects(), Loop()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    subjects.optimizer_seen(optimizer)
    window = WindowState(subjects, say=print)
    window.opened()
    loop.updates_applied = 3
    del model, optimizer
    gc.collect()
    rank = SimpleNamespace(config=SimpleNamespace(scan=False), saver=SimpleNamespace(busy=False), window=window, loop=loop)
    place = Place(rank=rank, steps=SimpleNamespace(), phase="window", standing=False)  # type: ignore[arg-type]
    assert place.why_not(subjects.now()) == "its script had let go of its model and optimizer before it was asked for them"


def test_an_exception_that_cannot_say_what_it_is_is_told_by_its_name() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert words_of(MuteError()).text == "MuteError"


def test_an_exception_of_a_loaders_worker_is_told_by_its_own_words_and_line() -> None:
    words = words_of(raised(in_a_worker))
    assert words.text == "ValueError: sample 7 is no image (in DataLoader worker process 0)"
    assert words.where.startswith(f"{__file__}:")


class Ends(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 3:
            os._exit(3)
        return index


def test_a_worker_that_has_ended_is_told_whatever_the_rank_meets_of_it() -> None:
    list(torch.utils.data.DataLoader([1], num_workers=1))  # once a process, torch hears of its workers from then on
    with workers.unheard_children():
        loader = iter(torch.utils.data.DataLoader(Ends(), num_workers=1, prefetch_factor=4))
        worker = loader._workers[0]  # type: ignore[attr-defined]
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert workers.dead_workers(KeyError("x")) == f"DataLoader worker (pid {worker.pid}) exited unexpectedly with exit code 3"
    del loader
    gc.collect()
    assert workers.dead_workers(KeyError("x")) == ""
    assert (
        workers.dead_workers(RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"))
        == "DataLoader worker (pid(s) 7) exited unexpectedly"
    )


def test_what_a_signals_handler_raises_is_the_scripts_and_turns_no_hook_off() -> None:
    """torch's own handler says so that a worker has died, in the middle of whatever the rank does."""

    def handler(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed")

    @active.guarded("test of signals")
    def body() -> None:
        signal.raise_signal(signal.SIGUSR2)

    @active.guarded("test of an end", at_end=True)
    def at_end() -> None:
        signal.raise_signal(signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with pytest.raises(RuntimeError, match="is killed by signal"):
            body()
        at_end()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not is_off("test of signals") and not is_off("test of an end")


def test_only_the_connections_of_a_group_are_shut_down() -> None:
    """gloo polls its connections together with the socket that peers connect to; what a user opens while a group is made is not among them."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        loops = [opened.enter_context(select.epoll()) for _ in range(2)]
        with sockets.made_here():
            groups, users, polled = (opened.enter_context(socket.create_connection(server.getsockname())) for _ in range(3))
            loops[0].register(listener)
            loops[0].register(groups)
            loops[1].register(polled)  # as a client's own loop has it
        far = [opened.enter_context(server.accept()[0]) for _ in range(3)]
        waiting = threading.Thread(target=groups.recv, args=(1,))
        waiting.start()
        assert sockets.shut_down_all() == 1
        waiting.join(10)
        assert not waiting.is_alive()
        for theirs, mine in ((users, far[1]), (polled, far[2])):
            mine.sendall(b"x")
            assert theirs.recv(1) == b"x"


def test_parameters_that_are_in_no_replica_are_a_part() -> None:
    model = torch.nn.Linear(2, 2)
    state = TrainingState(models=(model,), optimizers=(torch.optim.SGD(model.parameters(), lr=1),), schedulers=(), scalers=())
    holds, why = holdings(state, world_size=2, updates=1)
    assert holds == "part" and "DistributedDataParallel" in why


def test_a_process_that_trains_alone_holds_all_unless_it_has_joined_others() -> None:
    model = torch.nn.Linear(2, 2)
    state = TrainingState(models=(model,), optimizers=(torch.optim.SGD(model.parameters(), lr=1),), schedulers=(), scalers=())
    assert holdings(state, world_size=1, updates=1) == ("all", "")
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        assert holdings(state, world_size=1, updates=1)[0] == "part"
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("updates", "holds"), [(3, "all"), (4, "part")])
def test_a_model_whose_wrapper_was_taken_off_is_a_copy_of_all_ranks_until_its_next_update(updates: int, holds: str) -> None:
    """Lightning takes it off while an exception unwinds."""
    model = torch.nn.Linear(2, 2)
    wrapper = torch.nn.Module()
    wrapper.__dict__.update(module=model, process_group=SimpleNamespace(size=lambda: 2))
    replica.wrapped(wrapper, lambda: 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    state = TrainingState(models=(model,), optimizers=(optimizer,), schedulers=(), scalers=())
    assert holdings(state, world_size=2, updates=4)[0] == "all"
    assert holdings(state, world_size=4, updates=4)[0] == "part"
    del wrapper
    assert holdings(state, world_size=2, updates=updates)[0] == holds


def test_a_thread_in_its_own_code_does_not_wait() -> None:
    waits, stack, where = looked_at()
    assert not waits
    assert "test_rescue_parts" in stack
    assert where.partition(":")[0] == __file__


TORCH, OURS, OWN = "/site-packages/torch", "/site-packages/torch_watchdog_agent", "/home/me/train.py"


@pytest.mark.parametrize(
    ("files", "waits"),
    [
        ([OWN, f"{TORCH}/_tensor.py", f"{OURS}/hooks/loss.py", f"{TORCH}/autograd/__init__.py", f"{TORCH}/autograd/graph.py"], True),
        ([OWN, f"{OURS}/hooks/collectives.py", f"{TORCH}/distributed/c10d_logger.py", f"{TORCH}/distributed/distributed_c10d.py"], True),
        ([OWN, f"{TORCH}/distributed/distributed_c10d.py", f"{OURS}/hooks/collectives.py"], True),  # a monitored_barrier
        ([OWN, f"{OURS}/checkpoint/peers.py", f"{TORCH}/distributed/distributed_c10d.py", f"{OURS}/hooks/collectives.py"], False),
        ([OWN, f"{TORCH}/nn/modules/module.py", f"{TORCH}/nn/parallel/distributed.py"], True),
        ([OWN, f"{OURS}/hooks/passes.py", f"{OURS}/rank.py", f"{OURS}/clearance.py"], True),
        ([OWN, f"{TORCH}/autograd/graph.py", f"{TORCH}/autograd/function.py", OWN, OWN, OWN], False),  # a backward of the script's own
        ([OWN, f"{TORCH}/_tensor.py", f"{OURS}/hooks/loss.py"], False),
        (
            [OWN, f"{OURS}/checkpoint/peers.py", f"{TORCH}/distributed/distributed_c10d.py"],
            False,
        ),  # a save of all ranks has its own patience
        ([OWN, f"{TORCH}/distributed/checkpoint/state_dict_saver.py", f"{TORCH}/distributed/distributed_c10d.py"], False),
        ([OWN, f"{TORCH}/utils/data/dataloader.py"], False),
        ([], False),
    ],
)
def test_a_rank_waits_in_a_collective_or_in_a_backward_that_has_some(files: list[str], waits: bool) -> None:
    assert is_waiting(files) is waits


# How far a device is behind Python


class FakeGate:
    missed = False

    def __init__(self, done: int, *, between: bool = True) -> None:
        self.done, self.is_between_updates, self.opened_last = done, between, done + 1


def loop_at(*, updates: int, is_open: bool) -> Loop:
    loop = Loop()
    for number in range(updates + is_open):
        loop.handed_over()
        if number < updates:
            loop.at_gate(1)
            loop.gate_done(applied=True)
    return loop


def ahead(*, done: int, updates: int, is_open: bool, between: bool = True, fetches: bool = False, vetoed: int | None = None) -> Ahead:
    window = WindowState(Subjects(), say=print)
    for number in range(updates + is_open):
        for _ in range(1 + (number == vetoed)):
            window.opened(updates=number)
    loop: Any = loop_at(updates=updates, is_open=is_open)
    gate: Any = FakeGate(done, between=between)
    return Ahead.behind(gate, loop, window, fetches=fetches, within_s=0.01)


@pytest.mark.parametrize(
    ("done", "updates", "is_open", "fetches", "windows_back"),
    [
        (30, 30, True, False, 1),  # a batch of step 30 is at hand, its gate not passed
        (30, 30, True, True, 0),  # the same, and the loop has not got it yet: nothing of its step is launched
        (30, 31, False, False, 1),  # the loop waits for its loss after the update, which the device has not done
        (31, 31, False, False, 0),  # everything is done, the next batch is being fetched
        (31, 31, False, True, 0),
        (30, 32, False, False, 2),
        (30, 32, True, False, 3),
        (30, 32, True, True, 3),
    ],
)
def test_how_many_windows_were_begun_after_the_last_update(
    done: int, updates: int, is_open: bool, fetches: bool, windows_back: int
) -> None:
    found = ahead(done=done, updates=updates, is_open=is_open, fetches=fetches)
    assert (found.updates, found.launched, found.windows_back, found.problem) == (done, updates, windows_back, "")


@pytest.mark.parametrize(("vetoed", "windows_back"), [(30, 2), (31, 3), (None, 2)])
def test_a_window_that_was_left_out_is_counted_with_those_behind_it(vetoed: int | None, windows_back: int) -> None:
    assert ahead(done=30, updates=32, is_open=False, vetoed=vetoed).windows_back == windows_back


def test_an_update_under_way_on_the_device_is_a_half_step() -> None:
    assert "half step" in ahead(done=30, updates=31, is_open=False, between=False).problem


def state_of(optimizer: torch.optim.Optimizer, *, schedulers: tuple[object, ...] = ()) -> TrainingState:
    return TrainingState(models=(), optimizers=(optimizer,), schedulers=schedulers, scalers=())


def adam_after(updates: int) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    for _ in range(updates):
        parameter.grad = torch.ones(2)
        optimizer.step()
    return optimizer


def test_step_counters_outside_the_device_are_set_back() -> None:
    optimizer = adam_after(3)
    found = Ahead(updates=1, launched=3, windows_back=2)
    found.mend(state_of(optimizer))
    assert [float(entries["step"]) for entries in optimizer.state.values()] == [1.0]


@pytest.mark.parametrize(
    ("launched", "windows_back", "opened", "why"),
    [
        (1, 1, 2, ""),
        (3, 2, 2, ""),
        (1, 0, 1, ""),  # nothing to put back
        (3, 2, 1, "had not come to the start"),  # what was copied at the window's start is not in its copy yet
        (18, 0, 2, "17 updates ahead of its device, and what that step began with is not kept so long"),
    ],
)
def test_what_the_step_began_with_must_be_on_hand(launched: int, windows_back: int, opened: int, why: str) -> None:
    window = SimpleNamespace(why_no_buffers=lambda updates: "")
    found = Ahead(updates=1, launched=launched, windows_back=windows_back, opened=opened)
    refused = found.why_not(state_of(SimpleNamespace(state={}, param_groups=[])), window)  # type: ignore[arg-type]
    assert (why in refused) if why else not refused


def test_buffers_of_which_no_copy_is_kept_are_a_reason_to_refuse() -> None:
    window = SimpleNamespace(why_no_buffers=lambda updates: f"no copy of BatchNorm's after {updates}")
    state = state_of(SimpleNamespace(state={}, param_groups=[]))
    assert "BatchNorm's after 1" in Ahead(updates=1, launched=1, windows_back=1, opened=2).why_not(state, window)  # type: ignore[arg-type]
    assert not Ahead(updates=1, launched=1, windows_back=0, opened=1).why_not(state, window)  # type: ignore[arg-type]


def test_what_the_training_thread_is_in_an_except_or_a_finally_of_is_read_by_another() -> None:
    def read() -> str:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(handled()))
        thread.start()
        thread.join()
        return found[0]

    assert read() == ""
    try:
        raise ValueError("no such row")
    except ValueError:
        assert re.fullmatch(r"ValueError: no such row at .*test_rescue_parts\.py:\d+", read())
    assert read() == ""
