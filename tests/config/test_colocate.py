"""What a pipeline file may say about engines and a trainer that share GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_data.config import load_pipeline_file
from trinity_data.config.run import RunConfig
from trinity_data.errors import ConfigError

QWEN = Path(__file__).parents[2] / "pipelines" / "gsm8k_qwen.yaml"
COLOCATE = "mode=colocate"


def load(*overrides: str) -> RunConfig:
    return load_pipeline_file(QWEN, ["explorer.rollout_model.engine_num=1", *overrides])


def test_one_gpu_is_shared_and_a_note_says_so() -> None:
    run = load("mode=both", "cluster.gpu_per_node=1")
    (stage,) = run.stages
    assert (stage.mode, stage.trainer.world_size, stage.shares_gpus) == ("colocate", 1, True)
    assert any("gpu_per_node: found 1, which engine and trainer share" in note for note in run.notes)
    beside = load("mode=both", "cluster.gpu_per_node=2")
    assert (beside.stages[0].mode, beside.stages[0].trainer.world_size) == ("both", 1)
    assert not any("engine and trainer share" in note for note in beside.notes)


def test_a_file_that_does_not_name_gpus_has_those_of_the_machine_and_shares_a_single_one() -> None:
    overrides = ["cluster=null", "explorer.rollout_model.engine_num=1", "synchronizer.sync_method=memory"]
    found = {}

    def load_with(count: int) -> RunConfig:
        return load_pipeline_file(QWEN, overrides, gpu_count=lambda: count)

    for count in (0, 1, 4):
        run = load_with(count)
        (stage,) = run.stages
        found[count] = (stage.mode, stage.cluster.gpu_per_node, stage.trainer.world_size)
        notes = [note for note in run.notes if "cluster.gpu_per_node: missing" in note]
        assert len(notes) == (count > 0)
        assert all(f"this machine has {count} GPU(s), which the run uses" in note for note in notes)
        assert any("mode 'both' runs as 'colocate'" in note for note in notes) == (count == 1)
    assert found == {0: ("both", 0, 1), 1: ("colocate", 1, 1), 4: ("both", 4, 3)}


def test_nobody_looks_for_gpus_where_the_file_says_how_many_or_explorer_and_trainer_are_apart() -> None:
    def never() -> int:
        raise AssertionError("the machine was looked at")

    for overrides in (["cluster.gpu_per_node=0", "synchronizer.sync_method=memory"], []):
        load_pipeline_file(QWEN, overrides, gpu_count=never)
    part = ["mode=explore", "cluster=null", "synchronizer.sync_method=memory"]
    (stage,) = load_pipeline_file(QWEN, part, gpu_count=never).stages
    assert stage.cluster.gpu_per_node == 0


def test_workers_have_all_gpus_that_engines_share() -> None:
    (stage,) = load(COLOCATE, "cluster.gpu_per_node=4", "explorer.rollout_model.engine_num=3").stages
    assert stage.trainer.world_size == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("synchronizer={sync_style: fully_async}", "synchronizer.sync_style: found 'fully_async' with mode"),
        ("explorer.max_inflight_batches=2", "explorer.max_inflight_batches: found 2 with mode 'colocate'"),
        ("explorer.over_rollout={ratio: 0.5}", "explorer.over_rollout.ratio: found 0.5 with mode 'colocate'"),
        ("explorer.auxiliary_models=[{model_path: x}]", "explorer.auxiliary_models: found 1 with mode"),
        (
            "explorer.rollout_model.tensor_parallel_size=2",
            "tensor_parallel_size: found 2 with mode 'colocate'",
        ),
        (
            "explorer.rollout_model.engine_num=3",
            "engine_num: found 3; mode 'colocate' has one on each of 2 GPU",
        ),
        ("trainer.world_size=3", "trainer.world_size: found 3; mode 'colocate' has one on each of 2 GPU"),
    ],
)
def test_nothing_may_generate_while_the_trainer_has_the_gpu(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(COLOCATE, "cluster.gpu_per_node=2", override)
    assert message in str(caught.value)
