"""What a machine lacks is said at once, with what to set."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from trinity_data.config import load_pipeline_file
from trinity_data.config.explorer import choose_engine_type
from trinity_data.config.gpus import count_gpus, first_gpus
from trinity_data.config.hub import hub_is_reachable, hub_revision, is_in_hub_cache, looks_like_a_hub_id
from trinity_data.config.preflight import check_machine, notes_about_machine
from trinity_data.errors import ConfigError
from trinity_data.launch.cluster import ray_options

QWEN = Path(__file__).parents[2] / "pipelines" / "gsm8k_qwen.yaml"
TRAIN = """
mode: train
algorithm: {algorithm_type: sft}
model: {model_path: synthetic://qwen2-1m, max_model_len: 64}
buffer: {train_batch_size: 4, trainer_input: {experience_buffer: {path: PATH}}}
"""


@pytest.fixture(autouse=True)
def an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRINITY_MODEL_PATH", "TRINITY_TASKSET_PATH"):
        monkeypatch.delenv(variable, raising=False)
    cache = tmp_path / "hf" / "hub"
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    return cache


def snapshot(cache: Path, repository: str, commit: str) -> Path:
    """A folder that the cache holds as the main revision of a repository."""
    main = cache / repository / "refs" / "main"
    main.parent.mkdir(parents=True)
    main.write_text(commit)
    folder = cache / repository / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


def missing(file: Path, *overrides: str, gpu_count: int, hub: bool) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_machine(load_pipeline_file(file, overrides), gpu_count=gpu_count, hub_reachable=lambda: hub)
    return str(caught.value).replace(f"{file.parent}/", "").splitlines()


def test_everything_that_is_missing_is_in_one_message() -> None:
    model = (
        "found 'Qwen/Qwen2.5-1.5B-Instruct'; it is no folder here, not in the Hugging Face cache, "
        "and the hub cannot be reached"
    )
    tasks = (
        "found 'openai/gsm8k'; it is no folder here, not in the Hugging Face cache, "
        "and the hub cannot be reached"
    )
    assert missing(QWEN, gpu_count=0, hub=False) == [
        f"gsm8k_qwen.yaml:12: model.model_path: {model}; set TRINITY_MODEL_PATH to a folder",
        "gsm8k_qwen.yaml:17: cluster.gpu_per_node: asks for 2 GPU(s); this machine has 0; "
        "set cluster.gpu_per_node=0 to run on the CPU",
        (
            f"gsm8k_qwen.yaml:25: buffer.explorer_input.taskset.path: {tasks}; "
            "set TRINITY_TASKSET_PATH to a folder"
        ),
        (
            f"gsm8k_qwen.yaml:37: buffer.explorer_input.eval_tasksets.0.path: {tasks}; "
            "set TRINITY_TASKSET_PATH to a folder"
        ),
    ]


def test_a_machine_with_gpus_and_the_hub_lacks_nothing() -> None:
    check_machine(load_pipeline_file(QWEN), gpu_count=2, hub_reachable=lambda: True)


def test_the_hub_is_not_asked_when_nothing_hangs_on_it(an_empty_cache: Path) -> None:
    def never() -> bool:
        raise AssertionError("the hub was asked")

    model = snapshot(an_empty_cache, "models--Qwen--Qwen2.5-1.5B-Instruct", "abc")
    tasks = snapshot(an_empty_cache, "datasets--openai--gsm8k", "def") / "main"
    tasks.mkdir()
    for file in (model / "model.safetensors", tasks / "train-0.parquet"):
        file.touch()
    check_machine(load_pipeline_file(QWEN), gpu_count=2, hub_reachable=never)


def test_one_gpu_too_few_is_not_answered_with_the_cpu() -> None:
    lines = missing(QWEN, gpu_count=1, hub=True)
    assert lines == [
        "gsm8k_qwen.yaml:17: cluster.gpu_per_node: asks for 2 GPU(s); this machine has 1; run it where 2 are"
    ]


def test_several_machines_want_a_cluster_whose_gpus_this_machine_need_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert missing(QWEN, "cluster.node_num=2", gpu_count=2, hub=True) == [
        "gsm8k_qwen.yaml:override: cluster.node_num: found 2; without RAY_ADDRESS a run has this machine "
        "alone; set RAY_ADDRESS to the address of a Ray cluster, or node_num to 1"
    ]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_machine(load_pipeline_file(QWEN, ["cluster.node_num=2"]), gpu_count=0, hub_reachable=lambda: True)


def test_nccl_wants_two_gpus_and_never_becomes_another_method_without_a_word() -> None:
    nccl = ("synchronizer.sync_method=nccl", "explorer.rollout_model.engine_type=vllm")
    lines = missing(QWEN, *nccl, gpu_count=1, hub=True)
    assert (
        lines[0]
        == "gsm8k_qwen.yaml:override: synchronizer.sync_method: found 'nccl', which works between GPUs; "
        "this machine has 1; set synchronizer.sync_method=memory"
    )
    # an evaluation moves no weights between processes
    assert not any("nccl" in line for line in missing(QWEN, *nccl, "mode=bench", gpu_count=1, hub=True))
    config = load_pipeline_file(QWEN, nccl)
    assert config.stages[0].sends_weights
    assert not any("sync_method" in note for note in config.notes)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("explorer.rollout_model.engine_type=transformers", "engine_type is 'transformers', which reads"),
        ("mode=explore", "mode is 'explore'; explorer and trainer are to be in one process"),
        ("cluster.node_num=2", "cluster.node_num is 2; it works on one machine"),
    ],
)
def test_where_nothing_can_be_sent_weights_go_through_memory_and_a_note_says_why(
    override: str, reason: str
) -> None:
    nccl = ("synchronizer.sync_method=nccl", "explorer.rollout_model.engine_type=vllm")
    config = load_pipeline_file(QWEN, [*nccl, "explorer.rollout_model.engine_num=1", override])
    assert not config.stages[0].sends_weights
    assert config.stages[0].synchronizer.weights_method == "memory"
    (note,) = (note for note in config.notes if "sync_method" in note)
    assert "synchronizer.sync_method: stage grpo: 'nccl' is served as 'memory': " in note and reason in note


@pytest.mark.parametrize(
    ("mode", "way"),
    [
        ("both", "are sent by gloo, not by NCCL"),
        ("colocate", "go through a buffer in main memory, not by CUDA IPC"),
    ],
)
def test_without_gpus_a_note_says_how_the_weights_are_sent(mode: str, way: str) -> None:
    nccl = ("synchronizer.sync_method=nccl", "explorer.rollout_model.engine_type=vllm", f"mode={mode}")
    config = load_pipeline_file(QWEN, [*nccl, "cluster=null", "explorer.rollout_model.engine_num=1"])
    assert config.stages[0].sends_weights
    assert any(f"without GPUs the weights {way}" in note for note in config.notes)


def test_engine_and_rank_that_share_a_gpu_need_no_second_one_for_nccl() -> None:
    nccl = ("synchronizer.sync_method=nccl", "explorer.rollout_model.engine_type=vllm", "mode=colocate")
    shared = (*nccl, "explorer.rollout_model.engine_num=2", "cluster.gpu_per_node=2")
    config = load_pipeline_file(QWEN, [*shared, "trainer.world_size=2"])
    assert config.stages[0].sends_weights and not any("sync_method" in note for note in config.notes)
    one = (*nccl, "explorer.rollout_model.engine_num=1", "cluster.gpu_per_node=1")
    check_machine(load_pipeline_file(QWEN, one), gpu_count=1, hub_reachable=lambda: True)
    config = load_pipeline_file(QWEN, [*shared, "trainer.world_size=1"])
    assert not config.stages[0].sends_weights
    (note,) = (note for note in config.notes if "sync_method" in note)
    assert "engine_num is 2 and trainer.world_size 1; each engine is to share its GPU with a rank" in note


def test_in_a_cluster_engine_and_rank_may_not_be_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    nccl = ("synchronizer.sync_method=nccl", "explorer.rollout_model.engine_type=vllm")
    one = (*nccl, "explorer.rollout_model.engine_num=1", "cluster.gpu_per_node=1")
    config = load_pipeline_file(QWEN, [*one, "mode=colocate"])
    assert not config.stages[0].sends_weights
    assert any("RAY_ADDRESS is set; engines may be on another machine" in note for note in config.notes)
    assert load_pipeline_file(QWEN, [*nccl, "cluster.gpu_per_node=2"]).stages[0].sends_weights


def test_a_path_that_is_there_must_be_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_MODEL_PATH", str(tmp_path))
    monkeypatch.setenv("TRINITY_TASKSET_PATH", "./nowhere")
    lines = missing(QWEN, gpu_count=2, hub=True)
    assert "there is no config.json in it; set TRINITY_MODEL_PATH to a folder" in lines[0]
    assert "found './nowhere'; no such file or folder under the working directory" in lines[1]
    assert lines[1].endswith("; set TRINITY_TASKSET_PATH to a folder")
    (tmp_path / "config.json").touch()
    monkeypatch.setenv("TRINITY_TASKSET_PATH", str(tmp_path))
    check_machine(load_pipeline_file(QWEN), gpu_count=2, hub_reachable=lambda: False)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("/no/such/folder", "found '/no/such/folder'; no such file or folder; set path to a folder"),
        (
            "{path: runs/old, storage_type: store}",
            "found 'runs/old'; no such folder under the working directory",
        ),
    ],
)
def test_what_is_trained_on_must_be_there(tmp_path: Path, path: str, line: str) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(TRAIN.replace("{path: PATH}", path if path.startswith("{") else f"{{path: {path}}}"))
    if "store" in path:
        file.write_text(file.read_text().replace("sft", "opmd"))
    lines = missing(file, gpu_count=0, hub=False)
    assert len(lines) == 1
    assert line in lines[0]


def test_the_variable_is_named_through_a_key_that_points_at_another() -> None:
    pointer = "buffer.explorer_input.eval_tasksets.0.path=${buffer.explorer_input.taskset.path}"
    lines = missing(QWEN, pointer, gpu_count=2, hub=False)
    assert [line.endswith("set TRINITY_TASKSET_PATH to a folder") for line in lines] == [True, False, True]
    assert "override: buffer.explorer_input.eval_tasksets.0.path" in lines[0]


def test_what_this_run_makes_need_not_be_there_yet(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    own = "{path: checkpoints/trinity-data/run, query: select 1}"
    file.write_text(TRAIN.replace("{path: PATH}", own))
    check_machine(load_pipeline_file(file), gpu_count=0, hub_reachable=lambda: False)


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    lines = missing(QWEN, "explorer.rollout_model.engine_type=vllm", gpu_count=2, hub=True)
    assert len(lines) == 1
    assert "explorer.rollout_model.engine_type: found 'vllm', which is not installed" in lines[0]


def test_a_fake_engine_needs_its_script(tmp_path: Path) -> None:
    overrides = ("explorer.rollout_model.engine_type=fake", "explorer.rollout_model.script=answers.jsonl")
    lines = missing(QWEN, *overrides, gpu_count=2, hub=True)
    assert "found 'answers.jsonl'; no such file" in lines[0]
    (tmp_path / "answers.jsonl").touch()
    check_machine(load_pipeline_file(QWEN, overrides), gpu_count=2, hub_reachable=lambda: True)


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == 0


def test_nvidia_smi_is_read_where_the_driver_lists_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Path("/proc/driver/nvidia/gpus").is_dir():
        pytest.skip("the driver lists its GPUs here")
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: B (UUID: y)'\necho 'GPU 2: C (UUID: z)'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert count_gpus() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert count_gpus() == 2


def test_an_offline_machine_does_not_ask_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not hub_is_reachable()


def test_a_hub_that_refuses_is_not_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert not hub_is_reachable(timeout_seconds=0.5)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("openai/gsm8k", True),
        ("gpt2", True),
        ("./gsm8k", False),
        ("/data/gsm8k", False),
        ("a/b/c", False),
        ("~/x", False),
    ],
)
def test_a_hub_id_has_at_most_one_slash(path: str, answer: bool) -> None:
    assert looks_like_a_hub_id(path) is answer


def test_a_config_without_weights_is_no_model_in_the_cache(an_empty_cache: Path) -> None:
    assert hub_revision("gpt2", "model") == "gpt2"
    folder = snapshot(an_empty_cache, "models--gpt2", "abc")
    (folder / "config.json").touch()
    assert not is_in_hub_cache("gpt2", "model")
    assert hub_revision("gpt2", "model") == "gpt2@abc"
    (folder / "model.safetensors").touch()
    assert is_in_hub_cache("gpt2", "model")


@pytest.mark.parametrize(
    ("visible", "count", "first"),
    [
        (None, 0, ""),
        (None, 2, "0,1"),
        ("3,5,7", 2, "3,5"),
        ("3", 2, "3"),
        ("", 1, ""),
        ("GPU-a, GPU-b", 2, "GPU-a,GPU-b"),
    ],
)
def test_a_run_is_shown_no_more_gpus_than_it_asks_for(
    visible: str | None, count: int, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert first_gpus(count) == first


def test_gpus_that_stay_unused_are_a_note() -> None:
    on_the_cpu = load_pipeline_file(QWEN, ["cluster=null", "synchronizer.sync_method=memory"])
    (note,) = notes_about_machine(on_the_cpu, gpu_count=4)
    assert "this machine has 4 GPU(s) and the run uses none; set cluster.gpu_per_node" in note
    assert notes_about_machine(on_the_cpu, gpu_count=0) == []
    assert notes_about_machine(load_pipeline_file(QWEN), gpu_count=4) == []


def test_the_namespace_in_ray_is_the_files_or_the_runs() -> None:
    named = load_pipeline_file(QWEN, ["ray_namespace=mine"])
    assert ray_options(named)["namespace"] == "mine"
    assert ray_options(load_pipeline_file(QWEN))["namespace"] == "quickstart/gsm8k_qwen"


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ("{top_p: 0.9}", "found 0.9 without top_k, as vLLM names at most 1024 of the tokens"),
        ("{top_k: 2000}", "found 2000, as vLLM names at most 1024 of the tokens"),
        ("{top_p: 0.9, top_k: 1024}", ""),
        ("{top_p: 0.9, temperature: 0}", ""),
        ("{top_k: 20}", ""),
    ],
)
def test_what_vllm_cannot_name_of_the_sampled_distribution_is_refused(sampling: str, told: str) -> None:
    if choose_engine_type("auto") != "vllm":
        pytest.skip("vllm is not installed")
    config = load_pipeline_file(
        Path(__file__).parents[2] / "pipelines" / "gsm8k.yaml",
        [f"buffer.explorer_input.taskset.rollout_args={sampling}", "explorer.rollout_model.engine_type=vllm"],
    )
    if not told:
        check_machine(config, gpu_count=0)
        return
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_machine(config, gpu_count=0)


def test_a_monitor_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    file = QWEN.with_name("gsm8k.yaml")
    (line,) = missing(file, "monitor={monitor_type: mlflow}", gpu_count=0, hub=True)
    assert line.endswith(
        "monitor.monitor_type: found 'mlflow', which is not installed; install trinity-data[mlflow], "
        "or take another monitor"
    )
