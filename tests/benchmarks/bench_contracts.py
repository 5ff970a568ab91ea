"""Milliseconds that contracts add to the end of a step: the default one, and nine of the pipeline file. With
`--cpu` those of the processor, which other processes of the machine hardly change.

Each step has been committed group by group, as an explorer does; its contracts are measured and committed
with its end. `recomputation` is not among the nine: it takes as long as the reward functions of its sample.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml

from tests.benchmarks.measure import Seconds, show, show_machine
from tests.benchmarks.rows import outcomes, rollouts
from trinity_data.config import ContractConfig
from trinity_data.config.contracts import DEFAULT_CONTRACTS
from trinity_data.progress import explored_key
from trinity_data.schema import rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_operators.contracts.step_contracts import StepContracts

FILE = Path(__file__).parents[2] / "pipelines" / "gsm8k_contracts.yaml"
GROUP, WARM_UP = 8, 6
SIDES = ("no contracts", "the default one", "nine contracts")


def contracts_of(side: str) -> list[ContractConfig]:
    if side == "the default one":
        return [*DEFAULT_CONTRACTS]
    given = yaml.safe_load(FILE.read_text())["contracts"] if side == "nine contracts" else []
    return [
        # a stop would end the measurement
        ContractConfig.model_validate(each | {"action": "quarantine" if each.get("drops") else "warn"})
        for each in given
        if each["check"] != "recomputation"
    ]


def put_step(store: Store, step: int, num_rows: int) -> None:
    rows = rollouts(step, np.random.default_rng(step), num_rows=num_rows)
    for first in range(0, num_rows, GROUP):
        group = rows.slice(first, GROUP)
        store.commit(Commit(tables={"experiences": group, "outcomes": outcomes(group)}))


def end_step(store: Store, contracts: StepContracts, step: int) -> None:
    counts = [{"stage": "rl", "step": step, "pipeline": "experience", "operator": "reward_std_filter",
               "position": 0, "rows_in": 8, "rows_out": 8}]  # fmt: skip
    operators = rows_to_table("operators", counts)
    commit = asyncio.run(contracts.enforce(step, operators, {})).commit
    tables = {**commit.tables, "operators": operators}
    store.commit(Commit(tables=tables, states=commit.states, progress={explored_key("rl"): step}))


def seconds_a_step(side: str, num_rows: int, num_steps: int, clock: Callable[[], float]) -> Seconds:
    """Of the steps behind a warm-up, in which drift has no steps before."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create_or_open(Path(folder) / "run" / "store")
        contracts = StepContracts(contracts_of(side), store, stage="rl", explorer="explorer")
        seconds = list[float]()
        for step in range(1, WARM_UP + num_steps + 1):
            put_step(store, step, num_rows)
            started = clock()
            end_step(store, contracts, step)
            seconds.append(clock() - started)
        store.close()
    return seconds[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[64, 512])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu else time.perf_counter
    show_machine()
    for num_rows in arguments.rows:
        times: dict[str, Seconds] = {side: [] for side in SIDES}
        for _ in range(arguments.rounds):
            for side in SIDES:
                times[side] += seconds_a_step(side, num_rows, arguments.steps, clock)
        print(f"\nthe end of a step of {num_rows} rows")
        show(times, ours="no contracts", rows=num_rows)
    show_machine()


if __name__ == "__main__":
    main()
