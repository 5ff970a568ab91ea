"""`trinity-data branch RUN@STEP NAME` and `trinity-data tag RUN STEP NAME`: a run as it was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_data.runs import is_run, resolve_run
from trinity_data.terminal import say

if TYPE_CHECKING:
    from trinity_data.store.version import StoreVersion


def branch(
    run: Annotated[str, typer.Argument(help="RUN@STEP or RUN@TAG; RUN alone is all there is now.")],
    name: Annotated[str, typer.Argument(help="The new run's folder, beside the first.")],
) -> None:
    """Make a run that begins as another one was, sharing its sealed files and checkpoints."""
    from trinity_data.store.branch import branch_run
    from trinity_data.store.snapshot import store_folder
    from trinity_data.store.version import latest

    folder, moment = resolve_at(run)
    made = branch_run(folder, name, moment or latest(store_folder(folder))[1])
    say(
        f"{made.folder}: {made.num_experiences:,} experiences, "
        f"checkpoints of steps {', '.join(map(str, made.checkpoints)) or 'none'}; "
        f"{_size(made.linked_bytes)} shared, {_size(made.written_bytes)} written"
    )


def tag(
    run: Annotated[str, typer.Argument(help="A job folder, or project/name under the checkpoint root.")],
    step: Annotated[int | None, typer.Argument(help="The step at whose end the run is named.")] = None,
    name: Annotated[str | None, typer.Argument(help="Begins with a letter.")] = None,
) -> None:
    """Name the end of a step; without STEP and NAME, list the tags."""
    from trinity_data.store import version as moments
    from trinity_data.store.snapshot import store_folder

    root = store_folder(resolve_run(run))
    if step is None:
        for known, moment in moments.tags(root).items():
            say(f"{known:<24} step {moment.step}  {moment.num_rows.get('experiences', 0):,} experiences")
        return
    if name is None:
        raise typer.BadParameter("a tag needs a name", param_hint="NAME")
    moments.tag(root, name, moments.at_step(root, step))


def resolve_at(text: str) -> tuple[Path, StoreVersion | None]:
    """A run, and the moment after `@` if there is one."""
    name, at, moment = text.rpartition("@")
    if not at or is_run(text):
        return resolve_run(text), None
    from trinity_data.store.snapshot import store_folder
    from trinity_data.store.version import named_version

    folder = resolve_run(name)
    return folder, named_version(store_folder(folder), moment)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"
