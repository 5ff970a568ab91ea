"""What is wrong with a stage's model, as far as its small files show it:
tokenizer, chat template, `config.json`.

No weights are read. A model that lies neither in a folder nor in the Hugging Face cache is
looked at once it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_data.config import StageConfig, TasksetConfig
from trinity_data.config.architecture import read_architecture
from trinity_data.config.base import KeyPath
from trinity_data.config.diagnostics import Diagnostic
from trinity_data.dataset.files import split_files
from trinity_data.dataset.prompts import prompt_of
from trinity_data.dataset.reader import dataset_spec
from trinity_data.dataset.row import UnusableRow
from trinity_data.errors import ConfigError, TemplateError
from trinity_data.launch.heads import head_of, head_of_answer
from trinity_data.launch.inputs import newest_weights
from trinity_data.tokenizer import ChatTemplate, load_tokenizer

MODEL: KeyPath = ("model", "model_path")
TEMPLATE: KeyPath = ("model", "custom_chat_template")
USER = {"role": "user", "content": "What is 2 + 3?"}
SYSTEM = {"role": "system", "content": "Add."}

Conversation = Sequence[Mapping[str, str]]


def model_can_be_used(stage: StageConfig) -> Iterator[Diagnostic]:
    """What would fail in every step."""
    path = newest_weights(stage.model.model_path)
    if read_architecture(path) is not None:
        yield from model_diagnostics(stage, path)


def model_diagnostics(stage: StageConfig, path: str, tokenizer: Any = None) -> Iterator[Diagnostic]:
    """Of a model whose files are here."""
    try:
        tokenizer = tokenizer or load_tokenizer(path)
    except Exception as error:  # the boundary to tokenizers of any make
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        yield Diagnostic(MODEL, f"found {stage.model.model_path!r}; its tokenizer cannot be loaded: {first}")
        return
    if tokenizer.eos_token_id is None:
        text = (
            f"found {stage.model.model_path!r}; its tokenizer names no end token, "
            "so that no answer could be taught to end"
        )
        yield Diagnostic(MODEL, f"{text}; write eos_token into its tokenizer_config.json")
    template = ChatTemplate(tokenizer, stage.model.custom_chat_template)
    for messages in _conversations(stage):
        try:
            template.render(messages)
        except TemplateError as error:
            yield Diagnostic(MODEL if stage.model.custom_chat_template is None else TEMPLATE, f"{error}")
            break
    yield from _vocabulary(stage, path, tokenizer)


def _conversations(stage: StageConfig) -> Iterator[Conversation]:
    """A prompt of each kind that the stage's data has."""
    rows = stage.buffer.trainer_input.experience_buffer
    tasksets = [taskset for _, taskset in stage.tried_tasksets()]
    answers = stage.trains_stored and rows.storage_type == "file" and not rows.holds_copied_rows
    formats = [taskset.format for taskset in tasksets] + ([rows.format] if answers else [])
    if not formats:
        return
    yield [USER]
    if any(form.system_prompt or form.system_prompt_key for form in formats):
        yield [SYSTEM, USER]
    for taskset in tasksets:
        if taskset.storage_type != "queue":
            yield from _first_prompts(taskset)


def _first_prompts(taskset: TasksetConfig) -> Iterator[Conversation]:
    """Of each order of roles among the first rows one prompt; what cannot be read is reported elsewhere."""
    path, spec = Path(taskset.path).expanduser(), dataset_spec(taskset)
    seen = set[tuple[str, ...]]()
    if spec.query is None and not path.exists():
        return
    try:
        if spec.query is not None:
            rows = head_of_answer(spec.query)[1]
        else:
            files = dict.fromkeys(names[0] for _, names in split_files(path, spec.subset_name, spec.split))
            heads = [head_of(file, skip_bad_rows=spec.skip_bad_rows) for file in files]
            rows = [row for _, head in heads for row in head]
    except (ConfigError, OSError):
        return
    for row in rows:
        try:
            prompt = prompt_of(taskset.format, row)
        except UnusableRow:
            continue
        if (roles := tuple(message["role"] for message in prompt)) not in seen:
            seen.add(roles)
            yield prompt


def _vocabulary(stage: StageConfig, path: str, tokenizer: Any) -> Iterator[Diagnostic]:
    """Tokens without a row of the embedding would end the run in the middle of a forward pass."""
    architecture = read_architecture(path)
    if architecture is None or architecture.vocab_size is None:
        return
    size = architecture.vocab_size
    beyond = [token for token, number in tokenizer.get_vocab().items() if number >= size]
    # such as a picture's place holder, which text never comes to
    special = {str(token) for token in tokenizer.all_special_tokens} - {str(tokenizer.eos_token)}
    wrong = [token for token in beyond if token not in special]
    if wrong:
        text = (
            f"found {stage.model.model_path!r}; its tokenizer has {len(tokenizer)} tokens, "
            f"its embedding {size}, so that"
        )
        more = f"{sorted(wrong)[0]!r} and {len(wrong) - 1} more" if len(wrong) > 1 else repr(wrong[0])
        todo = "take the tokenizer it was made with, or enlarge the embedding with resize_token_embeddings"
        yield Diagnostic(MODEL, f"{text} {more} would fail; {todo}")


def check_model(stages: Sequence[StageConfig], path: str, tokenizer: Any) -> None:
    """Raises a ConfigError for a model that was not here when the file was checked."""
    for stage in stages:
        for diagnostic in model_diagnostics(stage, path, tokenizer):
            raise ConfigError(f"{'.'.join(map(str, diagnostic.path))}: {diagnostic.message}")
