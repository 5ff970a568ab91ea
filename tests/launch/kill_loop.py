"""Kills explorer, trainer and writer of a run at random moments, again and again. `make soak`, or
`python -m tests.launch.kill_loop --kills N`.

A child process holds all of a run: the stages, the explorer with the fake engine, the store and a trainer
rank; only Ray, which would take most of the time, is left out. Each run is killed until it is done, and must
then hold the same rows and end at the same weights as one that nobody killed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch.distributed import FileStore
from transformers.utils.logging import disable_progress_bar

from tests.forked import Send, Work, fork, in_a_process
from trinity_data.config import RunConfig
from trinity_data.config.loading import load_pipeline_file
from trinity_data.dataset.reader import Source
from trinity_data.dataset.task import build_task_rows
from trinity_data.launch.compute import Compute, NextStage, RunContext
from trinity_data.launch.configuration import take_configuration
from trinity_data.launch.inputs import RunInputs
from trinity_data.launch.stage import StageRun
from trinity_data.monitor import NoMonitor
from trinity_data.processes import environment
from trinity_data.query.audit import audit
from trinity_data.restarts import RestartLimit
from trinity_data.shutdown import Shutdown
from trinity_data.stage_inputs import StageInputs
from trinity_data.status import Status
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.tokenizer import load_tokenizer
from trinity_data.weights import WeightFolders
from trinity_operators.task_pipeline import TaskStream
from trinity_trainer.worker import TrainWorker
from trinity_trainer.worker_group import StartedWorkers, WorkerGroup, _batch_columns

FILE = Path(__file__).with_name("fake.yaml")
NUM_TASKS = 200
CONTRACTS = (
    "contracts=[{name: repeats, check: duplicates, max: 0, action: quarantine}, "
    "{name: jump, check: drift, column: reward, steps: 2, max: 0.1}, "
    "{name: again, check: recomputation, sample: 4, action: stop}]"
)


class OneRank(WorkerGroup):
    """A rank in this process, so that a kill hits it together with the rest."""

    def __init__(self) -> None:
        super().__init__(lambda meeting: StartedWorkers(), RestartLimit(0))
        self.rank = TrainWorker(0, 1, FileStore(str(self._meeting.path / "ranks"), 1))

    async def train_step(self, batch: pa.Table) -> tuple[dict[str, float], pa.Table]:
        results = await self._all("train_step", batch)
        return results[0].metrics, _batch_columns(batch, results)

    async def _all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [await asyncio.to_thread(getattr(self.rank, method), *args, **kwargs)]


@dataclass
class Count:
    """What became of all runs together."""

    kills: int = 0
    runs: int = 0
    states: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.kills:,} kills of {self.runs} runs: {dict(self.states)}; {len(self.wrong)} things wrong"
        )


def kill_runs(folder: Path, kills: int, *, steps: int, seed: int) -> Count:
    """Kills runs until there were so many kills, then lets the last one end."""
    chance, count = random.Random(seed), Count()
    disable_progress_bar()
    variables = {"TRINITY_CHECKPOINT_ROOT_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    with environment(variables):
        whole = partial(run_to_the_end, f"buffer.total_steps={steps}", "name=whole")
        expected = in_a_process(whole, count.wrong)
        while count.kills < kills and not count.wrong:
            name = f"name=killed_{count.runs}"
            run = partial(run_to_the_end, f"buffer.total_steps={steps}", name)
            while count.kills < kills and _kill(run, chance.uniform(0, 4), count.wrong):
                count.kills += 1
            found = in_a_process(run, count.wrong)
            count.runs += 1
            if found != expected:
                count.wrong.append(f"{name}: {found} instead of {expected}")
            for state, number in json.loads(found or "{}").get("states", {}).items():
                count.states[state] += number
    return count


def _kill(run: Work, seconds: float, wrong: list[str]) -> bool:
    """False when the run had ended before; one that failed by itself is wrong."""
    output, pid = fork(run)
    with output:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code > 0:
            wrong.append(output.read())
    return code == -signal.SIGKILL


def run_to_the_end(steps: str, name: str, send: Send) -> None:
    """Runs or resumes, and sends what the run holds in the end."""
    config = load_pipeline_file(FILE, [steps, name, CONTRACTS])
    config.job_dir.mkdir(parents=True, exist_ok=True)
    store = Store.create_or_open(config.job_dir / "store")
    asyncio.run(_run_stages(config, store))
    store.seal()
    store.close()
    job = config.job_dir
    send(json.dumps({"states": _states(job), "rows": _rows(job), "weights": _weights(job)}))


async def _run_stages(config: RunConfig, store: Store) -> None:
    resources, ranks = RunInputs(config), OneRank()
    # the engines are fake, which need no Ray
    computing = Compute(
        num_gpus=0, machine_has_gpus=False, env={}, model_path=resources.model_path,
        tokenizer=load_tokenizer(resources.model_path),
    )  # fmt: skip
    preparing: Future[StageInputs] = Future()
    preparing.set_result(
        StageInputs(
            resources.model_path, computing.tokenizer, config.seed, config.file.parent,
            source_of=resources.source,
        )
    )  # fmt: skip
    context = RunContext(
        config=config, preparing=preparing, store=store, status=Status(config.name),
        computing=computing, configurations=take_configuration(config, store), stop=Shutdown(),
    )  # fmt: skip
    await ranks.load_model(resources.model_path)
    first_step, ahead = 1, NextStage(context)
    # before one is started beside the training of another stage
    for stage in config.stages:
        if stage.mode == "both":
            for stream in ahead.streams(stage).values():
                assert isinstance(stream, TaskStream)
                _read_tasks(stream)
    for stage in config.stages:
        done = store.progress(f"stage_done/{stage.stage_name}")
        if done is None:
            folders = WeightFolders(config.job_dir, "checkpoint")
            run = StageRun(context, stage, first_step, ranks, folders, ahead, NoMonitor())
            done = await run.run()
        first_step = int(done) + 1


def _read_tasks(stream: TaskStream) -> None:
    """The task set at once, so that no Ray is wanted for it."""
    if stream.store.progress(stream.key):
        return
    source = Source(stream.spec.source)
    rows = build_task_rows(
        stream.spec.taskset, source.rows(range(NUM_TASKS)), stage=stream.spec.stage, source=source.name,
        source_rows=list(range(NUM_TASKS)), first_position=0,
    )  # fmt: skip
    stream.store.commit(
        Commit(
            tables={"tasks": rows.tasks}, progress={stream.key: {"rows_read": NUM_TASKS, "exhausted": True}}
        )
    )


def _states(job: Path) -> dict[str, int]:
    """How many experiences are in each state.

    Raises when the books do not balance or a row was trained twice.
    """
    if problems := audit(job).problems:
        raise AssertionError(f"{job}: {problems}")
    with open_sql([job]) as session:
        twice = session.query("SELECT experience_id FROM batches GROUP BY ALL HAVING count(*) > 1")
        if twice.num_rows:
            raise AssertionError(f"{job}: trained twice: {twice['experience_id'].to_pylist()}")
        rows = session.query("SELECT state, count(*) AS n FROM experiences GROUP BY state ORDER BY state")
    return {row["state"]: row["n"] for row in rows.to_pylist()}


def _rows(job: Path) -> str:
    """What was generated, its outcomes, when it was trained, and what contracts found, as one hash."""
    with open_sql([job]) as session:
        rows = session.query(
            "SELECT experience_id, token_ids, logprobs, raw_reward, reward, advantage, state, trained_step "
            "FROM experiences ORDER BY experience_id"
        )
        found = session.query("SELECT stage, step, contract, value, dropped_ids FROM contracts ORDER BY ALL")
        broken = session.query("SELECT step FROM events WHERE kind = 'contract_broken' ORDER BY step")
    tables = [each.to_pylist() for each in (rows, found, broken)]
    return hashlib.sha256(repr(tables).encode()).hexdigest()


def _weights(job: Path) -> str:
    newest = max(job.glob("global_step_*"), key=lambda folder: int(folder.name.rpartition("_")[2]))
    return hashlib.sha256(
        (newest / "actor" / "model_world_size_1_rank_0.safetensors").read_bytes()
    ).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        count = kill_runs(Path(folder), arguments.kills, steps=arguments.steps, seed=arguments.seed)
    print(f"{count}; {time.monotonic() - started:,.0f} s")
    for problem in count.wrong[:10]:
        print(f"- {problem}")
    sys.exit(bool(count.wrong))


if __name__ == "__main__":
    main()
