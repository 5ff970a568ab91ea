"""`trinity-data operators new NAME`: a file with a working operator, and its test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from trinity_data.terminal import say


def new(
    name: Annotated[str, typer.Argument(help="Small letters, digits and _: the file is NAME.py.")],
    as_function: Annotated[
        bool, typer.Option("--function", help="A function of one row; the default.")
    ] = False,
    as_filter: Annotated[bool, typer.Option("--filter", help="A class that drops rows.")] = False,
    as_mapper: Annotated[bool, typer.Option("--mapper", help="A class that changes columns.")] = False,
) -> None:
    """Write a file with a working operator and one with its test, to be changed."""
    from trinity_data.atomic import new_file
    from trinity_operators.templates import Template, object_name, operator_files

    chosen = {Template.FUNCTION: as_function, Template.FILTER: as_filter, Template.MAPPER: as_mapper}
    templates = [template for template, is_chosen in chosen.items() if is_chosen] or [Template.FUNCTION]
    if len(templates) > 1:
        raise typer.BadParameter("choose one of --function, --filter and --mapper")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise typer.BadParameter(f"found {name!r}; wanted small letters, digits and _", param_hint="NAME")
    files = operator_files(name, templates[0])
    if taken := [file for file in files if Path(file).exists()]:
        raise typer.BadParameter(f"{' and '.join(taken)} exists; choose another name", param_hint="NAME")
    for file, text in files.items():
        with new_file(Path(file)) as partial:
            partial.write_text(text, encoding="utf-8")
    operator = f"./{name}.py:{object_name(name, templates[0])}"
    say(f"wrote {' and '.join(files)}; in a pipeline file its name is {operator}")
    say(f"test it: trinity-data operators test {operator}")
