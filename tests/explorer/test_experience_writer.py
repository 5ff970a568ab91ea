"""Experience operators after a resume."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import OperatorError
from trinity_data.schema import experience_id, group_id
from trinity_data.store.store import Store
from trinity_explorer.experience_writer import ExperienceWriter
from trinity_explorer.rollout import Row
from trinity_operators.base import Filter, FilterResult, Operator
from trinity_operators.experience_pipeline import ExperiencePipeline
from trinity_operators.filters import RewardFilter


class EveryThird(Filter):
    """Keeps every third row that it has ever seen."""

    keeps_state = True
    start = 0

    def apply(self, rows: pa.Table) -> FilterResult:
        numbers = np.arange(self.start, self.start + rows.num_rows)
        self.start += rows.num_rows
        return FilterResult(numbers % 3 == 0, "not the third")


def group(step: int, position: int, explorer: str = "explorer") -> list[Row]:
    name = group_id(explorer, "rl", step, position)
    return [
        {"experience_id": experience_id(name, n), "group_id": name, "task_id": f"t{position}", "stage": "rl",
         "step": step, "position": position, "rollout": n, "turn": 0, "reward": float((n + position) % 3),
         "error": "", "info": "{}"}
        for n in range(5)
    ]  # fmt: skip


def writer(
    store: Store, *operators: Operator, explorer: str = "explorer", operator_timeout: float = 600.0
) -> ExperienceWriter:
    chain = operators or (RewardFilter(threshold=0.5), EveryThird())
    return ExperienceWriter(
        store, ExperiencePipeline(chain, "rl"), explorer=explorer, operator_timeout=operator_timeout
    )


def write(to: ExperienceWriter, *places: tuple[int, int]) -> None:
    async def go() -> None:
        await to.replay_state()
        for step, position in places:
            rows = group(step, position, to.explorer)
            await to.add_group(rows, rows)

    asyncio.run(go())


def kept(store: Store) -> list[tuple[str, bool]]:
    rows = store.table("outcomes", columns=["experience_id", "kept"]).to_pylist()
    return [
        (row["experience_id"], row["kept"]) for row in rows if row["experience_id"].startswith("explorer/")
    ]


PLACES = [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]


@pytest.mark.parametrize("num_before", [1, 2, 3])
def test_an_experience_operator_that_keeps_state_goes_on_after_a_resume(
    tmp_path: Path, num_before: int
) -> None:
    whole, store = (Store.create_or_open(tmp_path / name) for name in ("whole", "store"))
    write(writer(whole), *PLACES)
    write(writer(store), *PLACES[:num_before])
    write(writer(store, explorer="other"), (1, 0))
    write(writer(store), *PLACES[num_before:])
    assert kept(store) == kept(whole)
    assert 0 < sum(was for _, was in kept(store)) < len(kept(store))
    store.close()
    whole.close()


def test_an_experience_operator_of_a_user_that_hangs_ends_the_run_with_its_name(tmp_path: Path) -> None:
    never = threading.Event()

    class Hangs(Filter):
        def apply(self, rows: pa.Table) -> FilterResult:
            never.wait()
            return FilterResult(np.ones(rows.num_rows, bool), "")

    store = Store.create_or_open(tmp_path / "store")
    hanging = writer(store, RewardFilter(threshold=-1.0), Hangs(), operator_timeout=0.5)
    with pytest.raises(OperatorError, match=r"operators\[1\]: 'Hangs', at 5 rows, .* did not end within"):
        write(hanging, (1, 0))
    never.set()
    store.close()


def test_a_resume_with_an_operator_that_answers_otherwise_is_refused(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "store")
    write(writer(store), *PLACES[:2])
    changed = writer(store, RewardFilter(threshold=1.5), EveryThird())
    with pytest.raises(
        OperatorError, match="a resume cannot go on as the run would have: experience 'explorer/"
    ):
        write(changed, (2, 0))
    store.close()
