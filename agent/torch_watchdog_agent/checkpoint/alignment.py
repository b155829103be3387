"""Matches the names in a checkpoint with those of the objects it is loaded into.

The run that saved found its models by itself, perhaps under an outer module (a LightningModule, a wrapper with the loss): its names then
have a prefix that the caller's model does not have, or the other way round. Pure: names and shapes in, a mapping out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

Shape = tuple[int, ...] | None  # None for what is no tensor


def saved_names(saved: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> dict[str, str] | None:
    """For each wanted name the saved name that it is, or None where they do not fit.

    Either the names are the same, or one side has one prefix in common; shapes must agree, and nothing under the prefix may be left over.
    """
    if not wanted or not saved:
        return None if wanted else {}
    for added, dropped in _candidates(saved, wanted):
        mapping = {name: added + name.removeprefix(dropped) for name in wanted}
        fits = all(source in saved and saved[source] == wanted[name] for name, source in mapping.items())
        if fits and sum(name.startswith(added) for name in saved) == len(mapping):
            return mapping
    return None


def mismatch(saved: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> str:
    """In words, why the names do not fit: the first few that only one side has, or that have different shapes."""
    missing = [name for name in wanted if name not in saved]
    unknown = [name for name in saved if name not in wanted]
    other = [name for name in wanted if name in saved and saved[name] != wanted[name]]
    found = (("it lacks", missing), ("it also has", unknown), ("of another shape there", other))
    return "; ".join(f"{words} {_some(names)}" for words, names in found if names)


def _some(names: Collection[str]) -> str:
    first = ", ".join(sorted(names)[:4])
    return first if len(names) <= 4 else f"{first} and {len(names) - 4} more"


def _candidates(saved: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> list[tuple[str, str]]:
    # (prefix that the checkpoint has, prefix that the model has); the longest name has the least accidental matches.
    longest = max(wanted, key=lambda name: (name.count("."), name))
    inner = sorted(name.removesuffix(longest) for name in saved if name.endswith(f".{longest}"))
    deepest = max(saved, key=lambda name: (name.count("."), name))
    outer = [longest_name.removesuffix(deepest) for longest_name in wanted if longest_name.endswith(f".{deepest}")]
    return [("", "")] + [(prefix, "") for prefix in inner] + [("", prefix) for prefix in outer]
