"""SQL expressions over the columns of a table: read by DuckDB's parser, computed by Arrow's kernels.

Nothing is evaluated as code, and a small table costs microseconds, where a query would cost milliseconds.
Numbers are float64, and a missing value makes what is computed from it missing, as in SQL.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias, cast

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.errors import OperatorError, unknown_name
from trinity_data.schema import EXPERIENCES, TASKS, Values
from trinity_operators.base import Column, Filter, FilterResult, Mapper

Node: TypeAlias = Mapping[str, Any]
Datum: TypeAlias = Any
"""An Arrow array, chunked array or scalar."""
Compute: TypeAlias = Callable[[pa.Table], Datum]


def _remainder(left: Datum, right: Datum) -> Datum:
    """With the sign of the dividend."""
    return pc.subtract(left, pc.multiply(right, pc.trunc(pc.divide(left, right))))


def _length(values: Datum) -> Datum:
    """Characters of texts, elements of lists."""
    is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
    return (pc.utf8_length if is_text else pc.list_value_length)(values).cast(pa.float64())


FUNCTIONS: dict[str, Callable[..., Datum]] = {
    "*": pc.multiply,
    "+": pc.add,
    "-": lambda *sides: pc.negate(*sides) if len(sides) == 1 else pc.subtract(*sides),
    "/": pc.divide,
    "%": _remainder,
    "^": pc.power,
    "**": pc.power,
    "abs": pc.abs,
    "ceil": pc.ceil,
    "exp": pc.exp,
    "floor": pc.floor,
    "greatest": pc.max_element_wise,
    "least": pc.min_element_wise,
    "len": _length,
    "length": _length,
    "ln": pc.ln,
    "log10": pc.log10,
    "log2": pc.log2,
    "lower": pc.utf8_lower,
    "power": pc.power,
    "round": pc.round,
    "sign": pc.sign,
    "sqrt": pc.sqrt,
    "trunc": pc.trunc,
    "upper": pc.utf8_upper,
}
PATTERNS: dict[str, Callable[[Datum, str], Datum]] = {
    "~~": pc.match_like,
    "contains": pc.match_substring,
    "regexp_matches": pc.match_substring_regex,
    "starts_with": pc.starts_with,
}
"""Functions whose second argument is a text in quotes; `~~` is LIKE."""
COMPARISONS: dict[str, Callable[[Datum, Datum], Datum]] = {
    "COMPARE_EQUAL": pc.equal,
    "COMPARE_NOTEQUAL": pc.not_equal,
    "COMPARE_LESSTHAN": pc.less,
    "COMPARE_LESSTHANOREQUALTO": pc.less_equal,
    "COMPARE_GREATERTHAN": pc.greater,
    "COMPARE_GREATERTHANOREQUALTO": pc.greater_equal,
}


@dataclass(frozen=True)
class Expression:
    """`text` as a function of a table. `columns` are those that it reads."""

    text: str
    columns: tuple[str, ...]
    compute: Compute

    @staticmethod
    def parse(text: str) -> Expression:
        """Raises OperatorError for what is no expression, or uses what is not offered."""
        node = _parsed(text)
        columns = tuple(dict.fromkeys(names[0] for names in _column_names(node)))
        expression = Expression(text, columns, _Compiler(text).compile(node))
        try:
            # operands of the wrong type and number, where the columns are known
            for schema in (EXPERIENCES, TASKS):
                if columns and {*columns} <= {*schema.names}:
                    expression(schema.empty_table())
        except (TypeError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise OperatorError(f"{text!r} cannot be computed: {error}") from error
        return expression

    def __call__(self, rows: pa.Table) -> Values:
        """A value for each row."""
        value: Values | pa.Scalar[Any] = self.compute(rows)
        return pa.repeat(value.as_py(), rows.num_rows) if isinstance(value, pa.Scalar) else value


@dataclass(frozen=True)
class _Compiler:
    """Makes functions of the nodes of a parsed expression."""

    text: str

    def compile(self, node: Node) -> Compute:
        match node["class"]:
            case "COLUMN_REF":
                return _column(node["column_names"])
            case "CONSTANT":
                value = _constant(node)
                return lambda rows: value
            case "FUNCTION":
                return self._function(node)
            case "COMPARISON" if node["type"] in COMPARISONS:
                return self._apply(COMPARISONS[node["type"]], [node["left"], node["right"]])
            case "CONJUNCTION":
                kernel = pc.and_kleene if node["type"] == "CONJUNCTION_AND" else pc.or_kleene
                return self._apply(lambda *parts: reduce(kernel, parts), node["children"])
            case "BETWEEN":
                return self._apply(_between, [node["input"], node["lower"], node["upper"]])
            case "CASE":
                return self._case(node)
            case "OPERATOR":
                return self._operator(node)
        raise self._refused(str(node["class"]).lower())

    def _apply(self, function: Callable[..., Datum], nodes: list[Node]) -> Compute:
        arguments = [self.compile(node) for node in nodes]
        return lambda rows: function(*(argument(rows) for argument in arguments))

    def _function(self, node: Node) -> Compute:
        name, nodes = node["function_name"].lower(), [each["expression"] for each in node["arguments"]]
        if name in PATTERNS:
            if len(nodes) != 2 or nodes[1]["class"] != "CONSTANT":
                raise self._refused(f"{name} without a text in quotes")
            kernel, pattern = PATTERNS[name], nodes[1]["literal"]["text"]
            return self._apply(lambda texts: kernel(texts, pattern), nodes[:1])
        if name not in FUNCTIONS:
            problem = unknown_name("function", name, {*FUNCTIONS, *PATTERNS} - {"~~"})
            raise OperatorError(f"{self.text!r}: {problem}")
        return self._apply(FUNCTIONS[name], nodes)

    def _case(self, node: Node) -> Compute:
        otherwise = self.compile(node["else_expr"])
        for check in reversed(node["case_checks"]):
            otherwise = _if_else(
                self.compile(check["when_expr"]), self.compile(check["then_expr"]), otherwise
            )
        return otherwise

    def _operator(self, node: Node) -> Compute:
        children = node["children"]
        match node["type"]:
            case "OPERATOR_NOT":
                return self._apply(pc.invert, children)
            case "OPERATOR_IS_NULL":
                return self._apply(lambda values: pc.is_null(values, nan_is_null=True), children)
            case "OPERATOR_IS_NOT_NULL":
                return self._apply(lambda values: pc.invert(pc.is_null(values, nan_is_null=True)), children)
            case "OPERATOR_COALESCE":
                return self._apply(pc.coalesce, children)
            case "COMPARE_IN":
                return self._apply(_among, children)
            case "COMPARE_NOT_IN":
                return self._apply(lambda *values: pc.invert(_among(*values)), children)
            case "ARRAY_EXTRACT" if [each["class"] for each in children] == ["COLUMN_REF", "CONSTANT"]:
                return _column([*children[0]["column_names"], children[1]["literal"]["text"]])
        raise self._refused(str(node["type"]).removeprefix("OPERATOR_").lower())

    def _refused(self, what: str) -> OperatorError:
        return OperatorError(
            f"{self.text!r}: {what} is not offered; allowed are columns, numbers, texts, arithmetic, "
            f"comparisons, and, or, not, in, between, case, coalesce and "
            f"{', '.join(sorted(name for name in FUNCTIONS if name.isidentifier()))}"
        )


class ExpressionMapper(Mapper):
    """Writes what an SQL expression makes of the other columns of a row.

    `metrics['accuracy']` and `reward_parts['format']` are entries of these maps.
    """

    name = "expression_mapper"
    writes: tuple[str, ...] = ("<column>",)

    def __init__(self, expression: str, column: str = "reward") -> None:
        self.expression = Expression.parse(expression)
        self.reads, self.writes = self.expression.columns, (column,)

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        return {self.writes[0]: self.expression(rows)}


class ExpressionFilter(Filter):
    """Keeps the rows for which an SQL condition is true; one that is missing drops the row too."""

    name = "expression_filter"

    def __init__(self, condition: str) -> None:
        self.condition = Expression.parse(condition)
        self.reads = self.condition.columns

    def apply(self, rows: pa.Table) -> FilterResult:
        result: Any = self.condition(rows)
        if not pa.types.is_boolean(result.type):
            raise OperatorError(f"{self.condition.text!r} is {result.type}; a condition is true or false")
        keep = result.fill_null(False).to_numpy(zero_copy_only=False)
        return FilterResult(keep, f"not {self.condition.text}")


def _parsed(text: str) -> Node:
    """DuckDB's tree of the expression."""
    import duckdb

    with duckdb.connect() as database:
        rows = database.execute("select json_serialize_sql(?)", [f"select {text}"]).fetchall()
    tree = json.loads(rows[0][0])
    if tree["error"]:
        raise OperatorError(f"{text!r} is no SQL expression: {tree['error_message']}")
    select = tree["statements"][0]["node"]
    expressions = select.get("select_list", ())
    more = select["where_clause"] or select["modifiers"] or select["from_table"]["type"] != "EMPTY"
    if len(expressions) != 1 or more:
        raise OperatorError(f"{text!r} is no SQL expression: write one value, without from, where and order")
    node: Node = expressions[0]
    return node


