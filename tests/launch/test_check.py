"""`config check` and `run` refuse the same files, with every problem at once, and start nothing for it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.small_pipelines import EXPLORING
from trinity_data.cli.main import cli
from trinity_data.errors import ConfigError
from trinity_data.launch.check import load_checked

FAULTS = [
    "buffer.batch_size=eight",
    "buffer.default_workflow_type=math_workflw",
    "buffer.default_reward_fn_type=math_rewrd",
    "buffer.explorer_input.taskset.path=./no/such.jsonl",
    "model.model_path=./no/such",
    "algorithm.advantage_fn_args.epsilom=1",
    "algorithm.repeat_times=1",
    "algorithm.policy_loss_fn_args.clip_rnge=0.1",
    "algorithm.kl_loss_fn_args.kl_coef=-1",
    "cluster.gpu_per_node=64",
    (
        "data_processor.task_pipeline.operators=[{name: difficulty_filtre}, {name: prompt_length_filter, "
        "args: {max_lenth: 3}}]"
    ),
    (
        "data_processor.experience_pipeline.operators=[{name: reward_filter, args: {treshold: 0.5, "
        'threshold: "0.7"}}]'
    ),
    "algorithm.policy_loss_fn_args.clip_rang=1",
]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.yaml").write_text(EXPLORING)
    return tmp_path / "pipeline.yaml"


def problems(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_checked(file, overrides)
    return [line.removeprefix(f"{file}:override: ") for line in str(caught.value).splitlines()]


def test_a_sound_file_passes(file: Path) -> None:
    assert load_checked(file).project == "tests"


def test_everything_wrong_is_reported_at_once_with_the_nearest_spelling(file: Path) -> None:
    found = "\n".join(problems(file, *FAULTS))
    for text in (
        "buffer.batch_size: found 'eight'; a whole number is expected",
        "unknown workflow 'math_workflw'; known: ",
        "did you mean 'math_workflow'?",
        "did you mean 'math_reward'?",
        "taskset.path: found './no/such.jsonl'; no such file or folder",
        "model.model_path: found './no/such'; no such file or folder",
        "advantage_fn_args: operator 'grpo_advantage': unknown argument 'epsilom'",
        "algorithm.repeat_times: found 1 with 'grpo'",
        "algorithm.policy_loss_fn_args.clip_rnge: unknown ppo argument 'clip_rnge'",
        "algorithm.kl_loss_fn_args.kl_coef: found -1; Input should be greater than or equal to 0",
        "cluster.gpu_per_node: asks for 64 GPU(s); this machine has ",
        "did you mean 'difficulty_filter'?",
        "did you mean 'max_length'?",
        "did you mean 'threshold'?",
        "threshold: found '0.7'; Input should be a valid number",
        "algorithm.policy_loss_fn_args.clip_rang: unknown ppo argument 'clip_rang'",
    ):
        assert text in found, text


@pytest.mark.parametrize("fault", FAULTS)
def test_run_refuses_what_the_check_refuses_in_the_same_words(file: Path, fault: str) -> None:
    runner = CliRunner()
    checked = runner.invoke(cli, ["config", "check", str(file), fault])
    ran = runner.invoke(cli, ["run", "--config", str(file), fault])
    assert checked.exit_code == 2
    assert isinstance(ran.exception, ConfigError)
    assert checked.stderr.strip() == str(ran.exception)
    assert not (file.parent / "runs").exists()


@pytest.mark.parametrize("wrong", ["mode=explorer", "algorithm.algorithm_type=GRPO"])
def test_behind_a_wrong_mode_or_algorithm_the_rest_is_checked(file: Path, wrong: str) -> None:
    found = problems(file, wrong, "model.max_model_len=20", "buffer.explorer_input.tasksets=[{path: a}]")
    keys = [line.split(": ")[0] for line in found]
    assert wrong.split("=")[0] in keys
    assert {"model.max_model_len", "buffer.explorer_input.tasksets"} <= set(keys)


def test_capital_letters_get_the_name_that_is_meant(file: Path) -> None:
    (line,) = problems(file, "algorithm.algorithm_type=GRPO")
    assert line.endswith("(did you mean 'grpo'?)")


def test_what_only_one_of_the_possible_modes_forbids_is_not_reported(file: Path) -> None:
    assert len(problems(file, "mode=explorer", "buffer.batch_size=null")) == 1


def test_a_file_for_another_machine_is_checked_without_this_one(file: Path) -> None:
    assert load_checked(file, FAULTS[3:5] + FAULTS[9:10], look_at_machine=False)


def test_a_column_that_no_experience_has_is_found(file: Path) -> None:
    (file.parent / "mine.py").write_text(
        textwrap.dedent(
            """
            from trinity_operators.base import Mapper

            class Bonus(Mapper):
                reads = ("rewrd",)
                writes = ("reward",)

                def map(self, rows):
                    return {"reward": rows["rewrd"]}
            """
        )
    )
    (line,) = problems(file, "data_processor.experience_pipeline.operators=[{name: './mine.py:Bonus'}]")
    assert line.startswith("data_processor.experience_pipeline.operators.0: ")
    assert "rewrd" in line and "did you mean 'reward'" in line


RUBRIC = (
    "{name: rubric_score, args: {model: rollout_model, criteria: [{name: right, asks: Is it right?}]}}, "
    "{name: reward_shaping_mapper, args: {reward_shaping_configs: [{stats_key: STATS, op_type: ADD}]}}"
)
OPERATORS = "data_processor.experience_pipeline.operators"


@pytest.mark.parametrize(
    ("stats_key", "near"),
    [("rubic_score", "rubric_score"), ("rubric_score_rigth", "rubric_score_right"), ("acuracy", "accuracy")],
)
def test_a_score_that_no_operator_before_writes_is_found(file: Path, stats_key: str, near: str) -> None:
    (line,) = problems(file, f"{OPERATORS}=[{RUBRIC.replace('STATS', stats_key)}]")
    assert line.startswith(f"{OPERATORS}.1: 'reward_shaping_mapper' looks up '{stats_key}'")
    assert line.endswith(
        f"known: accuracy, format, rubric_score, rubric_score_right (did you mean {near!r}?)"
    )
    load_checked(file, [f"{OPERATORS}=[{RUBRIC.replace('STATS', near)}]"])


def test_a_score_that_is_written_behind_its_reader_is_found(file: Path) -> None:
    first, second = RUBRIC.replace("STATS", "rubric_score").split("}}, {")
    (line,) = problems(file, f"{OPERATORS}=[{{{second}, {first}}}}}]")
    assert line.startswith(f"{OPERATORS}.0: 'reward_shaping_mapper' looks up 'rubric_score'")


def test_a_score_that_only_the_run_shows_is_a_note(file: Path) -> None:
    (file.parent / "mine.py").write_text("def score(response, answer):\n    return {'form': 1.0}\n")
    overrides = [
        "buffer.default_reward_fn_type=./mine.py:score",
        f"{OPERATORS}=[{RUBRIC.replace('STATS', 'rubic_score')}]",
    ]
    checked = CliRunner().invoke(cli, ["config", "check", str(file), *overrides])
    assert checked.exit_code == 0, checked.output
    (note,) = [line for line in checked.output.splitlines() if "rubic_score" in line]
    assert note.startswith("note: ") and "(did you mean 'rubric_score'?)" in note


def test_contracts_and_models_are_checked_beside_an_operator_that_cannot_be_built(file: Path) -> None:
    found = problems(
        file,
        f"{OPERATORS}=[{{name: reward_filter, args: {{treshold: 1}}}}, "
        "{name: judge_score, args: {model: m}}]",
        "contracts=[{name: share, check: kept_share, operator: reward_std, min: 0.5}, "
        "{name: known, check: kept_share, operator: reward_filter, min: 0.5}]",
    )
    assert [line.split(": ")[0] for line in found] == [
        "contracts.0.operator",
        f"{OPERATORS}.0",
        f"{OPERATORS}.1.args.model",
    ]


def test_a_key_of_a_criterion_gets_the_nearest_spelling(file: Path) -> None:
    criterion = RUBRIC.replace("STATS", "rubric_score").replace("asks:", "wieght: 2, asks:")
    (line,) = problems(file, f"{OPERATORS}=[{criterion}]")
    assert (
        "criteria.0: found an unknown key 'wieght'; known: asks, name, weight (did you mean 'weight'?)"
        in line
    )


def test_workers_of_an_experience_operator_are_refused_beside_a_wrong_task_operator(file: Path) -> None:
    found = problems(
        file,
        "data_processor.task_pipeline.operators=[{name: difficulty_filtre}]",
        "data_processor.experience_pipeline.operators=[{name: judge_score, args: {model: rollout_model}, "
        "concurrency: 2}]",
    )
    paths = [line.split(": ")[0] for line in found]
    assert paths == [
        "data_processor.experience_pipeline.operators.0.concurrency",
        "data_processor.task_pipeline.operators.0",
    ]


def test_a_recipe_may_be_a_whole_pipeline_and_its_problems_are_at_its_key(file: Path) -> None:
    recipe, key = file.with_name("recipe.yaml"), "data_processor.task_pipeline.config_path"
    recipe.write_text("np: 2\nprocess:\n  - text_length_filter: {min_len: 3, num_proc: 2}\n")
    config = load_checked(file, [f"{key}=recipe.yaml"])
    (operator,) = config.stages[0].data_processor.task_pipeline.operators
    assert (operator.name, operator.args) == ("data_juicer", {"config_path": "recipe.yaml"})
    # of experiences too
    load_checked(file, ["data_processor.experience_pipeline.config_path=recipe.yaml"])
    recipe.write_text("process:\n  - text_lenth_filter: {min_len: 3}\n")
    (line,) = problems(file, f"{key}=recipe.yaml")
    assert (
        f"{key}: unknown operator 'text_lenth_filter'" in line and "did you mean 'text_length_filter'" in line
    )
    both = [f"{key}=recipe.yaml", "data_processor.task_pipeline.operators=[{name: exact_duplicate_filter}]"]
    refused = f"{key}: found 'recipe.yaml' beside operators; write one of them"
    assert any(refused in line for line in problems(file, *both))


def test_rollouts_of_tasks_are_asked_for_by_the_task_pipeline_beside_the_engines(file: Path) -> None:
    probe = "operators=[{name: pass_rate_probe, args: {rollouts: 4}}]"
    load_checked(file, [f"data_processor.task_pipeline.{probe}"])
    assert any(
        "'pass_rate_probe' makes rollouts of tasks; put it into the task pipeline" in line
        for line in problems(file, f"data_processor.experience_pipeline.{probe}")
    )
    asking = f"data_processor.task_pipeline.{probe}"
    load_checked(file, [asking, "data_processor.task_pipeline.output.path=out"])
    queue = [f"buffer.explorer_input.taskset.{key}" for key in ("storage_type=queue", "path=incoming")]
    load_checked(file, [asking, *queue])
    (line,) = problems(file, "data_processor.task_pipeline.top_k=3", *queue)
    assert "'priority_filter' needs the whole set, which a queue never is" in line


def test_workers_that_an_experience_operator_cannot_have_are_found(file: Path) -> None:
    (file.parent / "mine.py").write_text(
        textwrap.dedent(
            """
            from trinity_operators.base import Filter

            class Remembers(Filter):
                keeps_state = slow_start = True

                def apply(self, rows):
                    raise AssertionError
            """
        )
    )
    operators = (
        "[{name: judge_score, args: {model: rollout_model}, concurrency: 2}, "
        "{name: reward_filter, args: {threshold: 0}, concurrency: 2}, "
        "{name: './mine.py:Remembers', concurrency: 2}]"
    )
    waits, keeps = problems(file, f"data_processor.experience_pipeline.operators={operators}")
    path = "data_processor.experience_pipeline.operators."
    assert waits.startswith(f"{path}0.concurrency: found concurrency 2; 'judge_score' waits for many rows")
    assert keeps == (
        f"{path}2.concurrency: operators[2]: 'Remembers' keeps state and can have one worker; "
        "found concurrency 2"
    )


def test_an_operator_may_ask_a_model_of_the_run_and_no_other_without_an_address(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    model = "{name: grader, model_path: 'synthetic://qwen2-1m', engine_type: fake}"
    grader = f"explorer.auxiliary_models=[{model}]"
    judge = "data_processor.experience_pipeline.operators=[{name: judge_score, args: {model: MODEL}}]"
    of_tasks = judge.replace("experience", "task").replace("MODEL", "MODEL, prompt: '{question}'")
    for name in ("grader", "rollout_model"):
        load_checked(file, [grader, judge.replace("MODEL", name), of_tasks.replace("MODEL", name)])
    (line,) = problems(file, grader, of_tasks.replace("MODEL", "grade"))
    assert line.startswith(
        "data_processor.task_pipeline.operators.0.args.model: there is no address of model"
    )
    (line,) = problems(file, grader, judge.replace("MODEL", "grade"))
    assert line == (
        "data_processor.experience_pipeline.operators.0.args.model: there is no address of model 'grade'; "
        "set base_url, or OPENAI_BASE_URL; the models of the run are rollout_model, grader "
        "(did you mean 'grader'?)"
    )


def test_late_groups_are_refused_with_an_operator_that_needs_a_whole_step(file: Path) -> None:
    late = "explorer.over_rollout={ratio: 0.25}"
    key = "data_processor.experience_pipeline.operators"
    (found,) = problems(file, late, f"{key}=[{{name: reward_normalization, args: {{over: step}}}}]")
    assert (
        "explorer.over_rollout.ratio: found 0.25 with 'reward_normalization', which needs all groups" in found
    )
    load_checked(file, [late, f"{key}=[{{name: reward_normalization, args: {{over: group}}}}]"])


def test_an_operator_behind_the_advantage_may_read_it_and_one_before_may_not(file: Path) -> None:
    (file.parent / "mine.py").write_text(
        textwrap.dedent(
            """
            import trinity_data

            @trinity_data.mapper(reads=("advantage",), writes=("advantage",), after_advantage=True)
            def halved(row):
                return row["advantage"] / 2

            @trinity_data.mapper(reads=("advantage",), writes=("logprobs",))
            def early(row):
                return row["advantage"]
            """
        )
    )
    names = "{name: './mine.py:halved'}, {name: './mine.py:early'}"
    missing, fixed = problems(file, f"data_processor.experience_pipeline.operators=[{names}]")
    assert missing.startswith(
        "data_processor.experience_pipeline.operators.1: 'early' reads column 'advantage'"
    )
    assert fixed.endswith("operators.1: 'early' writes 'logprobs', which no operator may change")


def test_the_check_imports_nothing_that_takes_seconds_and_starts_no_ray(file: Path) -> None:
    operators = (
        "data_processor.task_pipeline.operators=[{name: text_length_filter, args: {min_len: 3}}]",
        "data_processor.experience_pipeline.operators=[{name: reward_std_filter}, {name: quality_score}]",
    )
    program = (
        "import sys; from trinity_data.launch.check import load_checked; load_checked(*sys.argv[1:2], "
        "sys.argv[2:]);"
        "print([name for name in ('torch', 'vllm', 'data_juicer', 'datasets', "
        "'pandas') if name in sys.modules]);import ray; print(ray.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(file), *operators], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["[]", "False"]


def test_an_operator_is_built_once(file: Path) -> None:
    (file.parent / "mine.py").write_text(
        textwrap.dedent(
            """
            from pathlib import Path
            from trinity_operators.base import Mapper

            class Built(Mapper):
                def __init__(self):
                    with Path("built.txt").open("a") as file:
                        file.write("once ")

                def map(self, rows):
                    return {}
            """
        )
    )
    load_checked(file, ["data_processor.task_pipeline.operators=[{name: './mine.py:Built'}]"])
    assert (file.parent / "built.txt").read_text() == "once "


def test_run_takes_the_file_as_an_option_too(file: Path) -> None:
    result = CliRunner().invoke(cli, ["run"])
    assert result.exit_code == 2
    assert "give a pipeline file" in result.output
