"""What is judged in every run without a threshold that one could set: what a batch, a loss or a failing rank is found to be.

Owns their words for `watchdog rules`. The judgement is the guard's in the rank (`batch.*`), `loss.py`'s and `death.py`'s, because orders follow from it.
"""

from __future__ import annotations

from torch_watchdog.rules.sign import About

__all__ = ["ALWAYS"]

_STOP_65 = "all ranks stop before the step (65), or leave it out (--policy skip)"
_STOP_70 = "all ranks stop (70); the newest finite checkpoint is named"
_FREE = "the other ranks are freed and one saves where it holds the whole state"

ALWAYS = (
    About(
        name="bad_batch", kind="batch.index_out_of_range", severity="critical", action=_STOP_65, watches="every index that a batch leads to, against its table",
        says="rank 1, step 23: tokens[2,17] = 733, allowed 0..511 in embedding",
    ),
    About(
        name="bad_batch", kind="batch.not_finite", severity="critical", action=_STOP_65, watches="float inputs, for NaN and infinity",
        says="rank 1, step 23: values[0,0] is nan",
    ),
    About(
        name="bad_batch", kind="batch.empty", severity="critical", action=_STOP_65, watches="labels, for a batch of which none is supervised",
        says="rank 0, step 40: no label of this batch is supervised: its mean loss is 0/0",
    ),
    About(
        name="bad_batch", kind="batch.shape", severity="critical", action=_STOP_65, watches="sizes that must agree",
        says="rank 0, step 12: the sequence is 40 long, the table of positions has 34 rows",
    ),
    About(
        name="bad_batch", kind="batch.dtype", severity="critical", action=_STOP_65, watches="types, against what the operator takes",
        says="rank 0, step 12: ids are float32, embedding takes integers",
    ),
    About(
        name="bad_batch", kind="batch.device", severity="critical", action=_STOP_65, watches="where tensors lie",
        says="rank 0, step 12: labels lie on the CPU, the model on cuda:0",
    ),
    About(
        name="size_outlier", kind="batch.size_outlier", watches="the size of each batch against all before it",
        says="rank 1, step 90: 15360 elements, the largest before had 384",
    ),
    About(
        name="probability", kind="probability.out_of_range", severity="critical", action=_STOP_65,
        watches="what binary_cross_entropy and multinomial are given", says="rank 0, step 7: chance[1,0] = 255, allowed 0..1",
    ),
    About(
        name="loss_not_finite", kind="loss.not_finite", severity="critical", action=_STOP_70,
        watches="each rank's own loss, before the all-reduce spreads it; under a GradScaler 4 in a row", says="rank 1, step 300: the loss is nan",
    ),
    About(
        name="grad_not_finite", kind="grad.not_finite", severity="critical", action=_STOP_70,
        watches="the norm that clip_grad_norm_ computes, where the losses were finite; not under a GradScaler, which looks itself",
        says="all 2 ranks, step 5: the norm of the gradients is nan, the losses were finite",
    ),
    About(
        name="activation_not_finite", kind="activation.not_finite", severity="critical", action="evidence of the loss's own finding",
        watches="after a loss that is no number: the first module whose output is none, in one traced step", says="rank 1: head.norm gives the first NaN",
    ),
    About(
        name="rank_failed", kind="rank.exception", severity="critical", action=_FREE, watches="Python's exceptions",
        says="rank 1 raised ValueError: a mistake of this script",
    ),
    About(
        name="rank_failed", kind="rank.died", severity="critical", action=_FREE, watches="exit codes and signals", says="rank 0 was killed by SIGKILL",
    ),
    About(
        name="rank_failed", kind="rank.assert", severity="critical", action=_FREE, watches="device-side assertions in what a rank prints",
        says="rank 3: an index is outside of the table that gather reads; sample 7",
    ),
    About(
        name="rank_failed", kind="memory.oom", severity="critical", action=_FREE, watches="out-of-memory errors and kills",
        says="rank 0: CUDA out of memory, tried to allocate 40 GiB",
    ),
    About(
        name="rank_failed", kind="config.ddp", severity="critical", action=_FREE, watches="DistributedDataParallel's errors about how it was set up",
        says="rank 0: parameters got no gradient in the step before",
    ),
    About(
        name="rank_failed", kind="loader.worker_died", severity="critical", action=_FREE, watches="workers of data loaders",
        says="rank 2: the loader's worker 4711 was killed by SIGKILL",
    ),
    About(
        name="hang", kind="rank.hang", severity="critical", action=f"stacks; then {_FREE} (75)",
        watches="steps that stay away for longer than this job's own steps explain, and where each rank is then",
        says="rank 1 is late; no step for 82 s, where one is usual every 0.4 s",
    ),
    About(
        name="desync", kind="rank.desync", severity="critical", action=_FREE, watches="which collectives ranks are in, and in which step they end",
        says="rank 1 all-reduces 3 elements, the others 5",
    ),
)  # fmt: skip
