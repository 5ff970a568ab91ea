"""One FSDP worker: holds its shard of the policy, does one optimizer step a batch, writes its weights.

Every method that is a collective is called on all workers with the same arguments.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import init_device_mesh

from trinity_data.errors import TrainerError
from trinity_data.nodes import this_node
from trinity_data.probe import TokenSequences
from trinity_data.processes import this_process
from trinity_data.tokenizer import load_tokenizer
from trinity_data.weight_sending import SendingGroup
from trinity_trainer.algorithms.aggregation import Denominators, masked
from trinity_trainer.algorithms.importance import truncated_importance_weights
from trinity_trainer.algorithms.loss import LossOutput, build_loss
from trinity_trainer.algorithms.policy_losses import PolicyInputs
from trinity_trainer.checkpoint import load_shards, load_weights, save_shards
from trinity_trainer.collate import BatchCollator, MicroBatch, without_sampling
from trinity_trainer.held_weights import HeldWeights
from trinity_trainer.lr_schedule import learning_rate
from trinity_trainer.metrics import StepResult
from trinity_trainer.microbatch import (
    pack_rows,
    packed_length,
    packed_micro_batch,
    plan_micro_batches,
    takes_packed_rows,
    text_config,
)
from trinity_trainer.model import load_policy, save_pretrained, sequence_logprobs, token_logprobs
from trinity_trainer.sending_rank import SendingRank
from trinity_trainer.stage_spec import StageSpec
from trinity_trainer.weight_file import write_weights

DEFAULT_TOKEN_BUDGET = 16_384


class TrainWorker:
    """Runs in a process of its own."""

    def __init__(self, rank: int, world_size: int, store: Store) -> None:
        """The workers find each other by `store`."""
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        self.rank, self.world_size = rank, world_size
        self.mesh = init_device_mesh(self.device.type, (world_size,))
        self.sending: SendingRank | None = None

    def where(self) -> str:
        """For people."""
        return this_process()

    def node(self) -> str:
        """Of Ray's."""
        return this_node()

    def load_model(self, model_path: str) -> None:
        """The policy as it is at the start of the run."""
        self.model_path = model_path
        self.model = load_policy(model_path, self.mesh, self.device)

    def move_to(self, device: str | None) -> None:
        """Policy, reference and the optimizer's state: to `device`, or to the worker's own."""
        target = torch.device(device) if device is not None else self.device
        for model in (self.model, self.reference):
            if model is not None:
                model.to(target)
        for state in self.optimizer.state.values():
            # AdamW keeps its step counts on the CPU
            state |= {name: value.to(target) for name, value in state.items() if name != "step"}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def start_stage(self, spec: StageSpec, *, reference_path: str) -> None:
        """A fresh optimizer, the stage's loss, and the reference model if the loss wants one."""
        args, self.stage_step = spec.algorithm.optimizer, 0
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.lr, betas=args.betas, weight_decay=args.weight_decay
        )
        self.reference: torch.nn.Module | None = None
        if self.sending is not None:
            self.sending.close()
        self.sending = None
        self.change_settings(spec, reference_path=reference_path)

    def change_settings(self, spec: StageSpec, *, reference_path: str) -> None:
        """The stage goes on with other numbers, or another loss; the optimizer keeps its state."""
        args, self.spec = spec.algorithm.optimizer, spec
        for group in self.optimizer.param_groups:
            group.update(betas=args.betas, weight_decay=args.weight_decay)
        self.loss = build_loss(spec.algorithm)
        if self.loss.needs_reference and self.reference is None:
            self.reference = self._load_reference(reference_path, spec.reference_checkpoint)

    def _load_reference(self, model_path: str, checkpoint: str | None) -> torch.nn.Module:
        """The policy as it was when the stage began, without gradients."""
        reference = load_policy(model_path, self.mesh, self.device)
        if checkpoint is not None:
            actor = Path(checkpoint) / "actor"
            if not actor.is_dir():
                raise TrainerError(
                    f"{checkpoint} is missing, and with it the policy that this stage began with, "
                    "which is what its KL is measured from; put the folder back, "
                    "or write algorithm.kl_loss_fn: none"
                )
            load_weights(actor, reference)
        return reference.eval().requires_grad_(False)

    def train_step(self, batch: pa.Table) -> StepResult:
        """One optimizer step over the whole batch, of which this worker takes its share."""
        rows = BatchCollator(without_sampling(batch) if self.loss.supervised else batch)
        algorithm = self.spec.algorithm
        if rows.num_without_advantage and not self.loss.supervised:
            raise TrainerError(
                f"{rows.num_without_advantage} of {rows.num_rows} rows of the batch have no advantage, "
                f"by which {algorithm.algorithm_type!r} trains; choose rows that a run has given one "
                "(`WHERE advantage IS NOT NULL`), or an algorithm without, such as sft"
            )
        denominators = Denominators.of(rows.trained_tokens, max_response_tokens=self.spec.max_response_tokens)
        rate = learning_rate(algorithm.optimizer, self.stage_step, self.spec.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        parts = [
            self._backward(rows, packed_micro_batch(rows, packs, self.device), denominators)
            for packs in self._plan(rows)
        ]
        limit = self.spec.trainer.grad_clip or algorithm.optimizer.clip_grad
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        # the same norm on every worker; a step along a gradient that is no number would
        # ruin the weights for good
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            self.optimizer.step()
        self.stage_step += 1
        metrics = {"grad_norm": grad_norm, "learning_rate": rate, "num_tokens": denominators.num_tokens}
        return self._result(parts, metrics | {"update_skipped": float(skipped)})

    def _plan(self, rows: BatchCollator) -> list[list[list[int]]]:
        """This worker's micro-batches: lists of packs, each the rows that share a prompt, or one row."""
        trainer = self.spec.trainer
        budget = trainer.max_token_len_per_gpu or DEFAULT_TOKEN_BUDGET
        packs = [[row] for row in range(rows.num_rows)]
        # a pair is two neighbors of the plan, each of which must stay a row
        shares_prompts = trainer.shared_prompts and trainer.use_dynamic_bsz and not self.loss.pairwise
        if shares_prompts and takes_packed_rows(self.model):
            # no worker shall lack rows because another shares their prompts
            max_rows = -(-rows.num_rows // self.world_size)
            size = text_config(self.model).hidden_size
            packs = pack_rows(rows, token_budget=budget, max_rows=max_rows, hidden_size=size)
        plan = plan_micro_batches(
            [packed_length(rows, pack) for pack in packs],
            token_budget=budget if trainer.use_dynamic_bsz else None,
            max_rows=trainer.micro_batch_size_per_gpu,
            world_size=self.world_size,
            rows_together=2 if self.loss.pairwise else 1,
        )
        return [[packs[i] for i in chosen] for chosen in plan[self.rank]]

    def _backward(self, rows: BatchCollator, batch: MicroBatch, denominators: Denominators) -> _Part:
        algorithm, correction = self.spec.algorithm, self.spec.algorithm.rollout_correction
        ref_logprobs_BT = weights_BT = None
        if self.reference is not None:
            with torch.no_grad():
                ref_logprobs_BT, _ = token_logprobs(self.reference, batch)
        logprobs_BT, entropy_BT = token_logprobs(self.model, batch, with_entropy=self.loss.needs_entropy)
        sampled_BT = batch.has_logprobs_B[:, None].bool() & batch.mask_BT.bool()
        # a log-prob that is no number says nothing about the sampling policy: its token counts as on-policy
        usable_BT = sampled_BT & torch.isfinite(batch.old_logprobs_BT)
        old_logprobs_BT = logprobs_BT.detach()
        if algorithm.bypass_old_logprobs:
            # as sampled; as recomputed for tokens that nobody sampled
            old_logprobs_BT = torch.where(usable_BT, batch.old_logprobs_BT, old_logprobs_BT)
        if correction.rollout_is is not None:
            weights_BT = truncated_importance_weights(
                batch.old_logprobs_BT,
                logprobs_BT,
                usable_BT,
                cap=correction.rollout_is_threshold,
                level=correction.rollout_is,
            )
        inputs = PolicyInputs(
            logprobs_BT=logprobs_BT,
            old_logprobs_BT=old_logprobs_BT,
            advantages_BT=batch.advantages_BT,
            mask_BT=batch.mask_BT,
            ref_logprobs_BT=ref_logprobs_BT,
            entropy_BT=entropy_BT,
            weights_BT=weights_BT,
        )
        output = self.loss(inputs, denominators)
        # FSDP averages gradients over workers; the loss is already a share of the global mean
        torch.autograd.backward(output.loss * self.world_size)
        difference_BT = masked((logprobs_BT.detach() - batch.old_logprobs_BT).abs(), usable_BT)
        return _Part(
            batch,
            output,
            rows.response_part(batch, logprobs_BT),
            [] if ref_logprobs_BT is None else rows.response_part(batch, ref_logprobs_BT),
            float(difference_BT.max()),
            float(difference_BT.sum()),
            int((sampled_BT & ~usable_BT).sum()),
        )

    def _result(self, parts: list[_Part], metrics: dict[str, float]) -> StepResult:
        outputs = [part.output.metrics for part in parts]
        sums = {name: sum(float(each[name]) for each in outputs) for name in outputs[0]}
        num_tokens = max(metrics["num_tokens"], 1)
        sums["logprob_diff_mean"] = sum(part.logprob_diff_sum for part in parts) / num_tokens
        sums["nonfinite_logprobs"] = sum(part.num_nonfinite for part in parts)
        metrics |= self._over_workers(sums, dist.ReduceOp.SUM)
        largest = {"logprob_diff_max": max(part.logprob_diff_max for part in parts)}
        metrics |= self._over_workers(largest, dist.ReduceOp.MAX)
        if self.loss.supervised:
            # at temperature 1, so that there is nothing to compare
            del metrics["logprob_diff_mean"], metrics["logprob_diff_max"]
        used = [part for part in parts if part.batch.rows]
        return StepResult(
            metrics=metrics,
            rows=[row for part in used for row in part.batch.rows],
            importance_weights=[w for part in used for w in part.output.importance_weight_mean_B.tolist()],
            clipped=[c for part in used for c in part.output.clipped_share_B.tolist()],
            loss_shares=[s for part in used for s in part.output.loss_share_B.tolist()],
            logprobs=[row for part in used for row in part.logprobs],
            ref_logprobs=[row for part in used for row in part.ref_logprobs],
        )

    def _over_workers(
        self, values: Mapping[str, float], operation: dist.ReduceOp.RedOpType
    ) -> dict[str, float]:
        names = sorted(values)
        tensor = torch.tensor([values[name] for name in names], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, operation)
        return dict(zip(names, tensor.tolist(), strict=True))

    def write_weights(
        self, folder: str, dtype: str, sequences: TokenSequences
    ) -> tuple[int, list[list[float]]]:
        """The weights as a Hugging Face folder, which the caller renames.

        Returns the bytes written, on rank 0, and the log-probs of the sequences.
        """
        num_bytes = write_weights(self.model, Path(folder), getattr(torch, dtype))
        return num_bytes, sequence_logprobs(self.model, sequences, self.device) if sequences else []

    def keep_weights(
        self,
        version: int,
        dtype: str,
        sequences: TokenSequences,
        *,
        forget_before: int,
        in_main_memory: bool,
    ) -> tuple[int, list[list[float]]]:
        """Holds the weights as `version`, to be sent; drops those before another.

        Returns the bytes of the version, and the log-probs of the sequences.
        """
        if self.sending is None:
            kept_on = torch.device("cpu") if in_main_memory else self.device
            self.sending = SendingRank(HeldWeights(self.model, self.device, kept_on=kept_on))
        num_bytes = self.sending.held.keep(version, getattr(torch, dtype), forget_before=forget_before)
        return num_bytes, sequence_logprobs(self.model, sequences, self.device) if sequences else []

    def offer_group(self, version: int, num_workers: int, max_buffer: int | None) -> SendingGroup:
        """As this rank knows it."""
        assert self.sending is not None
        return self.sending.offer(version, num_workers, max_buffer)

    def send_weights(self, version: int, group: SendingGroup) -> str:
        """To the other members of the group. Returns why that failed; empty where it did not."""
        assert self.sending is not None
        return self.sending.send(version, group)

    def save(self, partial: str, extra: Mapping[str, Any], *, with_huggingface: bool) -> None:
        """This worker's part of a checkpoint, into a folder that the caller renames when all are done."""
        actor = Path(partial) / "actor"
        actor.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        save_shards(actor, self.model, self.optimizer, dict(extra) | {"stage_step": self.stage_step})
        if with_huggingface:
            save_pretrained(self.model, actor / "huggingface")
            if self.rank == 0:
                load_tokenizer(self.model_path).save_pretrained(actor / "huggingface")
        dist.barrier()

    def load(self, checkpoint: str, *, with_optimizer: bool) -> None:
        """The weights of a checkpoint, and the optimizer where the stage goes on."""
        description = load_shards(
            Path(checkpoint) / "actor", self.model, self.optimizer if with_optimizer else None
        )
        if with_optimizer:
            self.stage_step = int(description["stage_step"])


@dataclass(frozen=True)
class _Part:
    batch: MicroBatch
    output: LossOutput
    logprobs: list[np.ndarray[Any, np.dtype[np.float32]]]
    ref_logprobs: list[np.ndarray[Any, np.dtype[np.float32]]]
    """Empty without a reference."""
    logprob_diff_max: float
    logprob_diff_sum: float
    num_nonfinite: int
    """Trained tokens whose sampled log-prob is no number."""
