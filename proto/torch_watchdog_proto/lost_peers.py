"""The words of a process whose peer is gone or silent: gloo, NCCL, c10d's store, sockets. Owns these words, for the rank and for who judges what it said."""

from __future__ import annotations

import re

__all__ = ["PEER_IS_GONE"]

PEER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|broken pipe|timed out waiting|socket timeout|"
    r"communicator was aborted|remote process exited|DistNetworkError|DistStoreError|recvValue failed|failed to recv|"
    r"watchdog caught collective operation timeout|wait timeout|waiting for clients|NCCL error.*remote|ncclRemoteError|"
    r"Application timeout caused pair closure|Read error|Rank \d+ successfully reached monitoredBarrier, but received errors",
    re.IGNORECASE,
)
