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
         "rank 1, step 23: ids[2,17] is 733, allowed 0..511 (embedding, table), dataset sample 1481"),
        ("batch.not_finite", "float inputs, for NaN and infinity", "rank 1, step 23: values[0,0] is nan: not finite before the model has touched it"),
        ("batch.empty", "labels, for a batch of which none is supervised", "rank 0, step 40: labels: nothing is left for cross_entropy"),
        ("batch.shape", "sizes that must agree", "rank 0, step 12: mask (4, 5) does not fit input_ids (4, 6)"),
        ("batch.dtype", "types, against what the operator takes", "rank 0, step 12: input_ids has dtype float32; embedding needs int64 or int32"),
        ("batch.device", "where tensors lie", "rank 0, step 12: labels is on device cpu; cross_entropy had it on cuda:0"),
    )),
    ("probability", _STOP_65, (
        ("probability.out_of_range", "what binary_cross_entropy and multinomial are given, by the model or in the batch",
         "rank 0, step 7: binary_cross_entropy takes probabilities and was given values from -2.71 to 3.14"),
    )),
    ("loss_not_finite", _STOP_70, (
        ("loss.not_finite", "each rank's own loss, before the all-reduce spreads it; under a GradScaler several in a row", "rank 1, step 300: the loss is nan"),
    )),
    ("grad_not_finite", _STOP_70, (
        ("grad.not_finite",
         "the norm that clip_grad_norm_ computes, or we do (watch_gradients), where losses were finite; not under a GradScaler, which looks itself",
         "all 2 ranks, step 5: the norm of the gradients is nan, the losses were finite"),
    )),
    ("activation_not_finite", _EVIDENCE, (
        ("activation.not_finite", "after a loss that is no number: the first module whose output is none, in one traced step",
         "rank 1, step 153: the loss is nan: the output of head (Linear, float32) is not finite: nan in 16 of 64 values"),
    )),
    ("rank_failed", _FREE, (
        ("rank.exception", "Python's exceptions", "rank 1, in step 153: ValueError: a mistake of this script at train.py:250"),
        ("rank.died", "exit codes and signals", "rank 0, in step 152: killed by SIGKILL"),
        ("rank.assert", "device-side assertions in what a rank prints",
         "rank 3, in step 40: device-side assertion in vectorized_gather_kernel: a row number used to copy whole rows lies outside the indexed dimension; "
         "flat position in the index tensor 15 of index (input ids)"),
        ("memory.oom", "out-of-memory errors and kills",
         "rank 0, in step 40: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 40.00 GiB at train.py:31"),
        ("config.ddp", "DistributedDataParallel's errors about how it was set up",
         "rank 0, in step 1: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one at train.py:31"),
        ("loader.worker_died", "workers of data loaders", "rank 2, in step 40: data loader worker (pid 4711) killed by signal: Killed at train.py:31"),
    )),
    ("hang", f"stacks; then {_FREE} (75)", (
        ("rank.hang", "steps that stay away for longer than this job's own steps explain, and where each rank is then",
         "rank 1, in step 40: it is not in a collective, but in File \"train.py\", line 70, in forward; no step for 82 s, where one is usual every 0.4 s"),
    )),
    ("desync", _FREE, (
        ("rank.desync", "which collectives ranks are in, and in which step they end",
         "rank 1, step 105: the shapes differ across the ranks: all_reduce of (3,) float32 here, all_reduce of (5,) float32 on rank 0"),
    )),
)  # fmt: skip

ALWAYS = (
    About(
        name="size_outlier", kind="batch.size_outlier", watches="the size of each batch against all before it",
        says="rank 1, step 90: ids [32, 480] has 15360 elements, the largest batch so far had 384",
    ),
    *(
        About(name=name, kind=kind, severity="critical", action=action, watches=watches, says=says)
        for name, action, kinds in _CRITICAL
        for kind, watches, says in kinds
    ),
)  # fmt: skip
