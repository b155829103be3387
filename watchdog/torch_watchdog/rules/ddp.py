"""config.ddp: errors of DistributedDataParallel about how it was set up, by their text: what they mean, and what to change.

A table; knows nothing of ranks or incidents. What torch says is right, and long: the first cause that fits is said here in one sentence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["DdpError", "ddp_error"]


@dataclass(frozen=True, slots=True)
class DdpError:
    """One of torch's errors. `pattern` is a part of its text that torch has kept over the versions."""

    pattern: str
    cause: str
    fix: str


_ERRORS = (
    DdpError(
        r"Expected to mark a variable ready only once|has been marked as ready twice",
        "The gradient of a parameter came twice in one backward: reentrant activation checkpointing (use_reentrant=True) runs a part of the model again "
        "while DDP searches for unused parameters, or two forwards share parameters before one backward",
        "checkpoint with use_reentrant=False, or set find_unused_parameters=False; where the graph is the same in every step, static_graph=True",
    ),
    DdpError(
        r"Expected to have finished reduction in the prior iteration",
        "Parameters got no gradient in the step before: a part of the model, or an output, did not take part in the loss of this rank",
        "let every parameter take part in the loss on every rank, freeze those that do not (requires_grad=False), or set find_unused_parameters=True",
    ),
    DdpError(
        r"Your training graph has changed in this iteration",
        "static_graph=True promises the same graph in every step, and this step used other parameters than the first",
        "leave out static_graph=True, or let every step use the same parameters",
    ),
    DdpError(
        r"appears not to match (sizes|strides)|DDP expects same model across all ranks|verif\w+ params? (shape|count)",
        "The ranks have built different models: the number or the shapes of their parameters differ (a vocabulary or a number of classes read from each "
        "rank's own data, or a branch on the rank)",
        "build the model from the same configuration on every rank: decide sizes on one rank and broadcast them",
    ),
    DdpError(
        r"when a module doesn't have any parameters that require a gradient",
        "All parameters of the module are frozen (requires_grad=False): there is nothing to average",
        "unfreeze what is to be trained before the module is wrapped, or do not wrap it",
    ),
)


def ddp_error(text: str) -> DdpError | None:
    """The known error that this text is of."""
    return next((known for known in _ERRORS if re.search(known.pattern, text, re.IGNORECASE)), None)
