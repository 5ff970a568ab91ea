"""Mode `bench` with an engine that answers from a script: what is evaluated, what of it is kept, and when it
is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.conftest import rows_of
from trinity_data.cli.bench import print_results
from trinity_data.config import load_pipeline_file
from trinity_data.errors import ConfigError, NothingLearntError, StoreError
from trinity_data.launch.bench import BenchResults, bench
from trinity_data.launch.checkpoints import Checkpoint, checkpoints_of
from trinity_data.launch.job_folder import job_folder

PIPELINE = """
project: tests
name: run
checkpoint_root_dir: {root}
mode: bench
model: {{model_path: "{model}", max_prompt_tokens: 96, max_response_tokens: 32}}
buffer:
  default_workflow_type: math_workflow
  explorer_input:
    eval_tasksets:
      - {{name: sums, path: "{root}/sums", repeat_times: 4, format: &form {{prompt_key: q, response_key: a}}}}
      - {{name: names, path: "{root}/names", format: *form}}
explorer: {{rollout_model: {{engine_type: fake, script: "{root}/script.json"}}}}
monitor: {{monitor_type: none}}
"""
SUMS = [{"q": f"What is {n} + 1?", "a": f"#### {n + 1}"} for n in range(3)]
# the first sum is always right, the second always 5, the last has no number
SCRIPT = {
    "0 + 1": ["It is 1."],
    "1 + 1": ["#### 5"],
    "2 + 1": ["I do not know."],
    "capital": ["<answer>Rome</answer>"],
}
RunBench = Callable[..., BenchResults]


@pytest.fixture
def run_bench(tmp_path: Path, tiny_model: Path) -> RunBench:
    for name, rows in (("sums", SUMS), ("names", [{"q": "The capital?", "a": "Rome"}])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    file = tmp_path / "bench.yaml"
    file.write_text(PIPELINE.format(root=tmp_path, model=tiny_model))

    def run(*overrides: str) -> BenchResults:
        config = load_pipeline_file(file, overrides)
        return bench(config, config.stages[0], quiet=True)

    return run


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_model: Path) -> Callable[[int], Path]:
    """`checkpoint(step)`: the model once more, as the trainer leaves it."""

    def make(step: int) -> Path:
        folder = tmp_path / "tests" / "run" / f"global_step_{step}"
        shutil.copytree(tiny_model, folder / "actor" / "huggingface")
        return folder

    return make


def test_a_name_without_checkpoints_evaluates_the_model(run_bench: RunBench, tiny_model: Path) -> None:
    results = run_bench()
    names, sums = sorted(results.sets, key=lambda each: each.taskset)
    assert results.models == {0: str(tiny_model)}
    # one of three sums is right each time
    assert (sums.num_tasks, sums.num_rollouts, sums.num_failed) == (3, 4, 0)
    found = [sums.mean.value, *(each.value for each in (*sums.pass_at.values(), *sums.maj_at.values()))]
    assert found == pytest.approx([1 / 3] * 7)
    assert (names.mean.value, list(names.pass_at)) == (0.0, [1])


def test_every_checkpoint_is_evaluated_once_in_the_order_of_steps(
    run_bench: RunBench, checkpoint: Callable[[int], Path]
) -> None:
    checkpoint(10), checkpoint(2)
    results = run_bench()
    assert list(results.models) == [0, 2, 10]
    rows = rows_of(
        results.folder, "select step, model_version, count(*) as n from evals group by all order by 1"
    )
    assert rows == [{"step": step, "model_version": step, "n": 13} for step in (0, 2, 10)]
    checkpoint(12)
    assert list(run_bench().models) == [0, 2, 10, 12]
    assert rows_of(results.folder, "select count(*) as n from evals") == [{"n": 4 * 13}]


def test_the_newest_checkpoint_alone_can_be_evaluated(
    run_bench: RunBench, checkpoint: Callable[[int], Path]
) -> None:
    checkpoint(2), checkpoint(10)
    assert list(run_bench("explorer.bench_on_latest_checkpoint=true").models) == [10]
    # the others join it
    assert list(run_bench().models) == [0, 2, 10]


def test_a_checkpoint_that_the_run_has_removed_keeps_its_evaluation(
    run_bench: RunBench, checkpoint: Callable[[int], Path]
) -> None:
    folder = checkpoint(2)
    run_bench()
    shutil.rmtree(folder)
    assert list(run_bench().models) == [0, 2]


def test_a_run_that_holds_its_own_folder_is_not_in_the_way(
    run_bench: RunBench, checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    checkpoint(2)
    run = load_pipeline_file(tmp_path / "bench.yaml")
    with job_folder(run):
        assert list(run_bench().models) == [0, 2]
    assert not (run.job_dir / "store").exists()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.temperature=0.5", "eval_tasksets.0.rollout_args.temperature: was 1.0, is 0.5"),
        ("buffer.explorer_input.eval_tasksets.0.repeat_times=8", "repeat_times: was 4, is 8"),
        ("buffer.explorer_input.eval_tasksets.1.name=places", "name: was 'names', is 'places'"),
        ("model.max_response_tokens=16", "model.max_response_tokens: was 32, is 16"),
    ],
)
def test_evaluations_that_were_made_otherwise_are_not_gone_on_with(
    run_bench: RunBench, override: str, key: str
) -> None:
    run_bench()
    with pytest.raises(ConfigError, match="a name of its own") as caught:
        run_bench(override)
    assert key in str(caught.value)


def test_a_stage_of_another_name_evaluates_beside_the_first(run_bench: RunBench) -> None:
    folders = {
        run_bench().folder,
        run_bench("stages=[{stage_name: cold}]", "model.temperature=0.5").folder,
    }
    assert {folder.name for folder in folders} == {"bench", "cold"}


def test_an_evaluation_that_is_not_to_be_continued_starts_anew_beside_the_first(run_bench: RunBench) -> None:
    first, second = run_bench().folder, run_bench("continue_from_checkpoint=false").folder
    assert second.parent == first.parent and second.name.startswith("bench_2")


def test_another_content_of_a_task_set_is_refused_and_another_place_is_not(
    run_bench: RunBench, tmp_path: Path
) -> None:
    run_bench()
    shutil.copytree(tmp_path / "sums", tmp_path / "moved")
    run_bench(f"buffer.explorer_input.eval_tasksets.0.path={tmp_path / 'moved'}")
    (tmp_path / "sums" / "train.jsonl").write_text(json.dumps(SUMS[0]))
    with pytest.raises(ConfigError, match=r"eval_tasksets.0.path: was content \w+, is content"):
        run_bench()


def test_what_does_not_shape_an_evaluation_may_change(run_bench: RunBench) -> None:
    run_bench()
    run_bench(
        "explorer.rollout_model.engine_num=2", "log.level=DEBUG", "explorer.bench_on_latest_checkpoint=true"
    )


def test_other_weights_under_the_number_of_a_step_are_refused(
    run_bench: RunBench, checkpoint: Callable[[int], Path]
) -> None:
    weights = checkpoint(2) / "actor" / "huggingface" / "model.safetensors"
    run_bench()
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(StoreError, match="holds other weights than those of step 2"):
        run_bench()


def test_a_set_of_which_every_rollout_fails_ends_the_evaluation_and_is_done_again(
    run_bench: RunBench, checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    checkpoint(2)
    (tmp_path / "fails.py").write_text("def fails(text, answer):\n    raise ValueError('no such sum')\n")
    of_names = "buffer.explorer_input.eval_tasksets.1.default_reward_fn_type"
    with pytest.raises(NothingLearntError, match=r"'names' at step 0: all 1 rollouts failed.*no such sum"):
        run_bench(f"{of_names}=./fails.py:fails")
    assert list(run_bench().models) == [0, 2]


def test_a_failed_rollout_is_wrong_and_counted(run_bench: RunBench, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def own(text, answer):\n    if '5' in text:\n        raise ValueError('five')\n    return 1.0\n"
    )
    results = run_bench("buffer.explorer_input.eval_tasksets.0.default_reward_fn_type=./own.py:own")
    (sums,) = [each for each in results.sets if each.taskset == "sums"]
    # two sums of three have the reward 1, and the other one fails each time
    assert (sums.num_failed, sums.mean.value, sums.mean_reward) == (4, pytest.approx(2 / 3), 1.0)


def test_the_file_of_results_and_the_table_say_the_same(
    run_bench: RunBench, checkpoint: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(2)
    results = run_bench()
    stored = json.loads((results.folder / "results.json").read_text())
    assert stored == json.loads(json.dumps(results.as_json()))
    assert [(each["step"], each["taskset"]) for each in stored["results"]][::2] == [(0, "sums"), (2, "sums")]
    print_results(results)
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if "mean@4" in line)
    assert header.split() == ["step", "tasks", "rollouts", "failed", "mean@4", "pass@2", "pass@4", "maj@4"]
    row = lines[lines.index(header) + 1].split()
    mean = stored["results"][0]["mean"]
    assert row[:5] == ["0", "3", "12", "0", f"{mean['value']:.3f}"]
    assert row[6] == f"{(mean['high'] - mean['low']) / 2:.3f}"


def test_a_folder_is_a_checkpoint_once_it_has_weights(
    tmp_path: Path, checkpoint: Callable[[int], Path]
) -> None:
    checkpoint(3)
    job = tmp_path / "tests" / "run"
    for other in ("global_step_4", "global_step_5.partial", "weights"):
        (job / other).mkdir()
    found = checkpoints_of(job, "model", only_newest=False)
    assert found == [Checkpoint(0, "model"), Checkpoint(3, str(job / "global_step_3"))]
