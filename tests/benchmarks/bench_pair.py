"""Explorer and trainer as two commands beside one command with the same look-ahead, on the work of
pipelines/gsm8k.yaml: the time until the model solves a share of its tasks, and how old the weights were.

Both begin with the weights of the warm-up of pipelines/gsm8k.yaml.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from tests.benchmarks.measure import show_machine
from trinity_data.store.sql import open_sql

PIPELINES = Path("pipelines")
MEAN_STEPS = 5
"""Over which the accuracy of rollouts is a mean."""
ACCURACY = """
select step, avg(metrics['accuracy']) as accuracy, max(epoch(started_at) + seconds) as at
from rollouts group by step order by step
"""
STALENESS = """
select avg(b.step - 1 - r.model_version) as mean, max(b.step - 1 - r.model_version) as largest
from batches b join rollouts r using (experience_id)
"""
FIRST = "select epoch(min(started_at)) as at from rollouts"


@dataclass(frozen=True)
class Measured:
    """One run. Seconds are from its start on, but for those of a step."""

    to_first_rollout: float
    to_accuracy: float | None
    """None where it was not reached."""
    steps: int
    """Until then, or in all."""
    staleness: float
    largest_staleness: int

    @property
    def of_a_step(self) -> float | None:
        """Between the first rollout and the accuracy."""
        return None if self.to_accuracy is None else (self.to_accuracy - self.to_first_rollout) / self.steps

    def show(self, name: str) -> None:
        reached = "not reached" if self.to_accuracy is None else f"{self.to_accuracy:7.1f} s"
        step = "" if self.of_a_step is None else f", {self.of_a_step:.2f} s a step"
        start = f"first rollout at {self.to_first_rollout:.1f} s"
        stale = f"staleness {self.staleness:.2f}, at most {self.largest_staleness}"
        print(f"{name:14} {reached} after {self.steps} steps{step}; {start}; {stale}", flush=True)


def run(root: Path, files: Sequence[Path], *overrides: str) -> datetime:
    """Runs a command for each file beside each other to their ends; returns when they were started."""
    started, env = datetime.now(UTC), os.environ | {"TRINITY_CHECKPOINT_ROOT_DIR": str(root)}
    root.mkdir(exist_ok=True)
    with (root / "output.txt").open("ab") as output:
        commands = [
            subprocess.Popen(
                [sys.executable, "-m", "trinity_data.cli.main", "run", str(file), *overrides],
                env=env, stdout=output, stderr=output,
            )
            for file in files
        ]  # fmt: skip
        codes = [command.wait() for command in commands]
    if any(codes):
        raise SystemExit((root / "output.txt").read_text(errors="replace")[-4000:])
    return started


def measured(job: Path, started: datetime, accuracy: float) -> Measured:
    with open_sql([job]) as session:
        rows = session.query(ACCURACY).to_pylist()
        (stale,) = session.query(STALENESS).to_pylist()
        (first,) = session.query(FIRST).to_pylist()
    begin, reached, steps = started.timestamp(), None, len(rows)
    for end in range(MEAN_STEPS, len(rows) + 1):
        if sum(row["accuracy"] for row in rows[end - MEAN_STEPS : end]) / MEAN_STEPS >= accuracy:
            reached, steps = rows[end - 1]["at"] - begin, end
            break
    return Measured(first["at"] - begin, reached, steps, stale["mean"], stale["largest"])


def warm_up(folder: Path, whole: dict[str, object], warm: object) -> Path:
    """The model after the first stage, as a folder of Hugging Face's."""
    file = folder / "warm_up.yaml"
    # operators would have no effect
    config = {key: value for key, value in whole.items() if key != "data_processor"}
    file.write_text(yaml.safe_dump(config | {"name": "warm_up", "stages": [warm]}))
    run(folder, [file])
    checkpoints = (folder / "gsm8k" / "warm_up").glob("global_step_*/actor/huggingface")
    return max(checkpoints, key=lambda each: int(each.parts[-3].removeprefix("global_step_")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--accuracy", type=float, default=0.8)
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--model", type=Path, help="to begin with, in place of a warm-up")
    arguments = parser.parse_args()
    show_machine()
    whole = yaml.safe_load((PIPELINES / "gsm8k.yaml").read_text())
    warm, *_ = whole.pop("stages")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = arguments.model or warm_up(folder, whole, warm)
        one = folder / "both.yaml"
        one.write_text(yaml.safe_dump(whole | {"project": "async", "name": "gsm8k"}))
        two = [PIPELINES / "async" / "explorer.yaml", PIPELINES / "async" / "trainer.yaml"]
        overrides = f"model.model_path={model}", f"buffer.total_steps={arguments.steps}"
        sides: dict[str, Callable[[Path], datetime]] = {
            "one command": lambda root: run(root, [one], *overrides),
            "two commands": lambda root: run(root, two, *overrides),
        }
        for number in range(arguments.rounds):
            for side, work in sides.items():
                root = folder / f"{number} {side}"
                started = work(root)
                measured(root / "async" / "gsm8k", started, arguments.accuracy).show(side)
    show_machine()


if __name__ == "__main__":
    main()
