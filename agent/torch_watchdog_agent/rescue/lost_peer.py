"""An error of a lost peer's that a collective of this rank has raised, and that its script may catch: then nothing of a failure is left to be seen when the
script returns, or calls `os._exit`, milliseconds before anybody can say which rank is gone.

Owns whether such an error was the last thing that the training met. What is trained is held meanwhile: a rescue may ask for it behind the script's frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_watchdog_agent.errors import text_of
from torch_watchdog_agent.rescue.saving import needed
from torch_watchdog_proto.lost_peers import PEER_IS_GONE

if TYPE_CHECKING:
    from torch_watchdog_agent.rank import Rank

__all__ = ["LostPeer"]


class LostPeer:
    """Of one rank. `is_known`: the newest of its collectives' errors told of a lost peer, and it has gone on neither with an update nor with a group."""

    __slots__ = ("_held", "_rank", "is_known")

    def __init__(self, rank: Rank) -> None:
        self._rank, self.is_known = rank, False
        self._held: object = None

    def met(self, error: BaseException) -> None:
        """What couples ranks has raised it in the training."""
        rank = self._rank
        if rank.identity.world_size > 1 and rank.config.policy != "observe" and rank.guarding and PEER_IS_GONE.search(text_of(error)):
            self.is_known, self._held = True, needed(rank)

    def went_on(self) -> None:
        """The training has, by itself, or all that is to be saved has been: what is held goes when the script says so."""
        if self.is_known:
            self.is_known, self._held = False, None
