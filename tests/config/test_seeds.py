"""The documents' own files and keys: each works, or is refused by name as not there yet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trinity_data.config import RunConfig, StageConfig, load_pipeline_file
from trinity_data.config.base import Section
from trinity_data.config.sections import section_in
from trinity_data.config.unsupported import DOCUMENTED_KEYS
from trinity_data.errors import ConfigError

SHARED = Path(__file__).parents[3] / "shared"
LOADS = {"gsm8k.yaml": ["grpo"], "gsm8k_sft_warmup.yaml": ["sft_warmup", "rft"]}
PAIR = {"async_explorer.yaml": "explore", "async_explorer_new.yaml": "explore", "async_trainer.yaml": "train"}
REFUSED = {
    "verl_grpo.yaml": [
        "buffer.explorer_input.tasksets.0.default_workflow_type",
        "buffer.explorer_input.eval_tasksets.0.default_workflow_type",
        "trainer.trainer_config",
    ],
    "verl_ppo.yaml": [
        "algorithm.algorithm_type",
        "algorithm.advantage_fn",
        "model.critic_model_path",
        "buffer.explorer_input.tasksets.0.default_workflow_type",
        "buffer.explorer_input.tasksets.1.default_workflow_type",
        "buffer.explorer_input.eval_tasksets.0.default_workflow_type",
        "buffer.explorer_input.eval_tasksets.1.default_workflow_type",
        "trainer.trainer_config",
    ],
}

needs_seeds = pytest.mark.skipif(
    not (SHARED / "seeds").is_dir(), reason="the documents are not beside the repository"
)


def treatment(key: str) -> str | None:
    """What the loader does with a key of the documents; None for one that it does not know."""
    sections: list[type[Section]] = [RunConfig, StageConfig]
    for part in (part for part in key.replace("[]", "").split(".") if not part.startswith("<")):
        for section in sections:
            for answer, names in (
                ("unsupported", section.documented().unsupported),
                ("managed", section.documented().managed),
                ("renamed", section.documented().renamed),
            ):
                if part in names:
                    return answer
        owners = [section for section in sections if part in section.model_fields]
        if not owners:
            return None
        below = section_in(owners[0].model_fields[part].annotation)
        if below is None:
            return "works"
        sections = [below]
    return "works"


@needs_seeds
def test_every_file_of_the_documents_is_one_of_these() -> None:
    assert {
        file.name for file in (SHARED / "seeds" / "configs").glob("*.yaml")
    } == LOADS.keys() | PAIR.keys() | REFUSED.keys()


@needs_seeds
@pytest.mark.parametrize("name", LOADS)
def test_the_quick_starts_files_load(name: str) -> None:
    run = load_pipeline_file(SHARED / "seeds" / "configs" / name)
    assert [stage.stage_name for stage in run.stages] == LOADS[name]
    rft = run.stages[-1]
    assert (rft.buffer.train_batch_size, rft.model.max_prompt_tokens, rft.trainer.world_size) == (
        1024,
        1024,
        1,
    )
    assert rft.algorithm.optimizer.lr == 1e-5
    assert rft.buffer.explorer_input.eval_tasksets[0].name == "gsm8k-eval"
    if len(run.stages) == 2:
        warmup = run.stages[0].buffer
        assert (warmup.train_batch_size, warmup.total_steps) == (128, 10)
        assert warmup.trainer_input.experience_buffer.storage_type == "file"


@needs_seeds
@pytest.mark.parametrize("name", PAIR)
def test_the_files_of_the_asynchronous_pair_load(name: str) -> None:
    (stage,) = load_pipeline_file(SHARED / "seeds" / "configs" / name).stages
    assert (stage.mode, stage.stage_name, stage.is_live, stage.is_part) == (PAIR[name], "grpo", True, True)
    assert stage.synchronizer.sync_method == "checkpoint"
    (other,) = load_pipeline_file(
        SHARED / "seeds" / "configs" / name, ["synchronizer.sync_method=memory"]
    ).stages
    assert other.synchronizer.sync_method == "memory"
    assert stage.explores == (PAIR[name] == "explore")
    assert stage.trains == (PAIR[name] == "train")
    assert stage.algorithm.sample_strategy_args.max_staleness == 40
    assert (stage.buffer.batch_size, stage.buffer.train_batch_size) == (64, 512)
    assert StageConfig.model_validate(stage.model_dump(mode="json")).part == stage.part


@needs_seeds
@pytest.mark.parametrize("name", REFUSED)
def test_the_other_files_are_refused_for_what_is_not_there_yet_and_all_else_at_once(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(SHARED / "seeds" / "configs" / name)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == REFUSED[name]
    reasons = ("not yet supported", "default_workflow_type: missing")
    assert all(any(reason in line for reason in reasons) for line in lines)


@pytest.mark.skipif(
    not (SHARED / "config_keys.txt").is_file(), reason="the documents are not beside the repository"
)
def test_every_key_of_the_documents_is_known() -> None:
    text = (SHARED / "config_keys.txt").read_text(encoding="utf-8")
    keys = re.findall(r"^([a-z][\w.\[\]<>]*): ", text, flags=re.MULTILINE)
    assert len(keys) > 300
    assert [key for key in keys if treatment(key) is None] == []


@pytest.mark.parametrize("section", [RunConfig, StageConfig])
def test_no_key_is_in_two_lists(section: type[Section]) -> None:
    todo, seen = [section], set[type[Section]]()
    while todo:
        here = todo.pop()
        seen.add(here)
        documented = here.documented()
        names = [*here.model_fields, *documented.unsupported, *documented.managed, *documented.renamed]
        assert len(names) == len(set(names)), here
        below = [section_in(field.annotation) for field in here.model_fields.values()]
        todo += [each for each in below if each is not None and each not in seen]


def test_every_section_with_documented_keys_is_a_section() -> None:
    names, todo = set[str](), list[type[Section]](Section.__subclasses__())
    while todo:
        section = todo.pop()
        names.add(section.__name__)
        todo += section.__subclasses__()
    assert set(DOCUMENTED_KEYS) <= names
    for section in Section.__subclasses__():
        documented = section.documented()
        assert {*documented.unsupported_values, *documented.aliases} <= section.model_fields.keys()
