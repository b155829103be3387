"""The coordinator's transition table: what it does in which state, and why. START HERE for the stop protocol; the diagram in proto/README.md is made of it.

Owns the states and triggers of one order; knows no message. What stands in no row changes nothing: a message that is late, repeated, or of another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

__all__ = ["TABLE", "Deed", "Row", "State", "Trigger", "mermaid"]

State: TypeAlias = Literal["idle", "preparing", "committed", "saving", "sealing", "leaving"]
Trigger: TypeAlias = Literal[
    "hold",  # of a bad batch, where nothing is under way that stands above it
    "hold_of_same_step",
    "hold_after_skip",  # the order under way is a skip that some rank has not come to yet
    "request",
    "request_too_early",
    "cancel",
    "cancel_of_hold",  # by a person, of an order that nobody asked for
    "hello",
    "ack",
    "last_ack",
    "ack_past_gate",
    "cannot_promise",
    "vetoed",
    "last_vetoed",
    "saving",
    "saved",
    "all_whole",
    "not_whole",
    "not_whole_go_on",
    "sealed",
    "sealed_go_on",
    "left",
    "last_left",
    "gone",
    "finished",
    "deadline",
]
Deed: TypeAlias = Literal["open", "open_anew", "refuse", "say_again", "note", "commit", "seal", "leave", "go_on", "close", "give_up"]


@dataclass(frozen=True, slots=True)
class Row:
    """In `state`, at `trigger`: do `deed`, be in `next`. `why` is for people."""

    state: State
    trigger: Trigger
    next: State
    deed: Deed
    why: str


_ROWS = (
    Row("idle", "hold", "preparing", "open", "a rank holds a bad batch: all are asked to veto its step"),
    Row("idle", "request", "preparing", "open", "a boundary of the whole job is asked for"),
    Row("idle", "request_too_early", "idle", "refuse", "a rank has not reported yet, or is gone"),
    Row("idle", "cancel", "idle", "refuse", "there is nothing to take back"),
    # Agreement. Nobody acts on anything yet, so that everything can still be given up.
    Row("preparing", "hello", "preparing", "say_again", "it connected in the middle: its Prepare may be lost"),
    Row("preparing", "ack", "preparing", "note", "others have not answered yet"),
    Row("preparing", "last_ack", "committed", "commit", "every rank has promised"),
    Row("preparing", "ack_past_gate", "idle", "give_up", "a rank has applied the step already: the ranks are not coupled"),
    Row("preparing", "cannot_promise", "idle", "give_up", "a rank does not know how far it is"),
    Row("preparing", "hold", "preparing", "open_anew", "a bad batch comes before a request"),
    Row("preparing", "request", "preparing", "refuse", "one order at a time"),
    Row("preparing", "cancel", "idle", "give_up", "nobody has acted on it"),
    Row("preparing", "cancel_of_hold", "preparing", "refuse", "a rank holds a bad batch, and would end without an answer"),
    Row("preparing", "gone", "idle", "give_up", "not every rank can promise any more"),
    Row("preparing", "finished", "idle", "give_up", "the training ended before the step of the order"),
    Row("preparing", "deadline", "idle", "give_up", "a rank does not answer: never taken for a yes"),
    # Decided. Ranks act on it when they come to its step.
    Row("committed", "hello", "committed", "say_again", "its Commit may be lost"),
    Row("committed", "hold_of_same_step", "committed", "say_again", "a second bad batch in the step that everybody vetoes"),
    Row("committed", "hold", "preparing", "open_anew", "a bad batch comes before the step that everybody stops at"),
    Row("committed", "hold_after_skip", "preparing", "open_anew", "the skip is done where it matters: its veto stays with the ranks"),
    Row("committed", "request", "committed", "refuse", "one order at a time"),
    Row("committed", "cancel", "committed", "refuse", "some ranks may have acted on it"),
    Row("committed", "vetoed", "committed", "note", "policy skip: others have not come to the step yet"),
    Row("committed", "last_vetoed", "idle", "close", "policy skip: every rank has left the step out"),
    Row("committed", "saving", "saving", "note", "the first rank is at the boundary"),
    Row("committed", "saved", "saving", "note", "its Saving was lost"),
    Row("committed", "all_whole", "sealing", "seal", "the only word of the ranks that came"),
    Row("committed", "not_whole", "leaving", "leave", "the only word of the ranks that came"),
    Row("committed", "not_whole_go_on", "idle", "go_on", "the only word of the ranks that came"),
    Row("committed", "left", "committed", "note", "an order that leaves without saving"),
    Row("committed", "last_left", "idle", "close", "an order that leaves without saving"),
    Row("committed", "gone", "idle", "give_up", "the others would wait for it"),
    Row("committed", "finished", "idle", "give_up", "the training ended before the step of the order"),
    Row("committed", "deadline", "idle", "give_up", "the ranks do not come to the boundary"),
    # Saving: every rank is at the boundary, or on its way there.
    Row("saving", "hello", "saving", "say_again", "its Commit may be lost"),
    Row("saving", "request", "saving", "refuse", "one order at a time"),
    Row("saving", "cancel", "saving", "refuse", "some ranks have acted on it"),
    Row("saving", "saved", "saving", "note", "other parts are missing"),
    Row("saving", "all_whole", "sealing", "seal", "every part is whole and of the same update"),
    Row("saving", "not_whole", "leaving", "leave", "a part failed, or the parts are of different updates: no checkpoint, and still a clean stop"),
    Row("saving", "not_whole_go_on", "idle", "go_on", "no checkpoint, and the training goes on"),
    Row("saving", "left", "saving", "note", "it could not wait any longer"),
    Row("saving", "gone", "idle", "give_up", "its part will not come"),
    Row("saving", "deadline", "idle", "give_up", "a part does not come"),
    # Sealing: the lowest rank writes the manifest, then COMMITTED.
    Row("sealing", "hello", "sealing", "say_again", "its order to seal may be lost"),
    Row("sealing", "request", "sealing", "refuse", "one order at a time"),
    Row("sealing", "cancel", "sealing", "refuse", "some ranks have acted on it"),
    Row("sealing", "sealed", "leaving", "leave", "COMMITTED stands, or could not be written"),
    Row("sealing", "sealed_go_on", "idle", "go_on", "a checkpoint without a stop"),
    Row("sealing", "left", "sealing", "note", "it could not wait any longer"),
    Row("sealing", "last_left", "idle", "close", "nobody waited any longer"),
    Row("sealing", "gone", "idle", "give_up", "it may be the one that seals"),
    Row("sealing", "deadline", "idle", "give_up", "nobody says that it is sealed"),
    # Leaving
    Row("leaving", "hello", "leaving", "say_again", "its Leave may be lost"),
    Row("leaving", "request", "leaving", "refuse", "one order at a time"),
    Row("leaving", "cancel", "leaving", "refuse", "some ranks have acted on it"),
    Row("leaving", "left", "leaving", "note", "others are on their way out"),
    Row("leaving", "last_left", "idle", "close", "every rank has ended"),
    Row("leaving", "deadline", "idle", "give_up", "a rank does not end"),
)  # fmt: skip

TABLE: Mapping[tuple[State, Trigger], Row] = {(row.state, row.trigger): row for row in _ROWS}


def mermaid() -> str:
    """The table as a state diagram. Rows that stay where they are and say nothing new are left out."""
    lines = ["stateDiagram-v2", "    [*] --> idle"]
    for state in get_args(State):
        for following in get_args(State):
            triggers = [
                row.trigger
                for row in _ROWS
                if (row.state, row.next) == (state, following) and (state != following or row.deed == "open_anew")
            ]
            if triggers:
                lines.append(f"    {state} --> {following}: {', '.join(triggers)}")
    return "\n".join(lines) + "\n"
