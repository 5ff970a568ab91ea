"""Experience operators in processes of their own: what they make of groups, and what an end of one costs."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.operators.test_experience_pipeline import group
from tests.operators.test_off_loop import errors_of, outcomes
from trinity_data.config import ExperiencePipelineConfig, OperatorConfig
from trinity_data.errors import OperatorError
from trinity_data.store.store import Store
from trinity_operators.advantages import GrpoAdvantage
from trinity_operators.experience_pipeline import ExperiencePipeline, ExperienceWriter
from trinity_operators.experience_workers import KeptWorkers, declared_workers, with_workers
from trinity_operators.registry import build_operators

pytestmark = pytest.mark.usefixtures("ray_session")

OWN = '''
import os, time
from pathlib import Path
import numpy as np
from trinity_operators.base import Filter, FilterResult, Mapper, MapperResult


class Noted(Mapper):
    """Writes the double of the reward, and notes each call in a file named after its process."""

    num_cpus = 0.5
    reads = ("reward",)
    writes = ("double",)

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def prepare(self):
        self.note("prepare")

    def close(self):
        self.note("close")

    def map(self, rows):
        self.note("map")
        rewards = np.array(rows["reward"].to_pylist())
        self.before(rewards)
        return MapperResult({"double": rewards * 2}, totals={"calls": 1})

    def before(self, rewards):
        pass

    def note(self, what):
        with open(self.folder / str(os.getpid()), "a") as file:
            file.write(what + "\\n")


class Meets(Noted):
    """Goes on when another process is at a group, and the event loop has seen it."""

    def before(self, rewards):
        while sum("map" in file.read_text() for file in self.folder.glob("[0-9]*")) < 2:
            time.sleep(0.01)
        while not (self.folder / "seen").exists():
            time.sleep(0.01)


class Ends(Noted):
    def before(self, rewards):
        if 5 in rewards:
            os._exit(3)


class Hangs(Noted):
    def before(self, rewards):
        if 5 in rewards:
            time.sleep(600)


class EndsInPrepare(Noted):
    def prepare(self):
        os._exit(3)


class Raises(Noted):
    def before(self, rewards):
        if 5 in rewards:
            raise KeyError("level")


class Costly(Noted):
    num_cpus = 0
    num_gpus = 1


class Greedy(Noted):
    num_cpus = max(4, os.cpu_count())  # as many as Ray has


class EveryThird(Filter):
    """Keeps every third row that it has ever seen."""

    slow_start = keeps_state = True
    seen = 0

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def apply(self, rows):
        if 5 in rows["reward"].to_pylist():
            os._exit(3)
        numbers = np.arange(self.seen, self.seen + rows.num_rows)
        self.seen += rows.num_rows
        return FilterResult(numbers % 3 == 0, "not the third")

    def state(self):
        return self.seen

    def load(self, state):
        (self.folder / "loaded").write_text(str(state))
        self.seen = state
'''


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A folder for notes of operators."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.create_or_open(tmp_path / "store")
    yield opened
    opened.close()


def writer(
    store: Store,
    notes: Path,
    name: str,
    *,
    concurrency: int | None = None,
    kept: KeptWorkers | None = None,
    goes_on: bool = False,
    **pipeline: Any,
) -> ExperienceWriter:
    """Of one operator with workers of its own, and the advantage; with `goes_on` the next stage has it."""
    config = OperatorConfig(name=f"./own.py:{name}", args={"folder": str(notes)}, concurrency=concurrency)
    settings = ExperiencePipelineConfig(**{"operators": (config,), "max_error_rate": 1.0} | pipeline)
    configured = build_operators(settings.operators, notes.parent)
    operators = [*configured, GrpoAdvantage()]
    later = declared_workers(operators, configured, settings, notes.parent) if goes_on else []
    chain = with_workers(operators, configured, settings, notes.parent, kept=kept, later=later)
    return ExperienceWriter(
        store,
        ExperiencePipeline(chain, "rl", max_error_rate=settings.max_error_rate),
        explorer="explorer",
        operator_timeout=settings.operator_timeout,
        max_waiting_groups=settings.max_waiting_groups,
    )


def write(to: ExperienceWriter, *groups: Sequence[float], step: int = 1, note: Path | None = None) -> None:
    """Groups with these rewards, all at the same time; `note` is written while they wait."""

    async def go() -> None:
        try:
            await to.prepare()
            async with asyncio.TaskGroup() as adding:
                for position, rewards in enumerate(groups):
                    rows = group(step, position, rewards)
                    adding.create_task(to.add_group(rows, rows))
                while note is not None and to._num_waiting < len(groups):
                    await asyncio.sleep(0.01)
                if note is not None:
                    note.write_text("")
        finally:
            to.pipeline.close()

    try:
        asyncio.run(go())
    except* OperatorError as errors:
        raise errors.exceptions[0] from None


def noted(notes: Path) -> dict[int, list[str]]:
    """What each process noted."""
    return {int(file.name): file.read_text().split() for file in notes.glob("[0-9]*")}


def test_groups_pass_through_two_processes_at_once_while_the_loop_goes_on(store: Store, notes: Path) -> None:
    to = writer(store, notes, "Meets", concurrency=2)
    write(to, [0, 1, 2], [3, 4, 4], note=notes / "seen")
    calls = noted(notes)
    assert os.getpid() not in calls
    assert list(calls.values()) == [["prepare", "map", "close"]] * 2
    doubles = sorted(row["scores"]["double"] for row in outcomes(store).values())
    assert doubles == [0.0, 2.0, 4.0, 6.0, 8.0, 8.0]
    (counts, _) = to.pipeline.counts_table(1).to_pylist()
    assert (counts["rows_in"], dict(counts["metrics"])) == (6, {"calls": 2.0})


def test_a_process_goes_on_where_the_next_stage_names_the_same_operator(store: Store, notes: Path) -> None:
    kept = KeptWorkers()
    write(writer(store, notes, "Noted", kept=kept, goes_on=True), [0, 1])
    # with the arguments of another one it would be another operator
    write(writer(store, notes, "Raises", kept=kept), [0, 1], step=2)
    write(writer(store, notes, "Noted", kept=kept), [0, 1], step=3)
    kept.close()
    whats = sorted(noted(notes).values(), key=len)
    assert whats == [["prepare", "map", "close"], ["prepare", "map", "map", "close"]]


def test_one_that_keeps_state_is_not_kept_and_what_nobody_takes_is_closed(store: Store, notes: Path) -> None:
    kept = KeptWorkers()
    write(writer(store, notes, "EveryThird", kept=kept, goes_on=True), [0, 1])
    assert not kept._kept
    write(writer(store, notes, "Noted", kept=kept, goes_on=True), [0, 1], step=2)
    assert list(noted(notes).values()) == [["prepare", "map"]]
    kept.close()
    assert list(noted(notes).values()) == [["prepare", "map", "close"]]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Ends", "operators[0]: 'Ends', at 2 rows, the first of them '{row}', ended its process or "
         "was killed"),
        ("Hangs", r"operators[0]: 'Hangs', at 2 rows, the first of them '{row}', did not end within "
         "`operator_timeout`, 3 s"),
        ("Raises", r"operators[0]: 'Raises' failed on 2 rows: KeyError: 'level'"),
    ],
)  # fmt: skip
def test_a_group_on_which_an_operator_fails_has_an_error_and_the_others_go_on(
    store: Store, notes: Path, name: str, reason: str
) -> None:
    write(writer(store, notes, name, operator_timeout=3), [1, 2], [5, 4], [1, 3])
    rows = dict(sorted(outcomes(store).items()))
    assert [row["kept"] for row in rows.values()] == [True, True, False, False, True, True]
    first = sorted(row["row_id"] for row in store.table("decisions").to_pylist() if not row["kept"])[0]
    assert set(errors_of(store).values()) == {"error: " + reason.format(row=first)}
    whats = Counter(what for each in noted(notes).values() for what in each)
    assert (whats["map"], whats["prepare"]) == (3, 1 if name == "Raises" else 2)  # started again once


def test_a_process_that_ends_too_often_ends_the_run_with_operator_and_row(store: Store, notes: Path) -> None:
    to = writer(store, notes, "Ends", max_restarts=1)
    with pytest.raises(
        OperatorError,
        match=r"operators\[0\]: 'Ends', at 2 rows, the first of them 'explorer/rl/.*', ended its process or "
        "was killed; it was started again as often as max_restarts, 1, allows",
    ):
        write(to, [5, 1], [5, 2], [5, 3])
    assert len(store.table("experiences")) == 6  # nothing is lost
    assert len(store.table("outcomes")) == 2
    assert len(noted(notes)) == 2  # and nothing is started any more


def test_without_a_rate_of_errors_the_first_end_ends_the_run(store: Store, notes: Path) -> None:
    with pytest.raises(OperatorError, match=r"'Ends', at 2 rows, .* ended its process or was killed$"):
        write(writer(store, notes, "Ends", max_error_rate=0), [5, 1])


def test_a_process_that_ends_in_prepare_is_named(store: Store, notes: Path) -> None:
    with pytest.raises(
        OperatorError, match=r"^operators\[0\]: 'EndsInPrepare', in prepare, ended its process or was killed"
    ):
        write(writer(store, notes, "EndsInPrepare"), [1, 2])


def test_a_gpu_that_is_not_there_is_named_before_anything_waits_for_it(store: Store, notes: Path) -> None:
    with pytest.raises(
        OperatorError, match=r"operators\[0\]: 'Costly' declares num_gpus: 1 for each of 1 workers; Ray has 0"
    ):
        writer(store, notes, "Costly")


def test_cpus_that_others_hold_are_named(store: Store, notes: Path) -> None:
    @ray.remote
    class Holder:
        def hold(self) -> None:
            pass

    holder = Holder.options(num_cpus=1).remote()
    ray.get(holder.hold.remote())
    try:
        with pytest.raises(
            OperatorError,
            match=r"operators\[0\]: 'Greedy' declares num_cpus: \d+; after 2 s Ray has \S+ CPUs free for 1",
        ):
            write(writer(store, notes, "Greedy", operator_timeout=2), [1, 2])
    finally:
        ray.kill(holder)


def test_an_operator_that_keeps_state_goes_on_from_the_state_in_the_ledger(store: Store, notes: Path) -> None:
    write(writer(store, notes, "EveryThird"), [1, 1, 1, 1])
    write(writer(store, notes, "EveryThird"), [1, 1, 1, 1], step=2)
    assert (notes / "loaded").read_text() == "4"
    kept = [row["kept"] for row in store.table("outcomes").to_pylist()]
    assert kept == [True, False, False, True, False, False, True, False]
    with pytest.raises(OperatorError, match=r"'EveryThird', .*; it keeps state, which a resume gives back"):
        write(writer(store, notes, "EveryThird"), [5, 1], step=3)


def test_a_chain_without_workers_needs_no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(ray, "cluster_resources")
    chain = [GrpoAdvantage()]
    assert with_workers(chain, [], ExperiencePipelineConfig(), tmp_path) == chain
