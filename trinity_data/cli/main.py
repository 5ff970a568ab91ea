"""`trinity-data`: one file a command. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import trinity_data
from trinity_data.cli.audit import audit
from trinity_data.cli.branch import branch, tag
from trinity_data.cli.config import app as config_app
from trinity_data.cli.contracts import contracts
from trinity_data.cli.curriculum import app as curriculum_app
from trinity_data.cli.export import export
from trinity_data.cli.import_ import import_
from trinity_data.cli.operators import app as operators_app
from trinity_data.cli.push import push
from trinity_data.cli.retain import retain
from trinity_data.cli.run import run
from trinity_data.cli.runs import runs
from trinity_data.cli.sql import sql
from trinity_data.cli.tasks import tasks
from trinity_data.cli.verify_rewards import verify_rewards
from trinity_data.cli.whatif import whatif
from trinity_data.cli.why import why, why_not
from trinity_data.errors import TrinityError
from trinity_data.terminal import say

cli = typer.Typer(
    name="trinity-data",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(is_set: bool) -> None:
    if is_set:
        say(f"trinity-data {trinity_data.__version__}")
        raise typer.Exit


@cli.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Reinforcement fine-tuning where the run is a database."""


cli.command()(run)
cli.command()(push)
cli.command()(sql)
cli.command()(runs)
cli.command()(audit)
cli.command(name="verify-rewards")(verify_rewards)
cli.command()(contracts)
cli.command()(why)
cli.command(name="why-not")(why_not)
cli.command()(branch)
cli.command()(tag)
cli.command()(retain)
cli.command()(export)
cli.command(name="import")(import_)
cli.command()(whatif)
cli.command()(tasks)
cli.add_typer(operators_app, name="operators")
cli.add_typer(config_app, name="config")
cli.add_typer(curriculum_app, name="curriculum")


def app() -> None:
    """The entry point: an error that a user can fix is one message, with its exit code."""
    try:
        cli()
    except TrinityError as error:
        say(f"trinity-data: {error}", to=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    app()
