"""`watchdog scan` in a rank: after a few steps of real training the loop gets no batch any more; the rest of its data goes through the guard alone.

Owns what a rank leaves in `scan/` of the run directory: `rank-R.jsonl` (one line for each bad sample), `rank-R.json` (how far it is) and `rank-R.done` (which
indices of the data set were looked at, for a scan that goes on). No collective and no forward runs meanwhile, so ranks need not wait for each other.
"""

from __future__ import annotations

import gc
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch_watchdog_agent.errors import of_a_signal
from torch_watchdog_agent.hooks.indices import Source

if TYPE_CHECKING:
    from torch_watchdog_agent.config import AgentConfig
    from torch_watchdog_agent.contract.guard import Checked, Guard
    from torch_watchdog_agent.identity import Identity
    from torch_watchdog_agent.loop import Loop
    from torch_watchdog_proto.messages import Violation

__all__ = ["Scan", "bad_samples"]

LEARNING_STEPS = 4
MORE_STEPS = 12  # at most, where the guard is not done tracing
UNFED_STEPS = 20  # without a batch of a loader, which a script may have for the first time behind some steps of its own
UNFED_STEPS_BESIDE_A_LOADER = 200
WRITE_EVERY_S = 1.0
MAX_FAILURES = 1000  # batches that the loader could not make, one after the other
MAX_KEYS = 8

Taken = tuple[Any, Source, Any]  # a batch, where it comes from, what the guard says of it


