"""`trinity-data operators test NAME`: the properties of every operator, checked on one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trinity_data.cli.printing import print_table
from trinity_data.terminal import say

if TYPE_CHECKING:
    from trinity_operators.testing.properties import Check, Subject


class Kind(StrEnum):
    TASK = "task"
    EXPERIENCE = "experience"


def examine(
    name: Annotated[
        str, typer.Argument(help="As in a pipeline file: a name, ./file.py:Name or module:Name.")
    ],
    args: Annotated[
        list[str] | None, typer.Option("--args", help="key=value, as in the pipeline file's args.")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Rows to test it on: jsonl, json, parquet or csv; else made ones.")
    ] = None,
    kind: Annotated[
        Kind | None, typer.Option(help="What the rows are, where the operator does not show it.")
    ] = None,
    golden: Annotated[
        Path | None, typer.Option(help="Results that were stored: the operator must give the same.")
    ] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="Store the results in the file of --golden.")
    ] = False,
    ray: Annotated[
        bool, typer.Option(help="Also run it in workers of Ray Data, which takes seconds.")
    ] = True,
) -> None:
    """Test an operator: odd values, row order, batch size, purity, declared columns, Ray Data.

    Exit code 1 if a check fails.
    """
    from trinity_operators.llm_scores import LanguageModelScore
    from trinity_operators.registry import build_operator
    from trinity_operators.testing.properties import Subject, check_operator
    from trinity_operators.testing.remembered import Memory
    from trinity_operators.testing.rows import made_rows, read_rows, row_kind_of

    if renew and golden is None:
        raise typer.BadParameter("--renew needs the file of --golden")
    plain_build = partial(build_operator, name, _parsed(args or []), base_dir=Path.cwd())
    operator, memory = plain_build(), Memory()
    asks_a_model = isinstance(operator, LanguageModelScore)
    # workers of Ray Data get what can be sent to them
    build = memory.remembering(plain_build) if asks_a_model else plain_build
    row_kind = row_kind_of(operator) if kind is None else kind.value
    table = made_rows(row_kind, operator.reads) if rows is None else read_rows(rows, row_kind)
    say(f"{operator.label} on {table.num_rows:,} {row_kind}s{'' if rows else ' made for the test'}")
    if asks_a_model:
        say(f"it sends each question that comes up to the model {operator.model!r}, and each of them once")
    subject = Subject(build, table, row_kind)
    checks = check_operator(build, table, row_kind)
    if checks[0].status == "passed":
        checks += _more_checks(subject, ray=ray, golden=golden, renew=renew)
    if memory.num_asked:
        say(f"{memory.num_asked} questions were asked")
    _show(checks)


def _show(checks: Sequence[Check]) -> None:
    """Ends the command with exit code 1 where one has failed."""
    print_table(("check", "result", "why"), [(check.name, check.status, check.text) for check in checks])
    failed = sum(check.status == "failed" for check in checks)
    say(f"{failed} of {len(checks)} checks failed" if failed else f"{len(checks)} checks, none failed")
    if failed:
        raise typer.Exit(1)


def _parsed(args: Sequence[str]) -> dict[str, Any]:
    from trinity_data.config.yaml_reader import parse_value

    values = {}
    for text in args:
        key, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"found {text!r}; wanted key=value", param_hint="--args")
        values[key] = parse_value(Path("--args"), value)
    return values


def _more_checks(subject: Subject, *, ray: bool, golden: Path | None, renew: bool) -> Iterator[Check]:
    """In workers of Ray Data, and against results that were stored."""
    from trinity_operators.testing.properties import check_on_ray, check_results
    from trinity_operators.testing.results import read_golden, write_golden

    if ray:
        from trinity_data.launch.cluster import own_ray

        with own_ray(log_to_driver=False, logging_level="ERROR"):
            yield check_on_ray(subject)
    if golden is not None:
        results = subject.run(subject.rows)
        if renew:
            write_golden(golden, results)
        yield check_results("golden sample", read_golden(golden), results)
