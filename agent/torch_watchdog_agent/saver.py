"""Saving and leaving at a boundary (proto/README.md, D; the rank's part): write under a temporary name, report, seal when told, end or go on.

Knows the protocol's words and the checkpoint package; neither sockets nor ring.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_watchdog_agent.turned_off import why_unknown
from torch_watchdog_proto.messages import Commit, Committed, Leave, Left, Saved, Saving, WriteCommitted
from torch_watchdog_proto.sentences import count
from torch_watchdog_proto.stop.order import files_of

if TYPE_CHECKING:
    from torch_watchdog_agent.checkpoint.part import RankPart
    from torch_watchdog_agent.checkpoint.position import LoaderPosition
    from torch_watchdog_agent.rank import Rank

__all__ = ["Saver", "say_what_is_not_counted"]

SEEN_WITHIN_S = 5.0  # that another rank has sealed what all have written: it writes two small files
_LOOK_S = 0.05


class Saver:
    """Acts on committed orders of one rank. `busy` while it does: steps that a save runs inside are no gates."""

    def __init__(self, rank: Rank, *, leave: Callable[[], None]) -> None:
        self._rank, self._announce_leave = rank, leave
        self.busy = False

    def act(self, commit: Commit, *, step: int, position: LoaderPosition | None = None) -> None:
        """Saves and leaves as the order says. `step`: the first step that is not applied; `position`: where its data go on, unless it is where they are now.
        Raises SystemExit to leave."""
        if commit.leave:
            self._rank.holds.leave_out_what_is_in_flight()
        committed = self._save(commit, position) if commit.save else False
        self._rank.gate.done(commit.generation)
        self._rank.history.note(f"step {step}: {'checkpoint committed' if committed else 'no checkpoint'}: {commit.path}", level=0)
        if committed and not commit.leave and self._rank.identity.rank == 0:  # whoever reads the job's output has not asked for it
            self._rank.say(
                f"checkpoint committed after {count(self._rank.loop.updates_applied, 'update')}: {commit.path} ({commit.reason})"
            )
        if commit.leave:
            if commit.save and not committed:
                self._rank.rescuer.at_nothing()
            self._leave(commit)

    def _leave(self, commit: Commit) -> None:
        rank = self._rank
        rank.history.flush(ending=True)
        rank.write_contract()
        rank.tell(Left(rank=rank.identity.rank, generation=commit.generation, updates_applied=rank.loop.updates_applied))
        self._announce_leave()
        raise SystemExit(commit.exit_code)

    def _save(self, commit: Commit, position: LoaderPosition | None) -> bool:
        """True where the checkpoint is whole and sealed on every rank."""
        rank = self._rank
        rank.tell(Saving(rank=rank.identity.rank, generation=commit.generation, updates_applied=rank.loop.updates_applied))
        self.busy = True
        try:
            saved, of_all = self._write(commit, position)
            rank.tell(saved)
            return self._finish(commit, saved, of_all)
        finally:
            self.busy = False

    def _write(self, commit: Commit, position: LoaderPosition | None = None) -> tuple[Saved, tuple[RankPart, ...]]:
        from torch_watchdog_agent import checkpoint
        from torch_watchdog_agent.checkpoint.errors import in_words
        from torch_watchdog_agent.checkpoint.peers import RollCall
        from torch_watchdog_agent.checkpoint.rng import RngState

        rank, who = self._rank, self._rank.identity
        rng = RngState.capture()
        say_what_is_not_counted(self._rank)
        if why := why_unknown():
            return self._saved(commit.path, commit, error=why), ()
        try:
            part = checkpoint.save_at(
                Path(commit.path), rank.subjects, updates_applied=rank.loop.updates_applied, position=position or rank.place().with_generators(rng),
                rng=rng, rank=who.rank, world_size=who.world_size, say=rank.say, left_out=rank.quarantine.lines(),
                timeout_s=commit.grace_s, call=RollCall(name=f"save/{who.attempt}/{commit.generation}", why_not=rank.rescuer.why_alone),
            )  # fmt: skip
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  torch's CheckpointException is no Exception; whatever it is must reach the coordinator
            return self._saved(commit.path, commit, error=in_words(error)), ()
        good = part.finite and rank.at_gate.is_put_back
        return self._saved(str(part.path), commit, finite=good, files=part.files, format=part.format), part.of_all

    def _saved(self, path: str, commit: Commit, **fields: Any) -> Saved:
        return Saved(
            rank=self._rank.identity.rank, generation=commit.generation, updates_applied=self._rank.loop.updates_applied, path=path, **fields
        )  # fmt: skip

    def _finish(self, commit: Commit, saved: Saved, of_all: tuple[RankPart, ...]) -> bool:
        gate = self._rank.gate
        # A central daemon has a grace time of its own: the launch's is what the user of this job asked for.
        deadline = gate.clock() + min(commit.grace_s, self._rank.config.grace_s)
        answer = gate.answer(commit.generation, deadline=deadline)
        sealed = good = False
        if isinstance(answer, WriteCommitted):
            word = self.seal(commit, answer, Path(saved.path))
            sealed, good = word.error is None, word.error is None and answer.good
            self._rank.tell(word)
            answer = gate.answer(commit.generation, deadline=deadline, beyond=WriteCommitted)
        elif answer is None:
            sealed = good = self._seal_unasked(commit, saved, of_all)
        committed = isinstance(answer, Leave) and answer.committed
        if not committed and not sealed:  # what is sealed is whole, even where nobody was left to say so
            self._discard(Path(saved.path))
        return committed or (good and answer is None)

    def _seal_unasked(self, commit: Commit, saved: Saved, of_all: tuple[RankPart, ...]) -> bool:
        """Nobody is left to say that every part is whole. Those who wrote them together know it: what was decided is finished without a daemon."""
        rank, first = self._rank, min(of_all, key=lambda part: part.rank, default=None)
        if first is None:
            rank.say(f"no checkpoint ({saved.error})")  # nobody else is left to say so
            return False
        finite = all(part.finite for part in of_all)
        if len({part.updates_applied for part in of_all}) > 1:
            return False
        if rank.identity.rank != first.rank:
            return finite and self._is_sealed_by_another(commit, saved)
        facts = {
            "updates_applied": first.updates_applied, "format": saved.format, "ranks": sorted(part.rank for part in of_all), "finite": finite,
            "kind": "batch" if commit.veto is not None else "order.stop" if commit.leave else "order.checkpoint", "reason": commit.reason,
            "files": files_of(part.files for part in of_all),
        }  # fmt: skip
        word = self.seal(commit, WriteCommitted(generation=commit.generation, manifest=facts, good=finite), Path(saved.path))
        if word.error is not None:
            rank.say(f"no checkpoint: its daemon is gone, and it could not be sealed without it ({word.error})")
            return False
        rank.say(
            f"the daemon was gone before it could seal the checkpoint: every rank's part is whole, so it was sealed without it: {saved.path}"
        )
        if finite:
            rank.tell(word)  # for its node, which tells the end of the launch
        return finite

    def _is_sealed_by_another(self, commit: Commit, saved: Saved) -> bool:
        """The lowest of those who wrote together does that now: it is seen on the disk that they share."""
        from torch_watchdog_agent.checkpoint import manifest

        rank, who = self._rank, self._rank.identity
        deadline = rank.gate.clock() + SEEN_WITHIN_S
        while not manifest.is_good_of(
            Path(saved.path), session=rank.config.session, attempt=who.attempt, updates_applied=saved.updates_applied
        ):
            if rank.gate.clock() >= deadline:
                return False
            time.sleep(_LOOK_S)
        rank.tell(Committed(rank=who.rank, generation=commit.generation))  # for its node, as above
        return True

    def _discard(self, path: Path) -> None:
        """Nothing half written stays that a person could take for a checkpoint. The lowest rank's work, which is the one that seals."""
        from torch_watchdog_agent.checkpoint.save import discard

        if self._rank.identity.rank == 0:
            discard(path)

    def seal(self, commit: Commit, order: WriteCommitted, path: Path) -> Committed:
        """Manifest, COMMITTED and the final name; the lowest saver's work."""
        from torch_watchdog_agent.checkpoint import manifest
        from torch_watchdog_agent.checkpoint.errors import in_words

        rank = self._rank
        launch = {"job": rank.config.job, "session": rank.config.session, "attempt": rank.identity.attempt}
        facts = {**order.manifest, **launch, "world_size": rank.identity.world_size}
        try:
            manifest.commit(path, facts, good=order.good, ours=path == Path(commit.path))
            error = None
        except Exception as problem:  # noqa: BLE001  the others wait for a word
            error = in_words(problem)
        return Committed(rank=rank.identity.rank, generation=order.generation, error=error)


def say_what_is_not_counted(rank: Rank) -> None:
    """Before what is saved says how many updates it holds."""
    more = rank.loop.more_than_usual
    if more and rank.identity.rank == 0:
        rank.say(
            f"{more} optimizer steps came without a batch of their own, beyond what a batch usually gives rise to: the checkpoint's number of updates "
            "leaves them out"
        )