def _column_names(node: Any) -> Iterator[list[str]]:
    if isinstance(node, Mapping):
        if node.get("class") == "COLUMN_REF":
            yield node["column_names"]
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _column_names(child)


def _column(names: list[str]) -> Compute:
    """A column, or the entry of a map; numbers as float64."""
    name, *keys = names

    def compute(rows: pa.Table) -> Datum:
        values = rows[name]
        for key in keys:
            values = _entry(values, key, name)
        is_number = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
        return values.cast(pa.float64()) if is_number else values

    return compute


def _entry(maps: pa.ChunkedArray[Any], key: str, column: str) -> pa.ChunkedArray[Any]:
    """The values under a key; one that no row has, though there are others, is taken for a misspelling."""
    values: pa.ChunkedArray[Any] = pc.map_lookup(maps, pa.scalar(key), "first")
    if len(values) and values.null_count == len(values):
        keys = cast("pa.MapArray[Any, Any]", maps.combine_chunks()).keys
        known = {str(name) for name in keys.to_pylist()}
        if known:
            raise OperatorError(unknown_name(f"entry of {column}", key, known))
    return values


def _constant(node: Node) -> Datum:
    kind, text = node["literal"]["kind"], node["literal"]["text"]
    match kind:
        case "INTEGER" | "NUMERIC":
            return pa.scalar(float(text))
        case "BOOLEAN":
            return pa.scalar(text == "true")
        case "NULL_LITERAL":
            return pa.nulls(1)[0]
    return pa.scalar(text)


def _between(values: Datum, low: Datum, high: Datum) -> Datum:
    return pc.and_kleene(pc.greater_equal(values, low), pc.less_equal(values, high))


def _among(values: Datum, *allowed: Datum) -> Datum:
    return reduce(pc.or_kleene, [pc.equal(values, each) for each in allowed])


def _if_else(condition: Compute, value: Compute, otherwise: Compute) -> Compute:
    return lambda rows: pc.if_else(pc.fill_null(condition(rows), False), value(rows), otherwise(rows))
