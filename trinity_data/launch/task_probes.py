"""What the pass rates of a stage's tasks depend on, so that they are known again."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from trinity_data.config import StageConfig
from trinity_data.dataset.task import DEFAULT_WORKFLOW, Task
from trinity_data.launch.digests import code_digest, file_digest, files_digest, model_digest
from trinity_data.stage_inputs import StageInputs
from trinity_data.status import Status
from trinity_data.store.protocol import WritableStore
from trinity_data.weights import Weights
from trinity_explorer.rollout import sampling_of
from trinity_explorer.task_prober import TaskProber
from trinity_operators.stage_arguments import asking_operator


def build_prober(
    stage: StageConfig, inputs: StageInputs, store: WritableStore, status: Status
) -> TaskProber | None:
    """None where no task operator of the stage asks its engines."""
    if asking_operator(stage, inputs.base_dir) is None:
        return None
    return TaskProber(stage, store, status, _Conditions(stage, inputs))


class _Conditions:
    """What a task is tried with, besides its own row."""

    def __init__(self, stage: StageConfig, inputs: StageInputs) -> None:
        self.model_path, base_dir = inputs.model_path, inputs.base_dir
        self.tasksets = tasksets = {
            each.name: each for _, each in stage.buffer.explorer_input.train_tasksets()
        }
        engine, model, auxiliary = stage.explorer.rollout_model, stage.model, stage.explorer.auxiliary_models
        # the only engine whose answers are not the model's
        script = file_digest(engine.script) if engine.script is not None else None
        of_engine: dict[str, Any] = (
            {"engine": "fake", "script": script} if engine.engine_type == "fake" else {}
        )
        if auxiliary:
            paths = {each.name: inputs.auxiliary_models[each.model_path].path for each in auxiliary}
            of_engine["auxiliary_models"] = {name: model_digest(path) for name, path in paths.items()}

        @cache
        def of(taskset: str, workflow: str, reward_fn: str) -> Mapping[str, Any]:
            config = tasksets[taskset]
            return of_engine | {
                "sampling": asdict(sampling_of(config.rollout_args, model)),
                "chat_template": model.custom_chat_template,
                "max_prompt_tokens": model.max_prompt_tokens,
                "enable_prompt_truncation": model.enable_prompt_truncation,
                "workflow": [workflow, config.workflow_args, code_digest(workflow, base_dir)],
                "reward_fn": [reward_fn, config.reward_fn_args, code_digest(reward_fn, base_dir)],
            }

        self._of, self._session = of, uuid.uuid4().hex

    def model(self, weights: Weights) -> str:
        # version 0 is the model itself, which another run finds again
        if weights.version == 0:
            return model_digest(self.model_path)
        if weights.are_held:
            return f"{self._session}/{weights.version}"  # no file that another run could find again
        files = Path(weights.folder).glob("*.safetensors")
        return files_digest({file.name: file for file in files})

    def of_task(self, task: Task) -> Mapping[str, Any]:
        return self._of(task.taskset, task.workflow, task.reward_fn)

    def of_taskset(self, name: str) -> Mapping[str, Any]:
        config = self.tasksets[name]
        workflow = config.default_workflow_type or DEFAULT_WORKFLOW
        return self._of(name, workflow, config.default_reward_fn_type or "")
