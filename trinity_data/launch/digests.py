"""What a run reads besides its pipeline file, as digests: the model, task sets,
code of the user's, and the packages.

Cheap enough for every start: files are read whole up to a bound, and beyond it at evenly spread places.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trinity_data.config import ExperienceBufferConfig, RunConfig, StageConfig, TasksetConfig
from trinity_data.config.hub import hub_revision
from trinity_data.dataset.files import split_files
from trinity_data.dataset.reader import DatasetSpec, dataset_spec
from trinity_data.dataset.sql_rows import SqlRows
from trinity_data.launch.inputs import newest_weights
from trinity_data.synthetic import MODEL_URI, TASKSET_URI

PACKAGES = (
    "trinity-data", "torch", "transformers", "tokenizers", "safetensors", "vllm", "ray", "datasets",
    "pyarrow", "numpy", "py-data-juicer",
)  # fmt: skip
WHOLE_BYTES = 256 << 20
_SAMPLES, _SAMPLE_BYTES = 256, 64 << 10
# `./file.py:Class` and `package.module:Class`
_CODE = re.compile(r"(?P<where>[^\s:]+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")

# a stage that only trains inherits them without effect
IDLE_IN_TRAIN = (
    "explorer.*",
    "synchronizer.*",
    "data_processor.*",
    "contracts*",
    "default_contracts",
    "buffer.batch_size",
    "buffer.explorer_input.*",
)


def package_versions() -> dict[str, str]:
    """Of those that shape what a run computes, and of Python."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def inputs_of(config: RunConfig) -> dict[str, dict[str, str]]:
    """By stage, then by the key that names it.

    What is not a file of this machine is named by its revision.
    """
    return {stage.stage_name: dict(_inputs_of_stage(config, stage)) for stage in config.stages}


def flat(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested sections by its key, joined with dots."""
    if isinstance(data, Mapping) and data:
        for name, value in data.items():
            yield from flat(value, f"{path}.{name}" if path else str(name))
    elif isinstance(data, list | tuple) and data:
        for number, value in enumerate(data):
            yield from flat(value, f"{path}.{number}")
    else:
        yield path, data


def file_digest(path: Path) -> str:
    """Equal for equal content; of a file above WHOLE_BYTES, for equal size and equal samples."""
    size, digest = path.stat().st_size, hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            while block := file.read(1 << 20):
                digest.update(block)
        else:
            digest.update(f"{size}".encode())
            for number in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def files_digest(files: Mapping[str, Path]) -> str:
    """Of several files and the names they have, whatever folder they lie in."""
    lines = [f"{name} {file_digest(path)}" for name, path in sorted(files.items())]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def model_digest(path: str) -> str:
    """Of a model's folder: weights, configuration and tokenizer."""
    folder = Path(newest_weights(path)).expanduser()
    if path == MODEL_URI or not folder.is_dir():
        return path if path == MODEL_URI else hub_revision(path, "model")
    return files_digest({file.name: file for file in folder.iterdir() if file.is_file()})


def data_digest(spec: DatasetSpec) -> str:
    """Of the files that hold a split, or of the rows of a query."""
    if spec.query is not None:
        return SqlRows(spec.query).digest
    path = Path(spec.path).expanduser()
    if not path.exists():
        return spec.path if spec.path == TASKSET_URI else hub_revision(spec.path, "dataset")
    files = [file for _, part in split_files(path, spec.subset_name, spec.split) for file in part]
    return files_digest({f"{number:06d}": file for number, file in enumerate(files)})


def code_digest(name: str, base_dir: Path) -> str | None:
    """Of the file that `./file.py:Class` or `package.module:Class` names and
    of files beside it that it imports.

    None where there is no such file, which its loader reports.
    """
    match = _CODE.fullmatch(name)
    file = None if match is None else _code_file(match["where"], base_dir)
    return None if file is None else files_digest({each.name: each for each in _with_imports(file)})


def _inputs_of_stage(config: RunConfig, stage: StageConfig) -> Iterator[tuple[str, str]]:
    yield "model.model_path", model_digest(stage.model.model_path)
    for key, data in _data_of(stage):
        yield f"{key}.path", data_digest(dataset_spec(data))
    idle = () if stage.has_engines else IDLE_IN_TRAIN
    for key, value in flat(stage.model_dump(mode="json")):
        if not isinstance(value, str) or any(fnmatchcase(key, pattern) for pattern in idle):
            continue
        # arguments of functions and operators, and the script of the engine, with a suffix
        is_argument = any(part == "args" or part.endswith("_args") for part in key.split("."))
        may_name_a_file = (is_argument or key.endswith(".script")) and bool(Path(value).suffix)
        if (digest := code_digest(value, config.file.parent)) is not None:
            yield key, digest
        elif may_name_a_file and (file := _existing(value, config.file.parent)) is not None:
            yield key, file_digest(file)


def _data_of(stage: StageConfig) -> Iterator[tuple[str, TasksetConfig | ExperienceBufferConfig]]:
    """Task sets and data sets, by their sections.

    Rows of a store are chosen anew at each start, and on record then.
    """
    for path, taskset in stage.tried_tasksets():
        if taskset.storage_type != "queue":  # it grows while the run goes on
            yield ".".join(map(str, path)), taskset
    buffers = {
        f"auxiliary_buffers.{name}": each
        for name, each in stage.buffer.trainer_input.auxiliary_buffers.items()
    }
    if stage.trains_stored:
        buffers["experience_buffer"] = stage.buffer.trainer_input.experience_buffer
    for name, buffer in buffers.items():
        if buffer.storage_type == "file" and buffer.path and not buffer.holds_copied_rows:
            yield f"buffer.trainer_input.{name}", buffer


def _existing(name: str, base_dir: Path) -> Path | None:
    """The file of this name, as operators look for theirs: beside the pipeline file, or in the working
    directory.
    """
    if len(name) > 1000 or "\0" in name:
        return None
    return next((path for path in (base_dir / name, Path(name)) if path.is_file()), None)


def _code_file(where: str, base_dir: Path) -> Path | None:
    if where.endswith(".py"):
        return _existing(where, base_dir)
    try:
        spec = importlib.util.find_spec(where)
    except (ImportError, ValueError):  # its loader reports what is wrong
        return None
    origin = None if spec is None else spec.origin
    return Path(origin) if origin and origin.endswith(".py") else None


def _with_imports(file: Path) -> list[Path]:
    """The file and what it imports from its own folder, in turn."""
    files = [file]
    for each in files:
        names: set[str] = set()
        # its loader reports what is wrong
        with suppress(SyntaxError, ValueError):
            for node in ast.walk(ast.parse(each.read_bytes())):
                if isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    names |= {node.module} if node.module else {alias.name for alias in node.names}
        siblings = sorted({file.parent / f"{name.split('.')[0]}.py" for name in names})
        files += [path for path in siblings if path not in files and path.is_file()]
    return files
