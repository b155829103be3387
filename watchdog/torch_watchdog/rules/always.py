"""What is judged in every run and cannot be turned off: what a batch, a loss or a failing rank is found to be.

Owns their words for `watchdog rules`; the numbers that one may set are in `limits.py`. The judgement is the guard's in the rank (`batch.*`), `loss.py`'s
and `death.py`'s, because orders follow from it.
"""

from __future__ import annotations

from torch_watchdog.rules.sign import About

__all__ = ["ALWAYS"]

_STOP_65 = "all ranks stop before the step (65), or leave it out (--policy skip)"
_STOP_70 = "all ranks stop (70); the newest finite checkpoint is named"
_FREE = "the other ranks are freed and one saves where it holds the whole state"
_EVIDENCE = "evidence of the loss's own finding"

# name and action, then a line for each kind: what is watched, and an example of what is said
_CRITICAL = (
    ("bad_batch", _STOP_65, (
        ("batch.index_out_of_range", "every index that a batch leads to, against its table",
         "rank 1, step 23: tokens[2,17] = 733, allowed 0..511 in embedding"),
        ("batch.not_finite", "float inputs, for NaN and infinity", "rank 1, step 23: values[0,0] is nan"),
        ("batch.empty", "labels, for a batch of which none is supervised", "rank 0, step 40: no label of this batch is supervised: its mean loss is 0/0"),
        ("batch.shape", "sizes that must agree", "rank 0, step 12: the sequence is 40 long, the table of positions has 34 rows"),
        ("batch.dtype", "types, against what the operator takes", "rank 0, step 12: ids are float32, embedding takes integers"),
        ("batch.device", "where tensors lie", "rank 0, step 12: labels lie on the CPU, the model on cuda:0"),
    )),
    ("probability", _STOP_65, (
        ("probability.out_of_range", "what binary_cross_entropy and multinomial are given", "rank 0, step 7: chance[1,0] = 255, allowed 0..1"),
    )),
    ("loss_not_finite", _STOP_70, (
        ("loss.not_finite", "each rank's own loss, before the all-reduce spreads it; under a GradScaler 4 in a row", "rank 1, step 300: the loss is nan"),
    )),
    ("grad_not_finite", _STOP_70, (
        ("grad.not_finite",
         "the norm that clip_grad_norm_ computes, or we do (watch_gradients), where losses were finite; not under a GradScaler, which looks itself",
         "all 2 ranks, step 5: the norm of the gradients is nan, the losses were finite"),
    )),
    ("activation_not_finite", _EVIDENCE, (
        ("activation.not_finite", "after a loss that is no number: the first module whose output is none, in one traced step",
         "rank 1: head.norm gives the first NaN"),
    )),
    ("rank_failed", _FREE, (
        ("rank.exception", "Python's exceptions", "rank 1 raised ValueError: a mistake of this script"),
        ("rank.died", "exit codes and signals", "rank 0 was killed by SIGKILL"),
        ("rank.assert", "device-side assertions in what a rank prints", "rank 3: an index is outside of the table that gather reads; sample 7"),
        ("memory.oom", "out-of-memory errors and kills", "rank 0: CUDA out of memory, tried to allocate 40 GiB"),
        ("config.ddp", "DistributedDataParallel's errors about how it was set up", "rank 0: parameters got no gradient in the step before"),
        ("loader.worker_died", "workers of data loaders", "rank 2: the loader's worker 4711 was killed by SIGKILL"),
    )),
    ("hang", f"stacks; then {_FREE} (75)", (
        ("rank.hang", "steps that stay away for longer than this job's own steps explain, and where each rank is then",
         "rank 1 is late; no step for 82 s, where one is usual every 0.4 s"),
    )),
    ("desync", _FREE, (
        ("rank.desync", "which collectives ranks are in, and in which step they end", "rank 1 all-reduces 3 elements, the others 5"),
    )),
)  # fmt: skip

ALWAYS = (
    About(
        name="size_outlier", kind="batch.size_outlier", watches="the size of each batch against all before it",
        says="rank 1, step 90: 15360 elements, the largest before had 384",
    ),
    *(
        About(name=name, kind=kind, severity="critical", action=action, watches=watches, says=says)
        for name, action, kinds in _CRITICAL
        for kind, watches, says in kinds
    ),
)  # fmt: skip
