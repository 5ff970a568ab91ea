"""What a run works with: its model and task sets as folders,
made first where the pipeline file asks for synthetic ones.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trinity_data.config import (
    ExperienceBufferConfig,
    FormatConfig,
    RunConfig,
    StageConfig,
    TaskPipelineConfig,
    TasksetConfig,
)
from trinity_data.dataset.cells import columns_of
from trinity_data.dataset.prompts import prompt_key_of
from trinity_data.dataset.reader import DatasetSpec, Source, dataset_spec
from trinity_data.dataset.row import as_written
from trinity_data.stage_inputs import ModelFiles, StageInputs
from trinity_data.synthetic import MODEL_URI, TASKSET_URI
from trinity_data.tokenizer import load_tokenizer
from trinity_operators.stage_arguments import stage_values, with_priority, with_stage_values

log = logging.getLogger(__name__)

# the model is the same whatever the run's seed, like one that was downloaded
MODEL_SEED = 0
# of the task set, for the synthetic model's tokenizer
_ARITHMETIC = TasksetConfig(
    name="arithmetic", path=TASKSET_URI, format=FormatConfig(prompt_key="question", response_key="answer")
)
CORPUS_ROWS = 2000
CORPUS_CHARS = 10_000


class RunInputs:
    """Turns the names of the pipeline file into folders that exist."""

    def __init__(self, config: RunConfig, folder: Path | None = None) -> None:
        """What is made goes into `folder`, else into the run's."""
        self.config = config
        self.folder = folder or config.job_dir / "synthetic"
        self.model_path = self.model_folder(config.stages[0].model.model_path)
        paths = [self.model_path]
        for stage in config.stages:
            if stage.has_engines:
                paths += [self.model_folder(model.model_path) for model in stage.explorer.auxiliary_models]
            tasksets = [taskset for _, taskset in stage.buffer.explorer_input.all_tasksets()]
            paths += [self._data(each.path) for each in tasksets if each.storage_type == "file"]
            buffers = stage.buffer.trainer_input.auxiliary_buffers.values()
            paths += [self._data(buffer.path or "") for buffer in buffers]
        if all(Path(path).exists() for path in paths):
            # nothing to fetch, so that no library asks the hub about files that lie here
            os.environ.setdefault("HF_HUB_OFFLINE", "1")

    def source(self, config: TasksetConfig | ExperienceBufferConfig) -> DatasetSpec:
        """Where the rows of a task set or of training data are read from."""
        assert config.path is not None
        return dataset_spec(config, self._data(config.path))

    def model_folder(self, path: str) -> str:
        """Where a model lies that the file names, or its name at the hub."""
        if path != MODEL_URI:
            return newest_weights(path)
        folder = self.folder / "model"
        if folder.exists():
            return str(folder)
        from trinity_data.synthetic.model import write_model

        folder = write_model(folder, corpus=self._corpus(), seed=MODEL_SEED)
        log.info("no model was given: made a small Qwen2 with random weights in %s", folder)
        return str(folder)

    def _data(self, path: str) -> str:
        if path != TASKSET_URI:
            return path
        if not self._taskset.exists():
            log.info(
                "no task set was given: making arithmetic problems in GSM8K's shape in %s", self._taskset
            )
        return self._made_taskset()

    @property
    def _taskset(self) -> Path:
        return self.folder / "taskset"

    def _made_taskset(self) -> str:
        from trinity_data.synthetic.taskset import write_taskset

        return str(write_taskset(self._taskset, seed=self.config.seed))

    def _corpus(self) -> Iterator[str]:
        """Prompts and answers of the first task set the run reads; arithmetic where there are only queues."""
        first = self.config.stages[0]
        data: TasksetConfig | ExperienceBufferConfig = first.buffer.trainer_input.experience_buffer
        if not first.trains_stored:
            tasksets = [taskset for _, taskset in first.buffer.explorer_input.all_tasksets()]
            # a queue is empty before the run
            data = next((each for each in tasksets if each.storage_type != "queue"), _ARITHMETIC)
        # nothing is tried of what only the tokenizer needs
        source = Source(
            dataset_spec(data, self._made_taskset()) if data is _ARITHMETIC else self.source(data)
        )
        places, columns = range(min(CORPUS_ROWS, source.num_rows)), source.columns()
        keys = (prompt_key_of(data.format), data.format.response_key)
        for name in dict.fromkeys(name for key in keys for name in columns_of(key, columns)):
            texts = (as_written(row.get(name)) for row in source.rows(places))
            yield from (text[:CORPUS_CHARS] for text in texts if text)


def open_inputs(
    config: RunConfig, stages: Sequence[StageConfig], resources: RunInputs, *, with_models: bool = True
) -> StageInputs:
    """Of these stages of the run; without the models there are no tokenizers either."""
    auxiliary = {
        model.model_path: resources.model_folder(model.model_path)
        for stage in stages
        for model in stage.explorer.auxiliary_models
        if stage.has_engines and with_models
    }
    return StageInputs(
        resources.model_path,
        load_tokenizer(resources.model_path) if with_models else None,
        config.seed,
        config.file.parent,
        source_of=resources.source,
        run_folder=config.job_dir,
        eval_tasksets=eval_tasksets(config, lambda taskset: resources.source(taskset).path),
        auxiliary_models={name: ModelFiles(path, load_tokenizer(path)) for name, path in auxiliary.items()},
    )


def eval_tasksets(config: RunConfig, path_of: Callable[[TasksetConfig], str]) -> list[dict[str, Any]]:
    """The evaluation sets of all stages as plain values, each once, with the paths that `path_of` gives."""
    tasksets = list[dict[str, Any]]()
    for stage in config.stages:
        for taskset in stage.buffer.explorer_input.eval_tasksets:
            values = taskset.model_dump(mode="json") | {"path": path_of(taskset)}
            if values not in tasksets:
                tasksets.append(values)
    return tasksets


def pipeline_of_file(
    config: RunConfig, stage: StageConfig, path_of: Callable[[TasksetConfig], str], *, model_path: str = ""
) -> TaskPipelineConfig:
    """The task pipeline of a stage that is not run: with the model that the file names, or `model_path`."""
    values = stage_values(
        stage,
        model_path=model_path or config.stages[0].model.model_path,
        run_folder=config.job_dir,
        eval_tasksets=eval_tasksets(config, path_of),
    )
    pipeline = with_priority(stage.data_processor.task_pipeline)
    operators = with_stage_values(pipeline.operators, values, config.file.parent)
    return pipeline.model_copy(update={"operators": operators})


def newest_weights(path: str) -> str:
    """A run's folder stands for the Hugging Face folder of its newest checkpoint."""
    marker = Path(path) / "latest_checkpointed_iteration.txt"
    if not marker.exists():
        return path
    return str(Path(path) / f"global_step_{marker.read_text().strip()}" / "actor" / "huggingface")
