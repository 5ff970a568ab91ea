"""What a pipeline file asks of the machine it is to run on, checked before anything starts.

Everything that is missing is in one ConfigError, each with what to set. Nothing is downloaded or imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from trinity_data.config.base import KeyPath
from trinity_data.config.buffer import AUXILIARY, EXPERIENCES, ExperienceBufferConfig, RolloutArgs
from trinity_data.config.diagnostics import Diagnostic, Diagnostics
from trinity_data.config.explorer import choose_engine_type, engines_of
from trinity_data.config.gpus import count_gpus
from trinity_data.config.hub import RepoType, hub_is_reachable, is_in_hub_cache, looks_like_a_hub_id
from trinity_data.config.model import ModelConfig
from trinity_data.config.run import RunConfig, StageConfig
from trinity_data.kept_tokens import MOST_KEPT_TOKENS, names_what_it_kept

SYNTHETIC = "synthetic://"


def check_machine(
    config: RunConfig, *, gpu_count: int | None = None, hub_reachable: Callable[[], bool] | None = None
) -> None:
    """Raises a ConfigError where this machine lacks what the run needs.

    Arguments stand in for a look around.
    """
    diagnostics = Diagnostics(config.yaml_file)
    add_what_the_machine_lacks(config, diagnostics, gpu_count=gpu_count, hub_reachable=hub_reachable)
    diagnostics.raise_if_any()


def add_what_the_machine_lacks(
    config: RunConfig,
    diagnostics: Diagnostics,
    *,
    gpu_count: int | None = None,
    hub_reachable: Callable[[], bool] | None = None,
) -> None:
    """Adds what this machine lacks."""
    gpus = count_gpus() if gpu_count is None else gpu_count
    machine = _Machine(config, gpus, hub_reachable or hub_is_reachable)
    if config.monitor.monitor_type == "mlflow" and find_spec("mlflow") is None:
        text = "found 'mlflow', which is not installed; install trinity-data[mlflow], or take another monitor"
        diagnostics.add(("monitor", "monitor_type"), text)
    for index, stage in config.numbered_stages():
        for diagnostic in machine.missing(stage, index):
            diagnostics.add(diagnostic.path, diagnostic.message, stage=index)


def notes_about_machine(config: RunConfig, *, gpu_count: int | None = None) -> list[str]:
    """What a person should know of this machine although the run can begin."""
    gpus = count_gpus() if gpu_count is None else gpu_count
    if not gpus or config.num_gpus:
        return []
    text = f"this machine has {gpus} GPU(s) and the run uses none; set cluster.gpu_per_node to use them"
    return [f"{config.yaml_file.file}: cluster.gpu_per_node: {text}"]


@dataclass
class _Machine:
    """What it has; the hub is asked at most once, and only when something hangs on it."""

    config: RunConfig
    gpu_count: int
    ask_hub: Callable[[], bool]

    @cached_property
    def hub(self) -> bool:
        return self.ask_hub()

    def missing(self, stage: StageConfig, index: int | None) -> Iterator[Diagnostic]:
        yield from self._gpus(stage)
        yield from self._sources(stage, index)
        if stage.has_engines:
            yield from self._engine(stage)

    def _gpus(self, stage: StageConfig) -> Iterator[Diagnostic]:
        if os.environ.get("RAY_ADDRESS"):
            return  # the machines of the cluster may be others than this one
        if stage.cluster.node_num > 1:
            text = f"found {stage.cluster.node_num}; without RAY_ADDRESS a run has this machine alone"
            todo = "set RAY_ADDRESS to the address of a Ray cluster, or node_num to 1"
            yield Diagnostic(("cluster", "node_num"), f"{text}; {todo}")
        gpu_count = stage.cluster.gpu_per_node
        if gpu_count > self.gpu_count:
            text = f"asks for {gpu_count} GPU(s); this machine has {self.gpu_count}"
            fewer = (
                f"run it where {gpu_count} are"
                if self.gpu_count
                else "set cluster.gpu_per_node=0 to run on the CPU"
            )
            yield Diagnostic(("cluster", "gpu_per_node"), f"{text}; {fewer}")
        path: KeyPath = ("synchronizer", "sync_method")
        between_gpus = stage.sends_weights and stage.cluster.num_gpus and not stage.shares_gpus
        if between_gpus and self.gpu_count < 2:
            text = f"found 'nccl', which works between GPUs; this machine has {self.gpu_count}"
            yield Diagnostic(path, f"{text}; set synchronizer.sync_method=memory")

    def _sources(self, stage: StageConfig, index: int | None) -> Iterator[Diagnostic]:
        yield from self._source(("model", "model_path"), stage.model.model_path, "model", index)
        for name, buffer in stage.buffer.trainer_input.auxiliary_buffers.items():
            yield from self._rows_at_rest((*AUXILIARY, name), buffer, index)
        if stage.has_engines:
            for number, model in enumerate(stage.explorer.auxiliary_models):
                place = ("explorer", "auxiliary_models", number, "model_path")
                yield from self._source(place, model.model_path, "model", index)
            for path, taskset in stage.tried_tasksets():
                if taskset.storage_type == "file":
                    yield from self._source((*path, "path"), taskset.path, "dataset", index)
        if stage.trains_stored:
            experiences = stage.buffer.trainer_input.experience_buffer
            yield from self._rows_at_rest(EXPERIENCES, experiences, index)

    def _rows_at_rest(
        self, section: KeyPath, buffer: ExperienceBufferConfig, index: int | None
    ) -> Iterator[Diagnostic]:
        path, value = (*section, "path"), buffer.path
        if not value or Path(value).expanduser().absolute().is_relative_to(self.config.job_dir):
            return  # this run makes it
        local = Path(value.partition(":///")[2] or value).expanduser()
        if buffer.holds_copied_rows:
            copies = self.config.job_dir / "buffer"
            # an earlier stage of this run may yet write a copy of its experiences
            if not index and not local.exists() and not (copies / local).exists():
                place = "" if local.is_absolute() else f" in {copies}, nor{_relative_to(local)}"
                text = f"found {value!r}; no such file or folder{place}; give a copy of a run's experiences"
                yield Diagnostic(path, text)
        elif buffer.storage_type == "file":
            yield from self._source(path, value, "dataset", index)
        elif not Path(value).expanduser().is_dir():
            place = _relative_to(Path(value).expanduser())
            yield Diagnostic(path, f"found {value!r}; no such folder{place}; give the folder of a run")

    def _source(self, path: KeyPath, value: str, kind: RepoType, index: int | None) -> Iterator[Diagnostic]:
        local = Path(value).expanduser()
        if value.startswith(SYNTHETIC):
            return
        file = self.config.yaml_file
        variable = file.environment_variable(file.written(path, stage=index))
        todo = f"; set {variable or path[-1]} to a folder"
        if local.exists():
            if kind == "model" and not (local / "config.json").is_file():
                yield Diagnostic(
                    path, f"found {value!r}; there is no config.json in it{todo} in Hugging Face's layout"
                )
        elif not looks_like_a_hub_id(value):
            yield Diagnostic(path, f"found {value!r}; no such file or folder{_relative_to(local)}{todo}")
        elif not is_in_hub_cache(value, kind) and not self.hub:
            text = (
                f"found {value!r}; it is no folder here, not in the Hugging Face cache, "
                "and the hub cannot be reached"
            )
            yield Diagnostic(path, f"{text}{todo}")

    def _engine(self, stage: StageConfig) -> Iterator[Diagnostic]:
        if choose_engine_type(stage.explorer.rollout_model.engine_type) == "vllm":
            yield from _uncountable_cuts(stage)
        for path, engine in engines_of(stage.explorer):
            if engine.engine_type == "vllm" and choose_engine_type("auto") != "vllm":
                text = "found 'vllm', which is not installed; install trinity-data[vllm]"
                yield Diagnostic((*path, "engine_type"), f"{text}, or set engine_type to auto")
            if engine.engine_type == "fake" and engine.script and not engine.script.expanduser().is_file():
                where = _relative_to(engine.script.expanduser())
                text = f"found {str(engine.script)!r}; no such file{where}; give the script's path"
                yield Diagnostic((*path, "script"), text)


def _uncountable_cuts(stage: StageConfig) -> Iterator[Diagnostic]:
    """What is sampled to be trained is trained over the tokens that were kept,
    all of which vLLM has to name.
    """
    most = f"as vLLM names at most {MOST_KEPT_TOKENS} of the tokens that a rollout was sampled from"
    other = "or explorer.rollout_model.engine_type: transformers"
    sampled: list[tuple[KeyPath, RolloutArgs | ModelConfig]] = [
        ((*path, "rollout_args"), taskset.rollout_args)
        for path, taskset in stage.buffer.explorer_input.train_tasksets()
    ]
    if stage.serves:
        sampled.append((("model",), stage.model))
    for path, args in sampled:
        if names_what_it_kept("vllm", temperature=args.temperature, top_p=args.top_p, top_k=args.top_k):
            continue
        if args.top_k > MOST_KEPT_TOKENS:
            text = f"found {args.top_k}, {most}; allowed: -1 (all) and 1 to {MOST_KEPT_TOKENS}"
            yield Diagnostic((*path, "top_k"), f"{text}; write one of them, {other}")
        else:
            text = f"found {args.top_p:g} without top_k, {most}"
            todo = f"write top_k too, e.g. {MOST_KEPT_TOKENS}, or top_p: 1, {other}"
            yield Diagnostic((*path, "top_p"), f"{text}; {todo}")


def _relative_to(path: Path) -> str:
    """What a path that is not there was looked for under."""
    return "" if path.is_absolute() else f" under the working directory {Path.cwd()}"
