"""Ranks, engines and the way of the weights are each stage's own,
and GPUs that are not there are not waited for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_data.config import StageConfig, load_pipeline_file
from trinity_data.errors import ConfigError
from trinity_data.launch.compute import check_gpus, engine_shape, gpus_needed

FILE = Path(__file__).with_name("fake.yaml")


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[StageConfig, ...]:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    return load_pipeline_file(FILE, ["cluster.gpu_per_node=3", "explorer.rollout_model.engine_num=2"]).stages


def test_a_stage_that_trains_takes_all_gpus_and_one_that_explores_leaves_the_engines_theirs(
    stages: tuple[StageConfig, ...],
) -> None:
    assert [stage.trainer.world_size for stage in stages] == [3, 1]
    assert [gpus_needed(stage) for stage in stages] == [3, 3]
    check_gpus(stages, 3)


def test_gpus_that_a_machine_lacks_are_reported_and_not_waited_for(stages: tuple[StageConfig, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_gpus(stages[1:], 2)
    assert str(caught.value) == (
        "stage 'grpo' asks for 3 GPU(s): trainer.world_size 1 and 2 for engines; there are 2; "
        "ask for fewer, or set cluster.gpu_per_node=0"
    )


def test_engines_of_another_kind_are_other_engines(stages: tuple[StageConfig, ...]) -> None:
    grpo = stages[1]
    assert engine_shape(grpo) == engine_shape(stages[1].model_copy(update={"stage_name": "again"}))
    for section, change in (
        ("model", {"max_model_len": 999}),
        ("explorer", {"env_vars": {"A": "1"}}),
        ("explorer", {"rollout_model": grpo.explorer.rollout_model.model_copy(update={"engine_num": 1})}),
        ("cluster", {"gpu_per_node": 0}),
    ):
        changed = grpo.model_copy(update={section: getattr(grpo, section).model_copy(update=change)})
        assert engine_shape(changed) != engine_shape(grpo)


def test_auxiliary_models_have_gpus_of_their_own_beside_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    models = "explorer.auxiliary_models=[{model_path: a/grader, tensor_parallel_size: 2, engine_type: vllm}]"
    overrides = [models, "explorer.rollout_model.engine_type=vllm"]
    (warmup, grpo) = load_pipeline_file(FILE, [*overrides, "cluster.gpu_per_node=4"]).stages
    assert (warmup.trainer.world_size, grpo.trainer.world_size, gpus_needed(grpo)) == (4, 1, 4)
    (model,) = grpo.explorer.auxiliary_models
    assert (model.name, model.seed) == ("grader", grpo.explorer.rollout_model.seed)
    other = grpo.explorer.model_copy(update={"auxiliary_models": ()})
    assert engine_shape(grpo) != engine_shape(grpo.model_copy(update={"explorer": other}))
    with pytest.raises(ConfigError, match="found 3; the engines take 3"):
        load_pipeline_file(FILE, [*overrides, "cluster.gpu_per_node=3"])
    two = "explorer.auxiliary_models=[{model_path: a/grader}, {model_path: b/grader}]"
    with pytest.raises(
        ConfigError, match=r"auxiliary_models\.1\.name: found 'grader', which another model of the stage has"
    ):
        load_pipeline_file(FILE, [two])


def test_a_later_stage_names_no_model_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"model\.model_path: found 'other', but the first stage has 'synthetic://qwen2-1m'"
    ):
        load_pipeline_file(FILE, ["stages.grpo.model.model_path=other"])
