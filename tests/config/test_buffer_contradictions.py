"""What a pipeline file may say about the trainer's rows, and the diagnostics where it contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_data.config import ExperienceBufferConfig, load_pipeline_file
from trinity_data.errors import ConfigError

QWEN = Path(__file__).parents[2] / "pipelines" / "gsm8k_qwen.yaml"
KEY = "buffer.trainer_input.experience_buffer"


def buffer_of(*overrides: str) -> ExperienceBufferConfig:
    run = load_pipeline_file(QWEN, [f"{KEY}.{each}" for each in overrides])
    return run.stages[-1].buffer.trainer_input.experience_buffer


def diagnostic(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(QWEN, list(overrides))
    return str(caught.value)


def test_both_spellings_of_replay_mean_the_same() -> None:
    new = buffer_of("replay_buffer={enable: true, reuse_cooldown_time: 5}")
    old = buffer_of("use_priority_queue=true", "reuse_cooldown_time=5")
    assert new.replay_buffer.enable and new.replay_buffer.reuse_cooldown_time == 5
    assert (old.replay_buffer.enable, old.replay_buffer.reuse_cooldown_time) == (True, 5)
    assert (new.replay_buffer.priority_fn, new.replay_buffer.priority_fn_args.decay) == ("linear_decay", 2.0)
    assert not buffer_of().replay_buffer.enable


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["use_priority_queue=true", "replay_buffer={enable: false}"],
            f"{KEY}.use_priority_queue: found true, but replay_buffer.enable is false; they mean the same",
        ),
        (
            ["reuse_cooldown_time=5", "replay_buffer={enable: true, reuse_cooldown_time: 6}"],
            (
                f"{KEY}.reuse_cooldown_time: found 5, but replay_buffer.reuse_cooldown_time is 6; "
                "they mean the same"
            ),
        ),
        (
            ["reuse_cooldown_time=5"],
            f"{KEY}.reuse_cooldown_time: has no effect without replay_buffer.enable",
        ),
        (
            ["replay_buffer={priority_fn: uniform}"],
            f"{KEY}.replay_buffer.priority_fn: has no effect without replay_buffer.enable",
        ),
        (
            ["replay_buffer={enable: true, priority_fn: linear_dekay}"],
            "unknown value 'linear_dekay'; allowed: linear_decay, decay_limit_randomization, uniform "
            "(did you mean 'linear_decay'?)",
        ),
        (
            ["replay_buffer={enable: true, priority_fn_args: {sigma: 1}}"],
            (
                f"{KEY}.replay_buffer.priority_fn_args.sigma: has no effect with priority_fn 'linear_decay', "
                "which takes decay"
            ),
        ),
        (
            ["replay_buffer={enable: true, priority_fn_args: {decai: 1}}"],
            "unknown key; allowed here: decay, use_count_limit, sigma (did you mean 'decay'?)",
        ),
    ],
)
def test_a_contradiction_of_the_buffer_is_named(overrides: list[str], message: str) -> None:
    assert message in diagnostic(*(f"{KEY}.{each}" for each in overrides))


def test_staleness_is_limited_by_the_documents_own_keys() -> None:
    limit = "algorithm.sample_strategy_args.max_staleness=2"
    run = load_pipeline_file(QWEN, ["algorithm.sample_strategy=staleness_control", limit])
    assert run.stages[-1].algorithm.sample_strategy_args.max_staleness == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.sample_strategy_args={expert_advantage: 2}"],
            "algorithm.sample_strategy_args.expert_advantage: has no effect with sample_strategy 'default'",
        ),
        (
            [
                "algorithm.sample_strategy=staleness_control",
                "algorithm.sample_strategy_args={max_staleness: 2}",
                "synchronizer={sync_interval: 3, sync_offset: 1}",
            ],
            "max_staleness: found 2; "
            "with sync_interval 3 and sync_offset 1 rollouts are up to 3 versions old when their step is "
            "trained; allowed: ≥ 3, or -1: no limit",
        ),
        (
            [
                "algorithm.sample_strategy_args={max_staleness: 2}",
                "synchronizer={sync_style: trainer_driven, trainer_sync_interval: 4}",
            ],
            "max_staleness: found 2; with trainer_sync_interval 4 rollouts are up to 3 versions old when "
            "their step is trained; allowed: ≥ 3, or -1: no limit",
        ),
        (
            [
                "algorithm.sample_strategy=staleness_control",
                "algorithm.sample_strategy_args={max_stalenes: 1}",
            ],
            "max_stalenes: unknown key; allowed here: max_staleness, expert_data_ratio",
        ),
    ],
)
def test_a_contradiction_of_the_strategy_is_named(overrides: list[str], message: str) -> None:
    assert message in diagnostic(*overrides)


def test_staleness_is_limited_where_the_file_says_nothing() -> None:
    def limit(*overrides: str) -> int | None:
        return load_pipeline_file(QWEN, overrides).stages[-1].algorithm.sample_strategy_args.staleness_limit

    assert limit() == 4
    assert limit("synchronizer={sync_interval: 3, sync_offset: 2}") == 14
    assert (
        limit("synchronizer={sync_style: explorer_driven, explorer_sync_interval: 3, sync_offset: 2}") == 12
    )
    assert limit("algorithm.sample_strategy_args={max_staleness: -1}") is None
    # who asks for replay asks for old rollouts
    assert limit(f"{KEY}.replay_buffer={{enable: true}}") == 4
    assert limit(f"{KEY}.replay_buffer={{enable: true, reuse_cooldown_time: 60}}") is None


def test_a_batch_that_is_smaller_than_a_group_is_refused_unless_groups_may_be_torn() -> None:
    run = load_pipeline_file(QWEN).stages[-1]
    assert run.buffer.explorer_input.taskset is not None
    times = run.buffer.explorer_input.taskset.repeat_times
    small = f"buffer.train_batch_size={times - 1}"
    assert f"groups have {times} rollouts and are never torn; allowed: ≥ {times}" in diagnostic(small)
    load_pipeline_file(QWEN, [small, f"{KEY}.whole_groups=false"])


def test_a_step_that_makes_more_than_it_trains_is_noted() -> None:
    made = load_pipeline_file(QWEN).stages[-1].buffer.train_batch_size
    assert load_pipeline_file(QWEN).notes == ()
    (note,) = load_pipeline_file(QWEN, [f"buffer.train_batch_size={made // 2}"]).notes
    assert (
        f"a step makes {made} rollouts" in note
        and f"and trains {made // 2}; those that operators keep" in note
    )
    assert "go stale after 4 versions" in note


MIX = "algorithm.sample_strategy=mix"
ANSWERS = "buffer.trainer_input.auxiliary_buffers={sft_dataset: {path: synthetic://gsm8k}}"


def test_an_auxiliary_buffer_has_defaults_of_its_own() -> None:
    rows = "{old: {path: checkpoints/a/b, query: select experience_id from experiences}}"
    (answers,) = load_pipeline_file(QWEN, [MIX, ANSWERS]).stages
    (run,) = load_pipeline_file(
        QWEN,
        [MIX, "algorithm.sample_strategy_args={sft_dataset_name: old}",
         f"buffer.trainer_input.auxiliary_buffers={rows}"],
    ).stages  # fmt: skip
    first = answers.buffer.trainer_input.auxiliary_buffers["sft_dataset"]
    assert (first.name, first.storage_type, first.schema_type) == ("sft_dataset", "file", "sft")
    other = run.buffer.trainer_input.auxiliary_buffers["old"]
    assert (other.name, other.storage_type, other.schema_type) == ("old", "store", "experience")


AUXILIARY = "buffer.trainer_input.auxiliary_buffers"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([MIX], f"{AUXILIARY}.sft_dataset: missing; write the buffer that expert rows come from"),
        ([ANSWERS], f"{AUXILIARY}.sft_dataset: has no effect without algorithm.sample_strategy: mix"),
        (
            [MIX, ANSWERS, "algorithm.sample_strategy_args={sft_dataset_name: sft_datset}"],
            "unknown auxiliary buffer 'sft_datset'; known: sft_dataset (did you mean 'sft_dataset'?)",
        ),
        (
            [MIX, ANSWERS, f"{AUXILIARY}.sft_dataset.paht=x"],
            f"{AUXILIARY}.sft_dataset.paht: unknown key; allowed here: name, storage_type, path",
        ),
        (
            [MIX, ANSWERS, f"{AUXILIARY}.sft_dataset.storage_type=queue"],
            (
                f"{AUXILIARY}.sft_dataset.storage_type: found 'queue' for an auxiliary buffer; allowed: "
                "file, sql, store"
            ),
        ),
        (
            [MIX, ANSWERS, f"{AUXILIARY}.sft_dataset.max_read_timeout=5"],
            f"{AUXILIARY}.sft_dataset.max_read_timeout: has no effect in an auxiliary buffer",
        ),
        (
            [MIX, ANSWERS, "buffer.train_batch_size=1"],
            "expert_data_ratio: found 0.5; of train_batch_size 1 no row would be left",
        ),
    ],
)
def test_what_cannot_be_mixed_is_named(overrides: list[str], message: str) -> None:
    assert message in diagnostic(*overrides)


@pytest.mark.parametrize(
    ("overrides", "storage", "path"),
    [
        (["storage_type=queue", "path=null"], "queue", "experience_buffer.jsonl"),
        (["storage_type=store", "path=null"], "store", None),
        (["storage_type=sql", "path=null"], "sql", "sqlite:///experience_buffer.db"),
        (["storage_type=file", "path=null"], "file", "experience_buffer.jsonl"),
        (["storage_type=sql", "path=duckdb:///rows.duckdb"], "sql", "duckdb:///rows.duckdb"),
        (["storage_type=file", "path=rows"], "file", "rows"),
    ],
)
def test_every_storage_type_has_a_path(overrides: list[str], storage: str, path: str | None) -> None:
    buffer = buffer_of(*overrides)
    assert (buffer.storage_type, buffer.path) == (storage, path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["storage_type=store"], (
            "found 'sqlite:///gsm8k.db' with storage_type 'store' and mode 'both', "
            "which copies no rows")),
        (["storage_type=sql", "path=x.jsonl"], (
            "found 'x.jsonl' with storage_type 'sql'; allowed: "
            "sqlite:///NAME.db")),
        (["storage_type=file"], (
            "found 'sqlite:///gsm8k.db' with storage_type 'file'; write storage_type: "
            "sql")),
        (["path=postgresql://host/x"], (
            "found 'postgresql://host/x'; postgresql:// is no buffer; allowed: "
            "sqlite:///")),
    ],
)  # fmt: skip
def test_a_path_that_is_not_of_its_storage_type_is_named(overrides: list[str], message: str) -> None:
    assert message in diagnostic(*(f"{KEY}.{each}" for each in overrides))


def test_what_the_explorer_made_is_saved_where_the_file_says() -> None:
    pipeline = "data_processor.experience_pipeline"
    (stage,) = load_pipeline_file(QWEN, []).stages
    saved = stage.data_processor.experience_pipeline
    assert (saved.save_input, saved.input_save_path) == (True, "sqlite:///explorer_output.db")
    assert f"{pipeline}.input_save_path: has no effect without save_input" in diagnostic(
        f"{pipeline}.input_save_path=x.jsonl", f"{pipeline}.save_input=false"
    )
    assert "found 'sqlite:///gsm8k.db', which experience_buffer.path is too" in diagnostic(
        f"{pipeline}.input_save_path=sqlite:///gsm8k.db"
    )
