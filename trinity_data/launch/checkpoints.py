"""The checkpoints of a run as weights that an engine can load, while the run is trained or afterwards.

A folder `global_step_N` is complete: the trainer names it when all of it is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trinity_data.launch.digests import files_digest, model_digest
from trinity_data.scratch import ScratchFolder
from trinity_data.weights import Weights

PREFIX = "global_step_"
# in a folder, the first that matches
_WEIGHTS = ("huggingface/*.safetensors", "model_world_size_*.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """What a run had trained after a step; step 0 is the model that it began with."""

    step: int
    path: str

    @classmethod
    def of_step(cls, job_dir: Path, step: int) -> Checkpoint:
        return cls(step, str(job_dir / f"{PREFIX}{step}"))

    @property
    def actor(self) -> Path:
        return Path(self.path) / "actor"

    @property
    def is_there(self) -> bool:
        """Whether it was not removed meanwhile, as a run does that keeps a few only."""
        return not self.step or bool(self._files())

    def digest(self) -> str:
        """Equal for equal weights."""
        if not self.step:
            return model_digest(self.path)
        return files_digest({file.name: file for file in self._files()})

    @contextmanager
    def weights(self, model_path: str, scratch: Path) -> Iterator[Weights]:
        """Of a trained step in Hugging Face's layout. From shards alone they are converted, in a folder below
        `scratch` that is gone when the block ends.
        """
        if any(self.actor.glob(_WEIGHTS[0])):
            yield Weights(self.step, str(self.actor / "huggingface"))
            return
        from trinity_trainer.conversion import write_huggingface  # imports torch, which takes seconds

        folder = ScratchFolder(scratch)
        try:
            write_huggingface(self.actor, model_path, folder.path)
            yield Weights(self.step, str(folder.path))
        finally:
            folder.close()

    def _files(self) -> list[Path]:
        found = (sorted(self.actor.glob(pattern)) for pattern in _WEIGHTS)
        return next((files for files in found if files), [])


def checkpoints_of(job_dir: Path, model_path: str, *, only_newest: bool) -> list[Checkpoint]:
    """The model and every checkpoint of the job folder, by step. With `only_newest` the last of them, which
    is the model where nothing is trained.
    """
    names = (folder.name.removeprefix(PREFIX) for folder in job_dir.glob(f"{PREFIX}*"))
    steps = sorted(int(name) for name in names if name.isdigit())
    trained = (Checkpoint.of_step(job_dir, step) for step in steps)
    found = [Checkpoint(0, model_path), *(each for each in trained if each.is_there)]
    return found[-1:] if only_newest else found
