"""The stages of a run with their numbers."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_data.config.run import RunConfig, StageConfig


def numbered_stages(config: RunConfig) -> Iterator[tuple[int | None, StageConfig]]:
    """Stages with their number in the file; none in a file without `stages`."""
    for index, stage in enumerate(config.stages):
        yield (index if config.has_named_stages else None), stage