class Scan:
    """One rank's part of a scan. `earlier`: the `scan` folder of an interrupted one."""

    def __init__(
        self, folder: Path, *, rank: int, world_size: int, earlier: Path | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stem, self._rank, self._world_size, self._clock = folder / f"rank-{rank}", rank, world_size, clock
        self._looked_at = _Bits()
        self._batches = self._samples = self._bad = self._unconfirmed = self._failures = 0
        self._total: int | None = None
        self._again = 0  # batches without indices that an earlier scan has looked at
        self._since: float | None = None
        self._written = 0.0
        self.driving = self.failed = False
        self._lines = self._stem.with_suffix(".jsonl").open("a", encoding="utf-8")
        if earlier is not None:
            self._take_over(earlier)
        self.write(finished=False)

    @classmethod
    def of(cls, config: AgentConfig, identity: Identity) -> Self:
        """This rank's part of the scan that its launch is."""
        earlier = Path(config.scan_after) if config.scan_after else None
        return cls(Path(config.run_dir) / "scan", rank=identity.rank, world_size=identity.world_size, earlier=earlier)

    def is_due(self, steps: int, *, tracing: bool) -> bool:
        """Whether the loop has trained for long enough for the guard to know its bounds."""
        return steps >= LEARNING_STEPS and (not tracing or steps >= MORE_STEPS)

    def updated(self, loop: Loop) -> None:
        """An update has been applied. Ends a rank whose loop gets no batch of a loader: all its training would show nothing. Raises SystemExit."""
        steps = loop.step + 1
        if not loop.feeds_itself or self._batches or steps < UNFED_STEPS:
            return
        if steps >= UNFED_STEPS_BESIDE_A_LOADER or (steps == UNFED_STEPS and not _has_a_loader()):
            raise SystemExit(0)

    def seen_elsewhere(self, batch: Any, source: Source, checked: Checked | None, guard: Guard) -> None:
        """Another thread has taken a batch for the loop, which trains on it. No rank of such a loop drives."""
        self._batches += 1
        if checked is not None:
            self._samples += _size(source, checked)
            self.found(batch, checked, guard)

    def found(self, batch: Any, checked: Checked, guard: Guard) -> None:
        """Writes down what is bad in a batch."""
        if checked.violation is not None:
            for entry in bad_samples(guard, batch, checked):
                self._note(entry)

    def drive(self, take: Callable[[], Taken], guard: Guard, *, total: int | None, failed_at: Callable[[], Source]) -> None:
        """Takes batches until there are none. The loop never gets them."""
        self.driving, self._since = True, self._clock()
        self._total = total
        self.write(finished=False)
        failures = 0
        while failures < MAX_FAILURES:
            try:
                batch, source, checked = take()
            except StopIteration:
                break
            except Exception as error:  # what a sample makes of the data set's code is a finding
                if of_a_signal(error):
                    raise
                failures += 1
                self._failed(error, failed_at())
                continue
            failures = 0
            self.looked_at(batch, source, checked, guard)
        self.write(finished=failures == 0)

    def has_seen(self, index: Any) -> bool:
        """Whether all samples of a batch to come were looked at by an earlier scan."""
        return isinstance(index, (list, tuple)) and bool(index) and all(one in self._looked_at for one in index)

    def looked_at(self, batch: Any, source: Source, checked: Checked | None, guard: Guard) -> None:
        """Counts a batch and writes down what is bad in it."""
        self._batches += 1
        if checked is None:
            return
        checked = guard.fresh(checked)  # a loop that fetches ahead had it looked at before its bounds were known
        self._samples += _size(source, checked)
        if source.indices is not None:
            self._looked_at.add(source.indices)
        elif self._batches <= self._again:
            return
        self.found(batch, checked, guard)
        if checked.violation is None and checked.suspects and self.driving:
            self._unconfirmed += 1
        if self._clock() - self._written > WRITE_EVERY_S:
            self.write(finished=False)

    def refused(self, violation: Violation) -> None:
        """The guard has refused a batch inside the forward of a learning step."""
        self._note(_entry(violation))
        self.write(finished=False)

    def ended(self) -> None:
        """The process ends. Where the loop has seen all its data before a scan was due, that was all."""
        if not self.driving:
            self.write(finished=not self.failed)

    def write(self, *, finished: bool) -> None:
        """The state as it is."""
        self._written = self._clock()
        seconds = 0.0 if self._since is None else self._written - self._since
        state = {
            "rank": self._rank, "world_size": self._world_size, "batches": self._batches, "samples": self._samples, "total_batches": self._total,
            "bad": self._bad, "unconfirmed": self._unconfirmed, "failures": self._failures, "driving": self.driving,
            "seconds": round(seconds, 3), "finished": finished,
        }  # fmt: skip
        self._lines.flush()
        _replace(self._stem.with_suffix(".done"), zlib.compress(self._looked_at.packed, 1))
        _replace(self._stem.with_suffix(".json"), json.dumps(state).encode())

    def _failed(self, error: Exception, source: Source) -> None:
        self._failures += 1
        indices = [] if source.indices is None else list(source.indices)
        text = f"the loader raised {type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
        self._note({"kind": "loader.exception", "summary": text, "indices": indices, "worker": source.worker})

    def _note(self, entry: dict[str, Any]) -> None:
        self._bad += 1
        self._lines.write(json.dumps({"rank": self._rank, "batch": self._batches, **entry}) + "\n")
        self._lines.flush()

    def _take_over(self, earlier: Path) -> None:
        """What other ranks have seen counts too; their findings are shared out, in case there were more of them."""
        for path in sorted(earlier.glob("rank-*.done")):
            self._looked_at.merge(zlib.decompress(path.read_bytes()))
        for path in sorted(earlier.glob("rank-*.jsonl")):
            if int(path.stem.removeprefix("rank-")) % self._world_size == self._rank:
                for line in path.read_text(encoding="utf-8").splitlines():
                    self._lines.write(line + "\n")
                    self._bad += 1
        own = earlier / f"rank-{self._rank}.json"
        self._again = int(json.loads(own.read_text())["batches"]) if own.exists() else 0


class _Bits:
    """A set of small whole numbers, eight to a byte."""

    def __init__(self) -> None:
        self.packed = bytearray()

    def add(self, numbers: Sequence[int | None]) -> None:
        for number in numbers:
            if number is not None and number >= 0:
                if number >> 3 >= len(self.packed):
                    self.packed.extend(bytes((number >> 3) + 4096 - len(self.packed)))
                self.packed[number >> 3] |= 1 << (number & 7)

    def merge(self, packed: bytes) -> None:
        if len(packed) > len(self.packed):
            self.packed.extend(bytes(len(packed) - len(self.packed)))
        self.packed[: len(packed)] = bytes(a | b for a, b in zip(self.packed, packed, strict=False))

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and 0 <= number < len(self.packed) << 3 and bool(self.packed[number >> 3] >> (number & 7) & 1)


def _size(source: Source, checked: Checked) -> int:
    if source.indices is not None and len(source.indices) != 1:
        return len(source.indices)
    return next((int(tensor.shape[0]) for tensor in checked.leaves.values() if tensor.dim()), 1)


def _has_a_loader() -> bool:
    """Whether there is anything in this process whose batches would be seen."""
    from torch.utils.data import DataLoader

    from torch_watchdog_agent.hooks.byhand import Watched

    return any(issubclass(type(one), (DataLoader, Watched)) for one in gc.get_objects())


def _replace(path: Path, content: bytes) -> None:
    unready = path.with_name(path.name + ".tmp")
    unready.write_bytes(content)
    unready.replace(path)


# Every bad sample of a batch, not only the first


def bad_samples(guard: Guard, batch: Any, checked: Checked) -> Iterator[dict[str, Any]]:
    """One entry for each bad sample: mends what the first violation is about, tells by the difference whose it was, and looks again."""
    from torch_watchdog_agent.contract.flatten import leaves_of, replaced

    told: set[Any] = set()
    for _ in range(MAX_KEYS):
        violation = checked.violation
        if violation is None:
            return
        clean = guard.repaired(batch, checked)
        key = violation.batch.key
        own, mended = (None if one is None else leaves_of(one, checked.leaves).get(key) for one in (batch, clean))
        found = () if own is None or mended is None or own.shape != mended.shape else _rows(own, mended)
        entries = [_entry(violation, checked, element, own) for element in found] or [_entry(violation)]
        for entry in entries:
            name = entry["dataset_index"] if entry["dataset_index"] is not None else ("position", entry["position_in_batch"])
            if name not in told:
                told.add(name)
                yield entry
        if not found:
            return
        batch = replaced(batch, {key: mended})
        origin = checked.origin
        checked = guard.fetched(batch, indices=origin.indices if origin else None, worker=origin.worker if origin else None)


def _rows(own: Any, mended: Any) -> list[tuple[int, ...]]:
    """The first changed element of each row."""
    places = (own != mended).nonzero().tolist()
    first: dict[int, tuple[int, ...]] = {}
    for place in places:
        first.setdefault(place[0] if place else 0, tuple(place))
    return list(first.values())


def _entry(
    violation: Violation, checked: Checked | None = None, element: tuple[int, ...] | None = None, tensor: Any = None
) -> dict[str, Any]:
    fact, bound = violation.batch, violation.bound
    sample, value = fact.sample, fact.value
    if checked is not None and checked.origin is not None and element is not None:
        sample, value = checked.origin.sample(fact.key, element), tensor[element].item()
    return {
        "kind": violation.kind,
        "key": fact.key,
        "element": list(element if element is not None else fact.element or ()),
        "value": value if isinstance(value, int) else None if value is None else repr(value),
        "dataset_index": sample.dataset_index if sample else None,
        "position_in_batch": sample.position_in_batch if sample else None,
        "worker": sample.worker if sample else None,
        "low": bound.low if bound else None,
        "high": bound.high if bound else None,
        "op": bound.op if bound else None,
        "module": bound.module if bound else None,
        "source": bound.source if bound else None,
        "summary": violation.summary,
        "cause": violation.cause,
        "fix": violation.fix,
    }
