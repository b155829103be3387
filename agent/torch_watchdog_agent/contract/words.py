"""Recipes in words: `cumsum(input_ids != 1) + 1`. Owns the rendering; runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_watchdog_agent.contract.nodes import Ref
from torch_watchdog_agent.contract.recipe import Recipe, Step
from torch_watchdog_agent.contract.sizes import Size
from torch_watchdog_proto.names import spoken

__all__ = ["beside_the_point", "expression", "size_words"]

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floor_divide": "//", "remainder": "%",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "bitwise_and": "&", "bitwise_or": "|", "logical_and": "&", "logical_or": "|",
}  # fmt: skip
_SILENT = {
    "reshape",
    "view",
    "expand",
    "clone",
    "detach",
    "unsqueeze",
    "squeeze",
    "_to_copy",
    "contiguous",
    "permute",
    "transpose",
    "t",
    "alias",
}
MAX_LENGTH = 160


def expression(recipe: Recipe) -> str:
    """How the index is computed, short enough for a line."""
    if not recipe.outputs:
        return ""
    makers = {number: step for step in recipe.steps for number in step.outputs if number is not None and not step.writes}
    names: Mapping[int, str] = recipe.leaves
    text = _words(recipe.outputs[0], makers, names, recipe)
    if recipe.writes:
        text += f" (after {', '.join(dict.fromkeys(step.name for step in recipe.steps if step.writes))})"
    return text if len(text) <= MAX_LENGTH else text[: MAX_LENGTH - 3] + "..."


def _words(number: int, makers: Mapping[int, Step], names: Mapping[int, str], recipe: Recipe) -> str:
    if number in names:
        return spoken(names[number])
    step = makers.get(number)
    if step is None:
        constant = recipe.constants.get(number)
        return str(constant.item()) if constant is not None and constant.numel() == 1 else "a constant"

    def word(argument: Any) -> str:
        if isinstance(argument, Ref):
            return _words(argument.number, makers, names, recipe)
        if isinstance(argument, Size):
            return size_words(argument)
        return "[" + ", ".join(map(word, argument)) + "]" if isinstance(argument, list) else str(argument)

    return _step_words(step, [word(argument) for argument in step.args])


def _step_words(step: Step, args: list[str]) -> str:
    name = step.name.rstrip("_")
    if name in _SILENT and args:
        return args[0]
    if name in ("add", "sub") and args[1:] == ["0"]:
        return args[0]
    if name in _INFIX and len(args) >= 2:
        return f"{_wrapped(args[0])} {_INFIX[name]} {_wrapped(args[1])}"
    if name == "slice" and len(args) >= 4:
        return f"{_wrapped(args[0])}[{_range_words(args)}]"
    if name == "select" and len(args) == 3:
        return f"{_wrapped(args[0])}[..., {args[2]}]" if args[1] != "0" else f"{_wrapped(args[0])}[{args[2]}]"
    if name == "cumsum":
        return f"cumsum({args[0]})"
    if name == "constant_pad_nd":
        return f"pad({args[0]})"
    return f"{name}({', '.join(args)})"


def _range_words(args: list[str]) -> str:
    start = "" if args[2] in ("0", "None") else args[2]
    end = "" if len(args[3]) > 10 or args[3] == "None" else args[3]
    return f"dim {args[1]}, {start}:{end}" if args[1] not in ("-1",) else f"..., {start}:{end}"


def _wrapped(text: str) -> str:
    """In parentheses where an operator stands outside of brackets."""
    depth = 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == " " and depth == 0:
            return f"({text})"
    return text


def size_words(size: Size) -> str:
    """The plainest reading of a size."""
    readings = sorted(size.readings, key=_plainness)
    match readings[0] if readings else ():
        case ("constant", value):
            return str(value)
        case ("size", key, dim, 0):
            return f"{spoken(key)}.shape[{dim}]"
        case ("size", key, dim, offset):
            return f"{spoken(key)}.shape[{dim}] {'+' if offset > 0 else '-'} {abs(offset)}"
        case ("times", key, dim, factor):
            return f"{spoken(key)}.shape[{dim}] * {factor}"
        case _:
            return "n"


def _plainness(reading: tuple[Any, ...]) -> tuple[int, bool, str]:
    if reading[0] == "size" and reading[3] == 0:
        return 1, beside_the_point(reading[1]), str(reading)
    return {"constant": 0, "size": 2, "times": 3}.get(reading[0], 4), False, str(reading)


def beside_the_point(key: str) -> bool:
    """Masks and labels have the shape of the inputs, and are seldom what a length is read from."""
    return "mask" in key or "label" in key
