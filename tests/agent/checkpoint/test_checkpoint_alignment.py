"""The names of a checkpoint are matched with those of the model it is loaded into, or it says what does not fit."""

from __future__ import annotations

from torch_watchdog_agent.checkpoint.alignment import mismatch, saved_names

NET = {"first.weight": (4, 2), "first.bias": (4,), "last.weight": (1, 4)}


def under(prefix: str) -> dict[str, tuple[int, ...]]:
    return {prefix + name: shape for name, shape in NET.items()}


def test_equal_names_are_themselves() -> None:
    assert saved_names(NET, NET) == {name: name for name in NET}


def test_a_prefix_on_either_side_is_found() -> None:
    assert saved_names(under("net.model.") | {"loss.weight": (3,)}, NET) == {name: f"net.model.{name}" for name in NET}
    assert saved_names(NET, under("net.")) == {f"net.{name}": name for name in NET}


def test_of_two_parts_with_the_same_names_the_shapes_tell() -> None:
    other = {f"other.{name}": (9, *shape) for name, shape in NET.items()}
    assert saved_names(other | under("this."), NET) == {name: f"this.{name}" for name in NET}


def test_another_model_does_not_fit_and_the_reason_names_what_differs() -> None:
    larger = {**NET, "extra.weight": (2, 2)}
    other_shape = {**NET, "last.weight": (2, 4)}
    assert saved_names(NET, larger) is None
    assert saved_names(larger, NET) is None
    assert saved_names(other_shape, NET) is None
    assert mismatch(NET, larger) == "it lacks extra.weight"
    assert mismatch(larger, NET) == "it also has extra.weight"
    assert mismatch(other_shape, NET) == "of another shape there last.weight"
