"""Runs rollouts of a stage, for its explorer and for its evaluator."""

from __future__ import annotations

from collections.abc import Callable

from trinity_data.config import ExplorerConfig, ModelConfig, RolloutArgs
from trinity_data.dataset.task import Task
from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.chat import ChatClient, RequestBatcher
from trinity_explorer.engines.engine import Sampling
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.rollout import Group, Limits, Row, run_rollout
from trinity_explorer.workflows.workflow import Workflow


class RolloutRunner:
    """What all rollouts of a stage have in common."""

    def __init__(
        self,
        config: ExplorerConfig,
        engines: EnginePool,
        template: ChatTemplate,
        workflow_for: Callable[[Task], Workflow],
        *,
        seed: int,
    ) -> None:
        self.engines, self.template, self.workflow_for, self.seed = engines, template, workflow_for, seed
        self.limits = Limits(config.max_timeout, config.max_retry_times)

    async def run(
        self,
        group: Group,
        rollout: int,
        *,
        batcher: RequestBatcher,
        sampling: Sampling,
        source: Row,
        seed: int | None = None,
    ) -> list[Row]:
        """The rows of one rollout; `seed` in place of the run's. See `run_rollout`."""
        return await run_rollout(
            group,
            rollout,
            workflow=self.workflow_for(group.task),
            build_model=lambda number: ChatClient(batcher, self.template, sampling.with_seed(number)),
            limits=self.limits,
            seed=self.seed if seed is None else seed,
            source=source,
        )


def sampling_of(args: RolloutArgs, model: ModelConfig) -> Sampling:
    """How a task set is sampled, but for the seed."""
    return Sampling(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        # the end token counts as one, so 1 asks for nothing and leaves the distribution as it is
        min_tokens=model.min_response_tokens if model.min_response_tokens > 1 else 0,
        max_tokens=args.max_tokens,
        seed=0,
    )
