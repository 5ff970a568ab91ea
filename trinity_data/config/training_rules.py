"""Rules about how the trainer steps: its schedule, its micro-batches, its advantages. See rules.py for what a rule is."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_data.config.problems import Finding, show
from trinity_data.config.run import StageConfig


def the_schedule_knows_its_length(given: StageConfig, filled: StageConfig) -> Iterator[Finding]:
    """What is left of a task set after its operators is known only at its end; stored rows are counted before."""
    optimizer = filled.algorithm.optimizer
    if filled.mode != "both" or filled.buffer.total_steps is not None:
        return
    by_ratio = optimizer.lr_warmup_steps < 0 and optimizer.lr_warmup_steps_ratio > 0
    todo = "as the number of steps is not known before the last one; write buffer.total_steps"
    if optimizer.lr_scheduler_type == "cosine":
        text = f"found 'cosine' in a stage that explores by epochs, {todo}, or constant"
        yield Finding(("algorithm", "optimizer", "lr_scheduler_type"), text)
    if by_ratio:
        text = f"found {optimizer.lr_warmup_steps_ratio:g} in a stage that explores by epochs, {todo}, or lr_warmup_steps"
        yield Finding(("algorithm", "optimizer", "lr_warmup_steps_ratio"), text)


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
        text = "missing; with use_dynamic_bsz false, how many rows does a micro-batch hold? write a whole number ≥ 1"
        yield Finding(("trainer", "micro_batch_size_per_gpu"), text)
    elif pairs and size % 2:
        text = f"found {size} with 'dpo', which trains pairs; allowed: even numbers"
        yield Finding(("trainer", "micro_batch_size_per_gpu"), text)
    for key in ("max_token_len_per_gpu", "shared_prompts"):
        if key in fields and getattr(trainer, key):
            text = f"found {show(getattr(trainer, key))}; has no effect with use_dynamic_bsz false, which counts rows"
            yield Finding(("trainer", key), f"{text}; remove it")


def stored_rows_have_their_advantages(given: StageConfig, filled: StageConfig) -> Iterator[Finding]:
    if filled.mode != "train":
        return
    for key in ("advantage_fn", "advantage_fn_args"):
        if key in given.algorithm.model_fields_set:
            text = "has no effect with mode 'train', whose rows keep the advantages that their run gave them"
            yield Finding(("algorithm", key), f"{text}; remove it")


TRAINING_RULES = (
    the_schedule_knows_its_length,
    micro_batches_are_cut_one_way,
    stored_rows_have_their_advantages,
)
