"""`trinity-data branch RUN@STEP NAME` and `trinity-data tag RUN STEP NAME`: a run as it was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ByteSize

from trinity_data.cli.arguments import Run
from trinity_data.runs import is_run, resolve_run
from trinity_data.terminal import say

if TYPE_CHECKING:
    from trinity_data.store.snapshot import StoreVersion


def branch(
    run: Annotated[str, typer.Argument(help="RUN@STEP or RUN@TAG; RUN alone is all there is now.")],
    name: Annotated[str, typer.Argument(help="The new run's folder, beside the first.")],
) -> None:
    """Make a run that begins as another one was, sharing its sealed files and checkpoints."""
    from trinity_data.store.branch import branch_run
    from trinity_data.store.snapshot import store_folder, take_snapshot

    folder, version = resolve_at(run)
    new = branch_run(folder, name, version or take_snapshot(store_folder(folder)).version)
    linked, written = (
        ByteSize(size).human_readable(separator=" ") for size in (new.linked_bytes, new.written_bytes)
    )
    say(
        f"{new.folder}: {new.num_experiences:,} experiences, "
        f"checkpoints of steps {', '.join(map(str, new.checkpoints)) or 'none'}; "
        f"{linked} shared, {written} written"
    )


def tag(
    run: Run,
    step: Annotated[int | None, typer.Argument(help="The step at whose end the run is named.")] = None,
    name: Annotated[str | None, typer.Argument(help="Begins with a letter.")] = None,
) -> None:
    """Name the end of a step; without STEP and NAME, list the tags."""
    from trinity_data.store import tags
    from trinity_data.store.snapshot import at_step, store_folder

    root = store_folder(resolve_run(run))
    if step is None:
        for tag_name, version in tags.tags(root).items():
            say(f"{tag_name:<24} step {version.step}  {version.num_rows.get('experiences', 0):,} experiences")
        return
    if name is None:
        raise typer.BadParameter("a tag needs a name", param_hint="NAME")
    tags.tag(root, name, at_step(root, step))


def resolve_at(text: str) -> tuple[Path, StoreVersion | None]:
    """A run, and the version that a step or tag after `@` names."""
    name, at, point = text.rpartition("@")
    if not at or is_run(text):
        return resolve_run(text), None
    from trinity_data.store.snapshot import store_folder
    from trinity_data.store.tags import named_version

    folder = resolve_run(name)
    return folder, named_version(store_folder(folder), point)
