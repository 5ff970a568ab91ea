"""The explorer of a stage, with the engines, task streams and processes that it works with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path

from trinity_data.config import StageConfig
from trinity_data.launch.compute import NextStage, RunContext, runner_of
from trinity_data.launch.live_roles import explorer_roles
from trinity_data.launch.pipelines import configured_and_chain
from trinity_data.launch.workflows import ask_for_defaults, process_settings, workflow_finder
from trinity_data.reporter import Reporter
from trinity_data.synchronizer import Synchronizer
from trinity_explorer.explorer import Explorer, build_explorer
from trinity_explorer.serve.sessions import Sessions
from trinity_explorer.steps import Shared
from trinity_explorer.workflows.pool import WorkflowPool
from trinity_operators.experience_workers import declared_workers, with_workers
from trinity_operators.remote_operators import OwnWorkers


@asynccontextmanager
async def stage_explorer(
    run: RunContext,
    stage: StageConfig,
    next_stage: NextStage,
    synchronizer: Synchronizer,
    reporter: Reporter,
    shared: Shared | None = None,
) -> AsyncIterator[Explorer]:
    """Ready to explore. Its task streams and workflow processes end with the block, its engines do not."""
    base_dir = run.inputs.base_dir
    async with WorkflowPool(process_settings(stage)) as workflows:
        ask_for_defaults(workflows, stage, base_dir)
        streams = next_stage.streams(stage)
        for stream in streams.values():
            stream.start()
        # processes of workflows take seconds to start, as engines do
        engines, _ = await asyncio.gather(run.computing.engines(stage), workflows.start())
        configured, chain = configured_and_chain(stage, base_dir)
        runner = runner_of(stage, run.inputs, engines, workflow_finder(workflows, stage, base_dir))
        sessions = None
        if stage.serves:
            sessions = Sessions(stage, run.store, runner)
            await asyncio.to_thread(sessions.resume)
            if weights := synchronizer.published:
                # agents are answered though the next step may wait for weights of its own
                await engines.rollout.load_weights(weights[max(weights)])
        explorer = build_explorer(
            stage,
            run.inputs,
            streams,
            store=run.store,
            runner=runner,
            operators=with_workers(
                chain,
                configured,
                stage.data_processor.experience_pipeline,
                base_dir,
                kept=run.kept_workers,
                later=_workers_of_the_next_stage(run, stage),
            ),
            synchronizer=synchronizer,
            reporter=reporter,
            sessions=sessions,
            shared=shared,
        )
        try:
            with explorer_roles(run.status, stage, engines, synchronizer):
                async with _endpoint(sessions, stage, run.config.job_dir):
                    yield explorer
        finally:
            await next_stage.close_streams(stage)


def _endpoint(
    sessions: Sessions | None, stage: StageConfig, job_dir: Path
) -> AbstractAsyncContextManager[None]:
    """That of a stage that serves."""
    if sessions is None:
        return nullcontext()
    # with aiohttp, a tenth of a run's imports
    from trinity_data.launch.serve import serving

    return serving(sessions, stage, job_dir)


def _workers_of_the_next_stage(run: RunContext, stage: StageConfig) -> list[OwnWorkers]:
    """That its experience operators are to have; none where it only trains, which may need their GPUs."""
    stages, base_dir = run.config.stages, run.inputs.base_dir
    following = stages[stages.index(stage) + 1 :]
    if not following or not following[0].explores:
        return []
    configured, chain = configured_and_chain(following[0], base_dir)
    return declared_workers(chain, configured, following[0].data_processor.experience_pipeline, base_dir)
