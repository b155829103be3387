"""One file for each thing of torch or a framework that is hooked; `install` puts them in place when their module is imported.

torch: `loader`, `optimizer` (the gate), `loss`, `scaler`, `scheduler`, `clipping`, `probabilities`, `distributed`, `collectives` with `groups`. Frameworks:
`accelerate`, `accelerator`, `accelerated`, `trainer`, `stateful`, `lightning`, `lightning_trainer`, `lightning_launch`, `lightning_resume`,
`lightning_signals`. Loops that no hook sees: `byhand`. A replay of a script for GPUs: `on_cpu`.

What they share: `active` (which rank this process is, and the guard around every hook's body), `passes` (one pass over a loader, whatever made it) with
`indices`, `looked_at`, `left` and `elsewhere`, `tracks` with `own_order` and `order_of_another` (where the training stands in its data), `device` (what the
device has done).
"""
