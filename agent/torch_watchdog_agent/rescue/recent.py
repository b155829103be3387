"""The batches that a failure may come from, and the bundle made of one.

Owns how many are held: the last one; for a GPU, whose failures are heard when Python is already ahead, a few more. Batches that lie on a GPU are not held:
they would cost its memory, and after an assertion nothing is read from there.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_watchdog_agent.errors import text_of
from torch_watchdog_agent.rescue.words import MAX_CHAIN

if TYPE_CHECKING:
    from torch_watchdog_agent.rank import Rank

__all__ = ["RecentBatches"]

KEPT = 4
_SAMPLES_SHOWN = 8
_MAKES_A_BATCH = "torch/utils/data/_utils/fetch.py"


class RecentBatches:
    """One rank's, by the loop's step."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._kept: deque[tuple[int, Any]] = deque(maxlen=KEPT)
        self._on_host: bool | None = None  # asked once: a loop's batches are alike
        self._is_in_hand = True
        self._not_made: tuple[int, str] | None = (
            None  # id of the exception that came instead of a batch, and of which samples that was to be
        )

    def keep(self, batch: Any, *, several: bool) -> None:
        """The batch that is about to be used. `several`: Python runs ahead of what uses it."""
        self._is_in_hand, self._not_made = True, None
        if not several:
            self._kept.clear()
        if self._on_host is None:
            self._on_host = _is_on_host(batch)
        if self._on_host:
            self._kept.append((self._rank.loop.step, batch))

    def not_made(self, error: BaseException, indices: Sequence[int | None] | None) -> None:
        """`error` came instead of the next batch. `indices`: the samples of that, where they are known; a loader around torch's own says the same again."""
        self._is_in_hand = False
        if self._not_made is None or self._not_made[0] != id(error):
            self._not_made = id(error), _samples(error, indices)

    def pass_ended(self) -> None:
        """The loop gets no further batch. One that fetches ahead has its last one in hand still."""
        self._is_in_hand &= self._rank.loop.windows_ahead(None) > 0

    def fetch_behind(self, error: BaseException) -> str:
        """What was being made as the exception, or the one that it follows from, was raised; "" where that was no batch."""
        if self._not_made is None:
            return ""
        one: BaseException | None = error
        for _ in range(MAX_CHAIN):
            if one is None or id(one) == self._not_made[0]:
                break
            one = one.__cause__ or one.__context__
        return self._not_made[1] if one is not None and id(one) == self._not_made[0] else ""

    def of(self, step: int) -> Any:
        """The last batch of the step, or of the one before where that step has none yet; None where it is not held any more."""
        return next((batch for at, batch in reversed(self._kept) if at <= step), None)

    def write_bundle(self, step: int, *, of_device: bool = False) -> str:
        """What a person may replay, by its path in the run directory; "" where it was not kept, or no batch was in hand. `of_device`: what failed had
        been launched before. Whatever is in its way is said: the failure itself must be told."""
        if not (self._is_in_hand or of_device):
            return ""
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


def _samples(error: BaseException, indices: Sequence[int | None] | None) -> str:
    """`samples 305, 307, ... of the data set`; only where it was their batch that the data set or the collation failed in, here or in a worker."""
    frames = traceback.walk_tb(error.__traceback__)
    if _MAKES_A_BATCH not in text_of(error) and not any(frame.f_code.co_filename.endswith(_MAKES_A_BATCH) for frame, _ in frames):
        return "a batch"
    shown = [] if indices is None else indices[:_SAMPLES_SHOWN]
    if indices is None or not shown or None in shown:
        return "a batch"
    more = ", ..." if len(indices) > len(shown) else ""
    return f"the batch of {'sample' if len(indices) == 1 else 'samples'} {', '.join(map(str, shown))}{more} of the data set"


def _is_on_host(batch: Any) -> bool:
    from torch_watchdog_agent.contract.flatten import leaves_of

    return not any(leaf.is_cuda for leaf in leaves_of(batch).values())
