"""A rescue's half on a GPU: the gate around every update, and the state behind it.

Owns when the gate is made, closed and opened again, and that no collective is broken before the state is on disk: what is queued behind one would run
with garbage. Where there is no gate nothing is known of the device, and every answer is a no.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch_watchdog_agent.errors import of_a_signal
from torch_watchdog_agent.rescue.ahead import Ahead
from torch_watchdog_agent.rescue.saving import save, unsaved

if TYPE_CHECKING:
    from torch_watchdog_agent.checkpoint.subjects import TrainingState
    from torch_watchdog_agent.rank import Rank
    from torch_watchdog_agent.rescue.device import DeviceGate
    from torch_watchdog_proto.messages import Saved
    from torch_watchdog_proto.rescue_words import Rescue

__all__ = ["OnGpu"]

STEPS_KEPT = 64  # a launch queue holds fewer windows
NOT_KEPT = -1  # windows back, of a window of which nothing is held any more
BUSY_S = 1.0  # a device that does nothing but wait for another rank is busy for longer
PROBE_S = 3.0  # for the first word of the parameters
GLANCE_S = 1.0  # the same, with BUSY_S within the time in which a look is to be answered (ANSWER_S in job/hangs.py)


class OnGpu:
    """One rank's. `closed`: how far Python was ahead when the gate was closed, None before."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._gate: DeviceGate | None = None
        self._asked = False
        self._steps: deque[tuple[int, int]] = deque(maxlen=STEPS_KEPT)  # updates before a window, and the loop's number for it
        self.closed: Ahead | None = None

    # The training thread

    def opened(self) -> None:
        """A window's first batch is about to be used."""
        if self._gate is not None:
            updates = self._rank.loop.updates_applied
            self._steps.append((updates, self._rank.loop.step))
            self._launch(self._gate.opened, updates + 1)

    def before_update(self, optimizer: Any, *, first: bool) -> None:
        """`first`: of its window. The first update of all makes the gate, where the parameters are on a GPU."""
        if not self._asked:
            self._asked = True
            self._gate = self._made_for(optimizer) if self._rank.config.device_gate else None
        if self._gate is not None and first:
            self._launch(self._gate.before_update, self._rank.loop.updates_applied + 1)

    def after_update(self) -> None:
        """A window's update has been launched."""
        if self._gate is not None:
            self._launch(self._gate.after_update, self._rank.loop.updates_applied)

    def _launch(self, launch: Callable[[int], None], number: int) -> None:
        try:
            launch(number)
        except RuntimeError as error:
            self._rank.say(f"the gate on the device is given up: {error}")
            self._gate = None

    def _made_for(self, optimizer: Any) -> DeviceGate | None:
        from torch_watchdog_agent.rescue import device

        groups = getattr(optimizer, "param_groups", ())
        first = next((param for group in groups for param in group["params"]), None)
        try:
            return device.of_this_process(first, self._rank.history.device_words)
        except Exception as error:  # whatever the driver lacks: the training goes on, and a rescue says no
            if of_a_signal(error):
                raise
            self._rank.say(f"no gate on the device ({error}): if another rank fails, this one cannot tell what its updates have become")
            return None

    # Any thread

    @property
    def is_gated(self) -> bool:
        return self._gate is not None

    def step_of_failure(self) -> int | None:
        """The loop's step that the device was in, by the update that it did last (a dying device may count one more); None where that is not known. No CUDA
        call: the context may be gone."""
        if self._gate is None:
            return None
        done = self._gate.done
        return next((step for updates, step in reversed(self._steps) if updates <= done), None)

    def is_busy(self) -> bool:
        """Whether the device waits: the next read of a result, `loss.item()` say, waits for the others as well."""
        return self._gate is not None and self._gate.is_busy(within_s=BUSY_S)

    # The rescue's own thread

    def close(self) -> None:
        """No update that has not passed the gate on the device passes it any more."""
        if self._gate is not None:
            self._gate.close()

    def look(self, *, fetches: bool, within_s: float) -> Ahead:
        """How far the device is, once the update that had passed the gate has come to its end. `fetches`: the training thread is at a fetch."""
        self.closed = Ahead.behind(self._gate, self._rank.loop, self._rank.window, fetches=fetches, within_s=within_s)
        return self.closed

    def answers(self, state: TrainingState, *, within_s: float) -> bool:
        """Whether another thread of this process can still read the parameters. Of a sharded one its own shard: else the question were a collective."""
        parameter = state.optimizers[0].param_groups[0]["params"][0] if state.optimizers else None
        if self._gate is None or parameter is None:
            return False
        return self._gate.answers(parameter.to_local() if hasattr(parameter, "to_local") else parameter, within_s=within_s)

    def save(self, order: Rescue, *, has_begun: Callable[[], bool], part: int | None, within_s: float) -> Saved:
        """The state, or this rank's `part` of it, behind the closed gate, by plain copies to the host; buffers as they were copied at the start of a step
        that was launched. `has_begun`: whether the training thread has taken a batch that no update has used."""
        rank, gate, ahead = self._rank, self._gate, self.closed
        if gate is None or ahead is None:
            raise RuntimeError("a save on a GPU needs its gate closed")
        ahead.mend(rank.subjects.now())
        read = rank.window.with_kept_buffers(gate.to_host) if ahead.windows_back else gate.to_host

        def windows_back() -> int:
            begun = has_begun()
            return (rank.window.begun_after(ahead.updates) or NOT_KEPT) if ahead.windows_back else int(begun)

        try:
            return gate.read(
                lambda: save(rank, order, updates=ahead.updates, windows_back=windows_back, read=read, part=part), within_s=within_s
            )
        except TimeoutError as error:
            return unsaved(rank, order, ahead.updates, str(error))

    def free(self) -> None:
        """The gate opens, for an abort under a closed one blocks, and every collective is broken."""
        from torch_watchdog_agent.rescue import device

        if self._gate is not None:
            self._gate.open()
        device.abort_groups(self._rank.say)
