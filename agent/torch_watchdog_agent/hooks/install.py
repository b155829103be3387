"""Puts each hook in place when the module that it patches is imported, and not before: importing torch stays the user's decision."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import wrapt

from torch_watchdog_agent.config import AgentConfig
from torch_watchdog_agent.turned_off import turned_off

__all__ = ["when_torch_is_imported"]


def when_torch_is_imported(config: AgentConfig) -> None:
    """Registers all hooks. Cheap: what a hook needs is imported with it."""
    for module, hook in HOOKS.items():
        wrapt.register_post_import_hook(_patching(hook, config), module)


def _patching(name: str, config: AgentConfig) -> Callable[[ModuleType], None]:
    def patch(module: ModuleType) -> None:
        import importlib

        from torch_watchdog_agent.say import Voice

        try:
            if name != "arm":
                importlib.import_module(f"torch_watchdog_agent.hooks.{name}").patch(module)
                return
            from torch_watchdog_agent.hooks import active

            active.arm(config)
        except Exception as error:  # noqa: BLE001  fail open
            turned_off(name)
            Voice()(f"the {name} hook could not be put in place ({type(error).__name__}: {error}); training goes on")

    return patch


HOOKS = {
    "torch": "arm",
    "torch.utils.data.dataloader": "loader",
    "torch.optim.optimizer": "optimizer",
    "torch.optim.lr_scheduler": "scheduler",
    "torch.autograd": "loss",
    "torch.amp.grad_scaler": "scaler",
    "torch.jit._builtins": "probabilities",
    "torch.nn.utils.clip_grad": "clipping",
    "torch.nn.parallel.distributed": "distributed",
    "torch.distributed.distributed_c10d": "collectives",
    "transformers.trainer": "trainer",
    "accelerate.data_loader": "accelerate",
    "accelerate.accelerator": "accelerator",
    "accelerate.optimizer": "accelerated",
    "torchdata.stateful_dataloader.stateful_dataloader": "stateful",
    "lightning.pytorch.loops.fetchers": "lightning",
    "pytorch_lightning.loops.fetchers": "lightning",
    "lightning.pytorch.loops.fit_loop": "lightning_resume",
    "pytorch_lightning.loops.fit_loop": "lightning_resume",
    "lightning.pytorch.strategies.launchers.subprocess_script": "lightning_launch",
    "pytorch_lightning.strategies.launchers.subprocess_script": "lightning_launch",
    "lightning.fabric.strategies.launchers.subprocess_script": "lightning_launch",
    "lightning_fabric.strategies.launchers.subprocess_script": "lightning_launch",
    "lightning.pytorch.trainer.connectors.signal_connector": "lightning_signals",
    "pytorch_lightning.trainer.connectors.signal_connector": "lightning_signals",
    "lightning.pytorch.trainer.trainer": "lightning_trainer",
    "pytorch_lightning.trainer.trainer": "lightning_trainer",
}
