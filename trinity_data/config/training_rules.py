"""Rules about how the trainer steps: its schedule, its micro-batches, its advantages.

See rules.py for what a rule is.
"""

from __future__ import annotations

from collections.abc import Iterator

from trinity_data.config.problems import Finding, show
from trinity_data.config.run import StageConfig


def the_schedule_knows_its_length(given: StageConfig, filled: StageConfig) -> Iterator[Finding]:
    """Steps are given, or counted by rows before the first one;
    not where tasks may be dropped or added on the way.
    """
    optimizer, path = filled.algorithm.optimizer, ("algorithm", "optimizer")
    if filled.mode != "both" or filled.buffer.total_steps is not None:
        return
    operators, refills = filled.data_processor.task_pipeline.operators, filled.explorer.refill_rounds
    if not operators and not refills:
        return
    why = "task operators may drop tasks" if operators else "refill_rounds takes more tasks"
    text = f"in a stage that explores by epochs, whose steps cannot be counted before, as {why}"
    if optimizer.lr_scheduler_type == "cosine":
        todo = "write buffer.total_steps, or lr_scheduler_type: constant"
        yield Finding((*path, "lr_scheduler_type"), f"found 'cosine' {text}; {todo}")
    if optimizer.lr_warmup_steps < 0 and optimizer.lr_warmup_steps_ratio > 0:
        todo = "write buffer.total_steps, or lr_warmup_steps"
        found = f"found {optimizer.lr_warmup_steps_ratio:g}"
        yield Finding((*path, "lr_warmup_steps_ratio"), f"{found} {text}; {todo}")


def micro_batches_are_cut_one_way(given: StageConfig, filled: StageConfig) -> Iterator[Finding]:
    trainer, fields = filled.trainer, given.trainer.model_fields_set
    if trainer.use_dynamic_bsz:
        if trainer.micro_batch_size_per_gpu is not None:
            text = (
                "has no effect with use_dynamic_bsz true, which counts tokens; write use_dynamic_bsz: false"
            )
            yield Finding(("trainer", "micro_batch_size_per_gpu"), f"{text}, or remove it")
        return
    size, pairs = trainer.micro_batch_size_per_gpu, filled.algorithm.algorithm_type == "dpo"
    if size is None:
        text = (
            "missing; with use_dynamic_bsz false, "
            "how many rows does a micro-batch hold? write a whole number ≥ 1"
        )
        yield Finding(("trainer", "micro_batch_size_per_gpu"), text)
    elif pairs and size % 2:
        text = f"found {size} with 'dpo', which trains pairs; allowed: even numbers"
        yield Finding(("trainer", "micro_batch_size_per_gpu"), text)
    for key in ("max_token_len_per_gpu", "shared_prompts"):
        if key in fields and getattr(trainer, key):
            text = (
                f"found {show(getattr(trainer, key))}; has no effect with use_dynamic_bsz false, "
                "which counts rows"
            )
            yield Finding(("trainer", key), f"{text}; remove it")


TRAINING_RULES = (
    the_schedule_knows_its_length,
    micro_batches_are_cut_one_way,
)
