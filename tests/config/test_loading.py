"""A pipeline file that can be run: what it comes to."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from trinity_data.config import RunConfig, StageConfig, load_pipeline_file
from trinity_data.config.base import Section
from trinity_data.config.run import recorded_run
from trinity_data.config.sections import section_in
from trinity_data.errors import ConfigError, StoreError

BASE = """
project: tests
name: base
checkpoint_root_dir: runs
seed: 3
algorithm:
  algorithm_type: grpo
  optimizer:
    lr: 1e-5
model:
  model_path: synthetic://qwen2-1m
  max_prompt_tokens: 48
  max_response_tokens: 16
  temperature: 0.7
buffer:
  batch_size: 4
  default_workflow_type: math_workflow
  default_reward_fn_type: math_reward
  explorer_input:
    taskset:
      name: gsm8k
      path: synthetic://gsm8k
      format: {prompt_key: question, response_key: answer}
    eval_tasksets:
      - path: synthetic://gsm8k
        split: test
        limit: 20
        rollout_args: {temperature: 0}
"""

STAGES = """
stages:
  - stage_name: warmup
    mode: train
    algorithm:
      algorithm_type: sft
      optimizer: {weight_decay: 0.5}
    buffer:
      train_batch_size: 64
      total_steps: 30
      trainer_input:
        experience_buffer: {name: answers, path: synthetic://gsm8k}
  - stage_name: rft
    algorithm:
      repeat_times: 6
    buffer:
      explorer_input:
        taskset: {limit: 100}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    file = tmp_path / "pipeline.yaml"
    file.write_text(textwrap.dedent(text))
    return load_pipeline_file(file, overrides)


def diagnostics(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    """The lines of the error, without the file's folder."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def test_a_file_without_stages_has_one_named_after_its_algorithm(tmp_path: Path) -> None:
    run = load(tmp_path, BASE)
    assert [stage.stage_name for stage in run.stages] == ["grpo"]
    assert run.file == tmp_path / "pipeline.yaml"


def test_the_job_folder_is_root_project_name_and_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(tmp_path, BASE).job_dir == tmp_path / "runs" / "tests" / "base"


def test_derived_values_are_filled_in(tmp_path: Path) -> None:
    stage = load(tmp_path, BASE).stages[0]
    assert stage.algorithm.repeat_times == 8
    assert stage.buffer.train_batch_size == 32
    assert stage.model.max_model_len == 64
    assert stage.trainer.max_token_len_per_gpu == 128
    assert stage.trainer.grad_clip == 1.0
    assert stage.trainer.world_size == 1
    assert stage.synchronizer.sync_method == "memory"
    assert stage.explorer.rollout_model.seed == 3
    assert stage.buffer.trainer_input.experience_buffer.storage_type == "queue"


def test_a_taskset_takes_what_it_lacks_from_the_model_and_the_buffer(tmp_path: Path) -> None:
    explorer_input = load(tmp_path, BASE).stages[0].buffer.explorer_input
    taskset, eval_taskset = explorer_input.taskset, explorer_input.eval_tasksets[0]
    assert taskset is not None
    assert (taskset.rollout_args.temperature, taskset.rollout_args.max_tokens) == (0.7, 16)
    assert (taskset.default_workflow_type, taskset.default_reward_fn_type) == ("math_workflow", "math_reward")
    assert (taskset.repeat_times, taskset.shuffle) == (8, True)
    assert (eval_taskset.name, eval_taskset.repeat_times, eval_taskset.shuffle) == (
        "eval_taskset_0",
        1,
        False,
    )
    assert (eval_taskset.rollout_args.temperature, eval_taskset.rollout_args.top_p) == (0.0, 1.0)


def test_the_evaluation_workflow_takes_precedence_over_the_others(tmp_path: Path) -> None:
    run = load(tmp_path, BASE, "buffer.explorer_input.default_eval_workflow_type=judge")
    explorer_input = run.stages[0].buffer.explorer_input
    assert explorer_input.taskset is not None
    assert explorer_input.taskset.default_workflow_type == "math_workflow"
    assert explorer_input.eval_tasksets[0].default_workflow_type == "judge"


def test_tasksets_may_be_a_list_of_one(tmp_path: Path) -> None:
    text = BASE.replace("    taskset:\n      name", "    tasksets:\n    - name").replace(
        "      eval", "    eval"
    )
    taskset = load(tmp_path, text).stages[0].buffer.explorer_input.taskset
    assert taskset is not None
    assert taskset.name == "gsm8k"
    assert diagnostics(tmp_path, text, "buffer.explorer_input.tasksets.0.path=synthetic://gsm9k") == [
        "pipeline.yaml:override: buffer.explorer_input.tasksets.0.path: "
        "unknown synthetic source 'gsm9k'; known: gsm8k (did you mean 'gsm8k'?)"
    ]


@pytest.mark.parametrize(
    ("algorithm", "repeat_times"), [("grpo", 8), ("rloo", 8), ("opmd", 8), ("reinforce", 1), ("raft", 8)]
)
def test_each_algorithm_has_its_own_repeat_times(tmp_path: Path, algorithm: str, repeat_times: int) -> None:
    run = load(tmp_path, BASE, f"algorithm.algorithm_type={algorithm}")
    assert run.stages[0].algorithm.repeat_times == repeat_times
    assert run.stages[0].buffer.train_batch_size == 4 * repeat_times


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ("max_model_len: 100, max_response_tokens: 30", (100, 70, 30)),
        ("max_model_len: 100, max_prompt_tokens: 30", (100, 30, 70)),
        ("max_model_len: 101", (101, 50, 51)),
        ("max_prompt_tokens: 5, max_response_tokens: 6", (11, 5, 6)),
        ("max_model_len: 100, max_prompt_tokens: 5, max_response_tokens: 6", (100, 5, 6)),
    ],
)
def test_lengths_follow_from_each_other(tmp_path: Path, given: str, filled: tuple[int, int, int]) -> None:
    run = load(tmp_path, BASE, f"model={{model_path: synthetic://qwen2-1m, {given}}}")
    model = run.stages[0].model
    assert (model.max_model_len, model.max_prompt_tokens, model.max_response_tokens) == filled


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1E5", 1e5), (".5", 0.5), ("2", 2.0), ("1_0", 10.0), ("1.5e+2", 150.0)],
)
def test_numbers_are_numbers(tmp_path: Path, text: str, value: float) -> None:
    run = load(tmp_path, BASE.replace("lr: 1e-5", f"lr: {text}"))
    assert run.stages[0].algorithm.optimizer.lr == value
    assert load(tmp_path, BASE, f"algorithm.optimizer.lr={text}").stages[0].algorithm.optimizer.lr == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("4GiB", 4 << 30), ("500MB", 5 * 10**8), ("'500 mb'", 5 * 10**8), ("1073741824", 1 << 30)],
)
def test_a_number_of_bytes_may_have_a_unit(tmp_path: Path, text: str, value: int) -> None:
    run = load(tmp_path, BASE, f"explorer.workflow_memory_bytes={text}")
    assert run.stages[0].explorer.workflow_memory_bytes == value


def test_free_arguments_hold_numbers_text_and_null(tmp_path: Path) -> None:
    args = "{clip_range: 2e-1, since: 2026-01-31, version: 0x10, at: 12:30, seed: null, tag: 1e5x}"
    run = load(tmp_path, BASE, f"algorithm.policy_loss_fn_args={args}")
    expected = {
        "clip_range": 0.2,
        "since": "2026-01-31",
        "version": 16,
        "at": "12:30",
        "seed": None,
        "tag": "1e5x",
    }
    assert run.stages[0].algorithm.policy_loss_fn_args == expected


def test_a_value_of_the_environment_may_be_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = BASE.replace("batch_size: 4", "batch_size: ${oc.env:TRINITY_TEST_BATCH,12}")
    assert load(tmp_path, text).stages[0].buffer.batch_size == 12
    monkeypatch.setenv("TRINITY_TEST_BATCH", "16")
    assert load(tmp_path, text).stages[0].buffer.batch_size == 16


def test_interpolations_see_overrides(tmp_path: Path) -> None:
    text = BASE + "  train_batch_size: ${buffer.batch_size}\nexplorer: {name: '${project}-${name}'}\n"
    run = load(tmp_path, text, "buffer.batch_size=9", "name=other")
    assert run.stages[0].buffer.train_batch_size == 9
    assert run.stages[0].explorer.name == "tests-other"


def test_every_failed_interpolation_is_named(tmp_path: Path) -> None:
    text = BASE.replace("batch_size: 4", "batch_size: ${a.b}").replace(
        "name: base", "name: ${oc.env:TRINITY_NONE}"
    )
    lines = diagnostics(tmp_path, text, "seed=${seed}")
    assert {line.split("; ")[1] for line in lines} == {
        "the environment variable TRINITY_NONE is not set",
        "it refers to itself",
        "the file has no key 'a.b'",
    }
    assert len(lines) == 3


def test_stages_are_merged_key_by_key(tmp_path: Path) -> None:
    warmup, rft = load(tmp_path, BASE + STAGES).stages
    assert (warmup.stage_name, warmup.mode, rft.stage_name, rft.mode) == ("warmup", "train", "rft", "both")
    assert warmup.algorithm.optimizer.lr == rft.algorithm.optimizer.lr == 1e-5
    assert (warmup.algorithm.optimizer.weight_decay, rft.algorithm.optimizer.weight_decay) == (0.5, 0.01)
    assert (warmup.buffer.train_batch_size, rft.buffer.train_batch_size) == (64, 24)
    assert (warmup.buffer.total_steps, rft.buffer.total_steps) == (30, None)
    taskset = rft.buffer.explorer_input.taskset
    assert taskset is not None
    assert (taskset.limit, taskset.name, taskset.format.prompt_key) == (100, "gsm8k", "question")
    assert warmup.model == rft.model


def test_a_stage_does_not_inherit_what_belongs_to_another_algorithm(tmp_path: Path) -> None:
    text = BASE.replace(
        "  optimizer", "  repeat_times: 4\n  kl_loss_fn: k2\n  loss_agg_mode: token-mean\n  optimizer"
    )
    warmup, rft = load(tmp_path, text + STAGES).stages
    assert (warmup.algorithm.repeat_times, warmup.algorithm.kl_loss_fn, warmup.algorithm.loss_agg_mode) == (
        1,
        None,
        None,
    )
    assert (rft.algorithm.repeat_times, rft.algorithm.kl_loss_fn) == (6, "k2")


def test_a_stage_with_its_own_data_does_not_inherit_the_queue(tmp_path: Path) -> None:
    text = (
        BASE
        + "  trainer_input:\n    experience_buffer: {name: q, storage_type: queue, path: 'sqlite:///q.db'}\n"
    )
    warmup, rft = load(tmp_path, text + STAGES).stages
    assert warmup.buffer.trainer_input.experience_buffer.storage_type == "file"
    assert warmup.buffer.trainer_input.experience_buffer.schema_type == "sft"
    assert rft.buffer.trainer_input.experience_buffer.path == "sqlite:///q.db"


def test_an_empty_section_of_a_stage_inherits_and_a_null_puts_a_key_back(tmp_path: Path) -> None:
    stages = "stages:\n- stage_name: a\n  buffer:\n- stage_name: b\n  model: {temperature: null}\n"
    a, b = load(tmp_path, BASE + stages).stages
    assert a.buffer.batch_size == 4
    assert (a.model.temperature, b.model.temperature) == (0.7, 1.0)


def test_overrides_reach_into_stages_by_name_and_by_number(tmp_path: Path) -> None:
    run = load(
        tmp_path,
        BASE + STAGES,
        "stages.warmup.buffer.total_steps=5",
        "stages.1.buffer.explorer_input.taskset.limit=7",
        "stages.rft.algorithm.optimizer.lr=2e-4",
        "buffer.explorer_input.eval_tasksets[0].limit=9",
        "log.level=DEBUG",
    )
    warmup, rft = run.stages
    assert rft.buffer.explorer_input.taskset is not None
    assert (warmup.buffer.total_steps, rft.buffer.explorer_input.taskset.limit) == (5, 7)
    assert (warmup.algorithm.optimizer.lr, rft.algorithm.optimizer.lr) == (1e-5, 2e-4)
    assert rft.buffer.explorer_input.eval_tasksets[0].limit == 9
    assert run.log.level == "DEBUG"


def test_an_override_of_one_place_leaves_an_alias_alone(tmp_path: Path) -> None:
    text = BASE.replace("format: {", "format: &format {").replace(
        "split: test", "split: test\n        format: *format"
    )
    run = load(tmp_path, text, "buffer.explorer_input.taskset.format.prompt_key=problem")
    explorer_input = run.stages[0].buffer.explorer_input
    assert explorer_input.taskset is not None
    assert explorer_input.taskset.format.prompt_key == "problem"
    assert explorer_input.eval_tasksets[0].format.prompt_key == "question"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("buffer.batch_size", "override: 'buffer.batch_size': found no `key.path=value`"),
        ("buffer.batch_sice=3", "override: buffer.batch_sice: unknown key; allowed here:"),
        ("stages.warmpu.mode=train", "unknown item 'warmpu'; known: rft, warmup (did you mean 'warmup'?)"),
        ("stages.7.mode=train", "unknown item '7'"),
        ("seed.x=3", "seed is a value, not a section"),
        ("log={off: 1}", "found '{off: 1}', which is not valid YAML"),
        ("buffer.batch_size=[1", "found '[1', which is not valid YAML"),
        (
            "stages.warmup.buffer.train_batch_size=0",
            "override: stages.warmup.buffer.train_batch_size: found 0; allowed: ≥ 1",
        ),
    ],
)
def test_an_override_that_fits_nowhere_is_refused(tmp_path: Path, override: str, message: str) -> None:
    lines = diagnostics(tmp_path, BASE + STAGES, override)
    assert len(lines) == 1
    assert message in lines[0]


def key_paths(section: type[Section], above: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{above}{name}"
        below = section_in(field.annotation)
        if below is not None and name != "stages":
            yield from key_paths(below, f"{above}{name}.")


@pytest.mark.parametrize("value", ["-1", "nonsense", "[{}]"])
def test_no_value_of_any_key_ends_in_anything_but_a_config_error(tmp_path: Path, value: str) -> None:
    refused = 0
    for key in {*key_paths(StageConfig), *key_paths(RunConfig)}:
        try:
            load(tmp_path, BASE, f"{key}={value}")
        except ConfigError as error:
            refused += 1
            assert "Input should" not in str(error), f"{key}: not in our words"
    assert refused > 100


def test_a_run_is_frozen(tmp_path: Path) -> None:
    run = load(tmp_path, BASE)
    with pytest.raises(ValidationError, match="frozen"):
        run.seed = 4
    with pytest.raises(ValidationError, match="frozen"):
        run.stages[0].buffer.batch_size = 4


def test_every_problem_is_said_once_and_at_its_line(tmp_path: Path) -> None:
    text = BASE.replace("temperature: 0.7", "temprature: 0.7").replace("batch_size: 4", "batch_size: -4")
    lines = diagnostics(tmp_path, text + STAGES + "bufer: {}\n")
    assert [line.split(": ")[:2] for line in lines] == [
        ["pipeline.yaml:14", "model.temprature"],
        ["pipeline.yaml:16", "buffer.batch_size"],
        ["pipeline.yaml:47", "bufer"],
    ]


def test_a_problem_that_one_stage_inherits_names_the_stage(tmp_path: Path) -> None:
    stages = STAGES.replace("repeat_times: 6", "algorithm_type: grpo")
    text = BASE.replace("  optimizer", "  repeat_times: 1\n  optimizer")
    assert diagnostics(tmp_path, text + stages) == [
        "pipeline.yaml:8: algorithm.repeat_times: found 1 with 'grpo', which compares the rollouts of a task"
        "; allowed: ≥ 2; 8 is usual (in stage rft)"
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.min_response_tokens=16", "found 16 with max_response_tokens 16; it must be less"),
        ("model.model_path=s3://bucket/model", "addresses of the kind s3:// are not yet supported"),
        (
            "buffer.explorer_input.taskset=null",
            "buffer.explorer_input.taskset: missing; mode 'both' explores tasks",
        ),
        ("buffer.default_workflow_type=null", "taskset.default_workflow_type: missing"),
        (
            "buffer.explorer_input.taskset.format.messages_key=chat",
            "has no effect with prompt_type 'plaintext'",
        ),
        ("buffer.explorer_input.taskset.rollout_args.max_tokens=99", "allowed: ≤ 16"),
        (
            "buffer.explorer_input.taskset.rollout_args.n=4",
            "not a key any more; write repeat_times of the task set",
        ),
        (
            "buffer.trainer_input.experience_buffer={storage_type: store, path: x}",
            "found 'x' with storage_type 'store' and mode 'both'",
        ),
        ("cluster={gpu_per_node: 2}\x00trainer.world_size=2", "the engines leave 1 GPU(s)"),
        (
            "cluster={gpu_per_node: 2, node_num: 3}\x00explorer.rollout_model.tensor_parallel_size=3",
            "an engine are on one machine; allowed: 1 to 2",
        ),
        (
            "monitor={monitor_type: tensorboard, monitor_args: {base_url: x}}",
            "monitor_args (base_url) has no effect with 'tensorboard'; only wandb takes it; remove it",
        ),
        (
            "monitor={monitor_type: mlflow, monitor_args: {api_key: abcd, base_url: x, uri: y}}",
            "monitor_args (api_key, base_url) has no effect with 'mlflow'; only wandb takes them; remove",
        ),
        ("algorithm.optimizer.betas=[0.9]", "algorithm.optimizer.betas.1: missing; a list of 2 is expected"),
        ("algorithm.optimizer.lr=.inf", "a number is expected"),
        ("algorithm.advantage_fn_args=[1]", "found a list; a section is expected"),
        ("trainer.ulysses_sequence_parallel_size=2", "found 2; allowed: 1"),
        ("model.model_path=", "missing; this key has no default"),
        ("model.model_path=''", "it must not be empty"),
        ("model.model_path=???", "found '???'; it stands for a value that must be given"),
        ("stage_name=x", "belongs to a stage"),
        ("cluster.trainer_gpu_num=1", "found 1; the run works this out by itself; remove the key"),
        ("data_processor={experience_pipeline: {operators: [{name: a b}]}}", "an operator's name is"),
        (
            "data_processor={experience_pipeline: {operators: [{name: data_juicer}]}}",
            "operators or config_path",
        ),
        ("stages=3", "stages: found 3; a list of stages is expected"),
        ("stages=[rft]", "stages.0: found 'rft'; a stage is expected"),
        ("stages=[{mode: both}]", "stages.0.stage_name: missing; every stage has a name"),
        (
            "explorer.workflow_memory_bytes=4gigs",
            "found '4gigs'; a number of bytes is expected, such as 500000000, 500MB or 4GiB",
        ),
        ("explorer.workflow_memory_bytes=1MB", "found '1MB'; allowed: ≥ 268435456"),
    ],
)
def test_contradictions_and_gaps_are_one_line_each(tmp_path: Path, override: str, message: str) -> None:
    lines = diagnostics(tmp_path, BASE, *override.split("\x00"))
    assert message in lines[0]
    assert len(lines) == (2 if "default_workflow_type" in override else 1)


TRAIN = """
algorithm: {algorithm_type: opmd}
mode: train
model: {model_path: synthetic://qwen2-1m, max_model_len: 64}
buffer:
  train_batch_size: 16
  trainer_input:
    experience_buffer: {path: checkpoints/quickstart/gsm8k, query: select experience_id from experiences}
"""


def test_a_query_makes_the_buffer_a_store(tmp_path: Path) -> None:
    stage = load(tmp_path, TRAIN).stages[0]
    assert stage.buffer.trainer_input.experience_buffer.storage_type == "store"
    assert stage.buffer.trainer_input.experience_buffer.schema_type == "experience"
    assert stage.synchronizer.sync_method == "checkpoint"
    dpo = load(tmp_path, TRAIN, "algorithm.algorithm_type=dpo").stages[0]
    assert (dpo.algorithm.repeat_times, dpo.buffer.trainer_input.experience_buffer.schema_type) == (2, "dpo")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "buffer.trainer_input.experience_buffer.query=null",
            "'file' with algorithm_type 'opmd', which needs experiences",
        ),
        (
            "buffer.trainer_input.experience_buffer.split=test",
            "has no effect with storage_type 'store', only with 'file'",
        ),
        (
            "buffer.trainer_input.experience_buffer.storage_type=queue",
            "query: has no effect with mode 'train', whose rows an explorer makes",
        ),
        ("buffer.trainer_input.experience_buffer.schema_type=sft", "found 'sft' with algorithm_type 'opmd'"),
        ("buffer.train_batch_size=null", "how many rows, or pairs of dpo, does a step train?"),
    ],
)
def test_training_from_storage_has_its_own_rules(tmp_path: Path, override: str, message: str) -> None:
    lines = diagnostics(tmp_path, TRAIN, *override.split("\x00"))
    assert len(lines) == 1
    assert message in lines[0]


def test_keys_of_the_documents_that_ask_for_nothing_may_stand(tmp_path: Path) -> None:
    quiet = """
    monitor: {enable_ray_timeline: false}
    log: {level: INFO, group_by_node: false}
    ray_namespace: null
    trainer: {trainer_type: verl, name: trainer, save_strategy: unrestricted, trainer_config: null,
      trainer_config_path: ''}
    explorer: {env_vars: {}, auxiliary_models: [],
      rollout_model: {engine_type: vllm_async, enable_history: false}}
    service: {data_juicer: {server_url: 'http://127.0.0.1:5005', auto_start: true, port: 5005}}
    """
    run = load(tmp_path, BASE + textwrap.dedent(quiet))
    assert run.stages[0].trainer.trainer_type == "fsdp"
    assert run.stages[0].explorer.rollout_model.engine_type == "vllm"
    (note,) = run.notes
    assert note.endswith(": service.data_juicer has no effect: Data-Juicer's operators run in process")


def test_a_key_that_is_on_by_default_elsewhere_cannot_be_switched_off_silently(tmp_path: Path) -> None:
    lines = diagnostics(tmp_path, BASE, "trainer.use_remove_padding=false", "trainer.balance_batch=true")
    assert lines == [
        "pipeline.yaml:override: trainer.use_remove_padding: found false; not yet supported; "
        "remove the key, or leave it at true"
    ]


def test_a_key_for_a_service_is_never_shown(tmp_path: Path) -> None:
    run = load(tmp_path, BASE, "monitor={monitor_type: wandb, monitor_args: {api_key: very-secret}}")
    assert "very-secret" not in repr(run)
    assert run.monitor.monitor_args.api_key is not None
    assert run.monitor.monitor_args.api_key.get_secret_value() == "very-secret"


def test_a_missing_file_and_a_folder_are_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file; give the path of a pipeline file"):
        load_pipeline_file(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="this is a folder"):
        load_pipeline_file(tmp_path)


def test_yaml_merge_keys_work(tmp_path: Path) -> None:
    text = BASE.replace("taskset:", "taskset: &tasks").replace(
        "- path: synthetic://gsm8k", "- <<: *tasks\n        name: held_out"
    )
    eval_taskset = load(tmp_path, text).stages[0].buffer.explorer_input.eval_tasksets[0]
    assert (eval_taskset.name, eval_taskset.split, eval_taskset.path) == (
        "held_out",
        "test",
        "synthetic://gsm8k",
    )


def test_yaml_that_would_make_objects_is_refused(tmp_path: Path) -> None:
    lines = diagnostics(tmp_path, BASE + "log: !!python/object/apply:os.getcwd []\n")
    assert len(lines) == 1
    assert "not valid YAML: could not determine a constructor for the tag" in lines[0]


def test_an_anchor_that_contains_itself_is_refused(tmp_path: Path) -> None:
    assert "an anchor contains itself" in diagnostics(tmp_path, BASE + "log: &log {level: *log}\n")[0]


def test_a_run_whose_configuration_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StoreError, match=r"config\.json cannot be read \(ValidationError\)"):
        recorded_run(tmp_path)


def test_a_configuration_on_record_reads_as_it_was_where_keys_have_no_value(tmp_path: Path) -> None:
    """A stage that only trains, and one that only evaluates, need no `batch_size`."""
    train = {"path": "synthetic://gsm8k"}
    text = {
        "project": "tests",
        "name": "recorded",
        "model": {"model_path": "synthetic://qwen2-1m", "max_model_len": 64},
        "stages": [
            {"stage_name": "sft", "mode": "train", "algorithm": {"algorithm_type": "sft"},
             "buffer": {"train_batch_size": 4, "trainer_input": {"experience_buffer": train}}},
            {"stage_name": "held_out", "mode": "bench", "buffer": {
                "default_workflow_type": "math_workflow", "explorer_input": {"eval_tasksets": [train]}}},
        ],
    }  # fmt: skip
    config = load_pipeline_file(text)
    (tmp_path / "config.json").write_text(json.dumps(config.public_dump()))
    assert recorded_run(tmp_path).stages == config.stages
    assert [StageConfig.model_validate(each) for each in config.public_dump()["stages"]] == [*config.stages]


def test_what_a_person_writes_is_no_stand_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size: found 0"):
        load(tmp_path, BASE, "buffer.train_batch_size=0")
