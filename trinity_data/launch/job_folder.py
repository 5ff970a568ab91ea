"""The job folder: `<checkpoint_root_dir>/<project>/<name>`, and who may write to it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from trinity_data.atomic import replace_text
from trinity_data.config import RunConfig
from trinity_data.config.run import TRAINER
from trinity_data.job_lock import hold

SEVERAL = "processes that share it (`trinity-data runs` names them)"


def new_name_if_not_continued(config: RunConfig) -> RunConfig:
    """With `continue_from_checkpoint: false` a job folder that is there already is left alone."""
    if config.continue_from_checkpoint or not config.job_dir.exists():
        return config
    stamp = datetime.now().strftime("%Y%m%d%H%M%S")
    return config.model_copy(update={"name": f"{config.name}_{stamp}"})


@contextmanager
def job_folder(config: RunConfig, *, shared: bool = False) -> Iterator[Path]:
    """Makes the folder and holds it for this process; a second run of the same job is refused.

    With `shared` other processes may hold it at the same time that share it too.
    """
    folder = config.job_dir
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder, SEVERAL if shared else f"process {os.getpid()}", shared=shared):
        yield folder


def write_configuration(config: RunConfig, folder: Path) -> None:
    """The configuration of the last start, for people and other tools; of a trainer whose explorer has a file
    of its own, under another name.
    """
    name = "config_trainer.json" if config.part == TRAINER else "config.json"
    replace_text(folder / name, json.dumps(config.public_dump(), indent=1), mode=0o600)
