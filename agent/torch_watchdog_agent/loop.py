"""What the user's loop is doing, as far as hand-overs and gates tell: which update window is open, and which micro-step of it.

Pure bookkeeping; knows no torch, clock or thread. A window is one optimizer step in the making: it opens with the first batch that is handed over after a
gate, and closes with the next gate. It may hold several micro-batches and several optimizers' steps. All ranks of a job number their windows alike,
because only what they do in common counts: how many batches are handed over between gates.
"""

from __future__ import annotations

__all__ = ["Loop"]


class Loop:
    """`step` is the open window, or the next one where none is open; `updates_applied` counts the windows that were applied.

    `is_begun`: the window is under way. `is_new_at_gate`: it has just begun at its gate, because its batch was handed over before, or the loop has gone on
    without its loader. `micro_step` numbers the batches of the window, evaluation before it included; `trained_on` counts those that are trained on.
    """

    def __init__(self) -> None:
        self.step = 0
        self.micro_step = -1
        self.trained_on = 0
        self.updates_applied = 0
        self._resumed_at: int | None = None
        self._steps_before = 0  # this launch; less those of it that a framework's training has not done
        self.batches_seen = 0
        self.feeds_itself = False  # it updates, and no loader has given it a batch to train on
        self.fed_elsewhere = False  # batches come through another thread: gates number the windows
        self.is_begun = False
        self._closed_once = False
        self._counted = False  # the window's update
        self._stepped: dict[int, int] = {}  # how often each optimizer stepped in this window
        self._usual_steps: dict[int, int] = {}  # and in the last window of a batch in which it did
        self._more_than_usual = 0  # in the windows before
        self._vetoed = self._is_batchless = self.is_new_at_gate = self._begins_itself = False  # this window
        self._first: int | None = None  # batches of the first window
        self._usual: int | None = None  # the fewest batches of a later window that was not the last of its pass
        self._alike: set[int] = set()  # batches of each window behind the first one, in its pass, but of the last
        self._in_first_pass = True
        self._backwards_counted = self._backwards_of_first = 0  # up to the newest gate, and those of the first window
        self._is_even = False  # in the first window there were as many backwards to a batch as in another one
        self._newest: int | None = None  # batches of the newest window, until it is known whether it was
        self.may_be_ahead = False  # the first window held more batches than the others, as far as they are known
        self.drained: int | None = None  # windows since the loader ended, in which a loop uses what it has fetched ahead
        self._trained_batches = self._backwards = self._backwards_of_batch = 0
        self._has_one_each = True  # a backward for each batch, as far as is seen
        self._behind: int | None = None  # by how many batches the backwards were, at a gate: the fewest so far

    def resumed(self, updates_applied: int) -> None:
        """The training goes on from a checkpoint that holds so many updates; steps are this launch's own, and count from 0."""
        self.updates_applied = self._resumed_at = updates_applied
        self.steps_begin_at(updates_applied)

    @property
    def is_as_resumed(self) -> bool:
        """Whether the training goes on from a checkpoint, and no update has been applied since."""
        return self.updates_applied == self._resumed_at

    def steps_begin_at(self, count: int) -> None:
        """A framework that counts its steps begins, at `count`: what the script has done by itself before is none of them."""
        self._steps_before += count - self.steps_ended(0)

    def steps_ended(self, windows_back: int) -> int:
        """How many, those before this launch and those that were left out included, when the oldest of so many windows that were begun last was not yet."""
        return self._steps_before + (self.step + 1 - windows_back if windows_back else self.step + self._closed_once)

    def batches_a_window(self, ahead: int) -> int:
        """Of those that are trained on, in a loop that is so many batches `ahead`."""
        usual = self._usual if self._usual is not None else (self._first or 0) - ahead
        return max(1, usual)

    def windows_ahead(self, ahead: int | None) -> int:
        """In how late a window a batch may be used, counted from the one in which it is handed over.

        `ahead`: of how many batches that is known; else what the first window held beyond the usual number, which is at least so many.
        """
        if self.fed_elsewhere:
            return 0  # such a batch is held where it is used
        ahead = self._known(ahead)
        if ahead is None:
            ahead = max(0, self._first - self._usual) if self._first is not None and self._usual is not None else 0
        return -(-ahead // self.batches_a_window(ahead))

    def in_hand(self, ahead: int | None) -> int:
        """Batches that were handed over and that no step has used yet, in a loop that fetches `ahead` by so many as far as that is known. It is no such loop
        where its first window held no more than the others: a batch may have been left unused. Where nothing but these numbers tells, those of its first pass
        do, and only if they are alike: a loop may accumulate over fewer batches later. A first window with fewer backwards to a batch has batches in hand.
        """
        if ahead is None and (self._is_even or not (self._in_first_pass or self._alike)):
            return 0
        ahead = self._known(ahead)
        usual = (self._newest if self._usual is None else self._usual) if ahead is not None else self._alike_number()
        if not self.may_be_ahead or self.fed_elsewhere or self._first is None or (ahead is None and usual is None):
            return 0
        primed = self._first - (1 if usual is None else usual)
        most = max(0, primed if ahead is None else min(primed, ahead))
        return max(0, most - (self.drained or 0) * self.batches_a_window(most))

    def _alike_number(self) -> int | None:
        """Of each window behind the first one; None where they differ."""
        newest = {self._newest} if self._in_first_pass and self.drained is None and self._newest is not None else set()
        found = self._alike | newest
        return found.pop() if len(found) == 1 else None

    def _known(self, ahead: int | None) -> int | None:
        """By how many batches the loop is ahead: as a trace has seen it, or else as its backwards tell."""
        if ahead is not None or self._behind is None or not self._has_one_each:
            return ahead
        # One backward may be of several batches.
        return self._behind if self._first is None or self._usual is None else min(self._behind, max(0, self._first - self._usual))

    @property
    def more_than_usual(self) -> int:
        """Steps of optimizers beyond those that a batch usually gives rise to. Where the loop takes no batch any more from an iterator that it keeps,
        they are updates that nobody counts.
        """
        return self._more_than_usual + self._more_now()

    def _more_now(self) -> int:
        if self._is_batchless or not self._trained_batches:
            return 0
        return sum(max(0, steps - self._usual_steps.get(optimizer, 1)) for optimizer, steps in self._stepped.items())

    @property
    def drains(self) -> bool:
        """Whether the window at hand began at its gate, because its batch was fetched ahead of the loader's end."""
        return bool(self.drained) and not self._is_batchless

    def is_open(self, step: int) -> bool:
        """Whether more may happen in this window."""
        return self.is_begun and step == self.step

    @property
    def is_training(self) -> bool:
        """Whether a batch of the window at hand is trained on, and its gate not passed."""
        return self.is_begun and (self.trained_on > 0 or self._begins_itself)

    @property
    def progress(self) -> int:
        """Grows while the loop trains."""
        return self.batches_seen + self._backwards

    def begins_itself(self) -> bool:
        """The next step of a loop that feeds itself has begun. True where its window is new with that."""
        if not self.is_begun:
            self._begin()
        is_new, self._begins_itself = not self._begins_itself, True
        return is_new

    def handed_over(self, *, evaluation: bool = False) -> bool:
        """A batch is about to be used. True where it is the first of its window to be trained on."""
        self.batches_seen += 1
        if not self.is_begun:
            self._begin()
        self.micro_step += 1
        self.trained_on += not evaluation
        if not evaluation:
            if self._newest is not None and self.drained is None:
                self._usual = self._newest if self._usual is None else min(self._usual, self._newest)
                if self._in_first_pass:
                    self._alike.add(self._newest)
            self.drained = self._newest = None
            self.feeds_itself = False
            self._trained_batches, self._backwards_of_batch = self._trained_batches + 1, 0
        return not evaluation and self.trained_on == 1

    def backward_begun(self) -> None:
        """One that is inside no other. Where each batch has just one, they tell how many batches are in hand."""
        self._backwards += 1
        self._backwards_of_batch += 1
        self._has_one_each &= self._backwards_of_batch <= 1 or self.drained is not None

    def pass_ended(self) -> None:
        """A loader has no more batches. A loop that prefetches has some in hand still."""
        self.drained = self.drained or 0
        self._in_first_pass &= self._first is None

    def pass_left(self, *, batches: int) -> None:
        """The loop has let go of a loader that had given it so many batches in this pass.

        In the middle of a window that says nothing where each batch has an iterator of its own: `next(iter(loader))`.
        """
        if batches > 1 or not self.is_begun:
            self.pass_ended()

    def _begin(self, *, batchless: bool = False) -> None:
        if self._closed_once:
            self.step += 1
        self._more_than_usual += self._more_now() if self._usual_steps else 0  # of the first window all is usual
        if not self._is_batchless:
            self._usual_steps.update(self._stepped)
        self._is_batchless, self._vetoed, self._begins_itself = batchless, False, False
        self.is_begun, self._closed_once = True, False
        self.micro_step, self.trained_on = -1, 0
        self._counted = False
        self._stepped.clear()

    def at_gate(self, optimizer: int) -> int:
        """An optimizer is about to step; returns the window that this belongs to. `optimizer`: its number, until it is gone.

        A second optimizer of the same window shares its gate, and so does one that steps as often as it usually does for one batch. Where no loader is seen,
        the same optimizer again means a new window; one that steps more often than usual does where the loader has ended, and where the window was vetoed:
        what follows has nothing of its batch.
        """
        steps = self._stepped.get(optimizer, 0)
        self.feeds_itself = not (self._trained_batches or self.fed_elsewhere)
        if not self.is_begun:
            self._begin_at_gate(steps, is_spent=steps >= (1 if self._is_batchless else self._usual_steps.get(optimizer, 1)))
        self._stepped[optimizer] = self._stepped.get(optimizer, 0) + 1
        return self.step

    def optimizer_gone(self, optimizer: int) -> None:
        """Its number may be another one's from now on."""
        self._stepped.pop(optimizer, None)
        self._usual_steps.pop(optimizer, None)

    def _begin_at_gate(self, steps: int, *, is_spent: bool) -> None:
        if self.fed_elsewhere or self.feeds_itself:
            if steps or not self._closed_once:
                self._begin()
        elif is_spent and self.drained is not None and self.drained < self.windows_ahead(None):
            self.drained += 1
            self._begin()
            self.is_new_at_gate = True
        elif is_spent and (self.drained is not None or self._vetoed or self._is_batchless):
            self._begin(batchless=True)
            self.is_new_at_gate = True

    def gate_done(self, *, applied: bool, vetoed: bool = False) -> bool:
        """The gate has been passed (or vetoed). True the first time in this window."""
        self._vetoed |= vetoed
        self.is_new_at_gate = False
        first = not self._closed_once
        if first:
            self._count_batches()
        self.is_begun, self._closed_once = False, True
        if applied and not self._counted:  # a GradScaler may have left out the step of another optimizer of this window
            self._counted = True
            self.updates_applied += 1
        return first

    def _count_batches(self) -> None:
        backwards, self._backwards_counted = self._backwards - self._backwards_counted, self._backwards
        if self._first is None:
            self._first, self._backwards_of_first = self.trained_on, backwards
        elif self.trained_on and self.drained is None:
            self._newest = self.trained_on
            self._is_even |= self._in_first_pass and 0 < backwards * self._first <= self._backwards_of_first * self._newest
        if self.trained_on and self._backwards and self.drained is None:
            behind = self._trained_batches - self._backwards
            self._behind = behind if self._behind is None else min(behind, self._behind)
        self.may_be_ahead = self._first > (1 if self._usual is None else self._usual)
