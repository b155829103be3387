"""Learns what a model can take from the user's own steps, and checks batches against it. `Guard` is all that the hooks need."""

from torch_watchdog_agent.contract.check import TensorStat
from torch_watchdog_agent.contract.guard import Checked, Guard

__all__ = ["Checked", "Guard", "TensorStat"]
