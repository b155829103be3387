"""The batches that a failure may come from, and the bundle made of one.

Owns how many are held: the last one; for a GPU, whose failures are heard when Python is already ahead, a few more. Batches that lie on a GPU are not held:
they would cost its memory, and after an assertion nothing is read from there.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_watchdog_agent.rank import Rank

__all__ = ["RecentBatches"]

KEPT = 4


class RecentBatches:
    """One rank's, by the loop's step."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._kept: deque[tuple[int, Any]] = deque(maxlen=KEPT)
        self._on_host: bool | None = None  # asked once: a loop's batches are alike

    def keep(self, batch: Any, *, several: bool) -> None:
        """The batch that is about to be used. `several`: Python runs ahead of what uses it."""
        if not several:
            self._kept.clear()
        if self._on_host is None:
            self._on_host = _is_on_host(batch)
        if self._on_host:
            self._kept.append((self._rank.loop.step, batch))

    def of(self, step: int) -> Any:
        """The last batch of the step, or of the one before where that step has none yet; None where it is not held any more."""
        return next((batch for at, batch in reversed(self._kept) if at <= step), None)

    def write_bundle(self, step: int) -> str:
        """What a person may replay, by its path in the run directory; "" where it was not kept. Whatever is in its way is said: the failure itself must
        be told."""
        from torch_watchdog_agent.rescue import bundle

        who, batch = self._rank.identity, self.of(step)
        path = f"{bundle.FOLDER}/{who.attempt}-{who.rank}.safetensors"
        try:
            if batch is not None and self._rank.config.bundles and bundle.write(Path(self._rank.config.run_dir) / path, batch):
                return path
        except Exception as error:  # noqa: BLE001  a full disk, say
            self._rank.say(f"the batch of this step could not be kept ({type(error).__name__}: {error})")
        return ""

    def write_held(self, step: int) -> str:
        """The batch of a step that goes on, under a name that no later failure takes; "" where it was not kept. Raises OSError."""
        from torch_watchdog_agent.rescue import bundle

        who, (at, batch) = self._rank.identity, self._kept[-1] if self._kept else (-1, None)
        folder, name = Path(self._rank.config.run_dir) / bundle.FOLDER, bundle.held_name(attempt=who.attempt, rank=who.rank, step=step)
        if at != step or not self._rank.config.bundles or not bundle.write(folder / name, batch, max_bytes=bundle.MAX_HELD_BYTES):
            return ""
        bundle.keep_newest(folder, attempt=who.attempt, rank=who.rank)
        return f"{bundle.FOLDER}/{name}"


def _is_on_host(batch: Any) -> bool:
    from torch_watchdog_agent.contract.flatten import leaves_of

    return not any(leaf.is_cuda for leaf in leaves_of(batch).values())
