"""Which arguments a constructor of Data-Juicer's only stores, read from its source.

Where every argument given is only stored, building the operator runs the same statements as without
arguments, so that nothing but the signature has to be checked. A statement that is not understood means that
only building can tell.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

# what cannot raise, whatever the values are
_STORED = (
    *(ast.Name, ast.Constant, ast.Attribute, ast.BoolOp, ast.And, ast.Or, ast.IfExp, ast.List, ast.Tuple),
    ast.Load,
)
# what depends on the values alone
_COMPUTED = (
    *(*_STORED, ast.UnaryOp, ast.Not, ast.BinOp, ast.Add, ast.Dict, ast.Compare, ast.Is, ast.IsNot, ast.Eq),
    *(ast.NotEq, ast.In, ast.NotIn, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Call),
)
_CALLED = {"bool", "int", "float", "str", "len", "list", "tuple", "dict", "set", "max", "min", "isinstance"}
_CALLED |= {"re.compile", "re.escape"}
_BASE_INITS = ("super().__init__(*args, **kwargs)", "super().__init__(**kwargs)")


class OnlyBuildingTells(Exception):
    """The constructor does something that its signature does not tell."""


def stored_arguments(init: Callable[..., None]) -> frozenset[str]:
    """The arguments that `init` stores and does nothing else with, whatever their values.

    Raises OnlyBuildingTells where it does more than to compute with the defaults of the others.
    """
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(init))).body
    assert isinstance(function, ast.FunctionDef)
    parameters = list(inspect.signature(init).parameters.values())[1:]
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    reading = _Reading({each.name: each.default for each in named}, inspect.unwrap(init).__globals__)
    reading.read(function.body)
    return frozenset(reading.defaults.keys() - reading.used)


class _Reading:
    """The statements that run with the default arguments."""

    def __init__(self, defaults: dict[str, Any], variables: dict[str, Any]) -> None:
        self.defaults = {name: None if v is inspect.Parameter.empty else v for name, v in defaults.items()}
        self.used: set[str] = set()
        """Arguments on which something depends."""
        self._variables = vars(builtins) | variables | self.defaults
        self._made_of = {name: {name} for name in defaults}
        """The arguments that went into a variable or `self.x`."""

    def read(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.Expr(ast.Constant()) | ast.Pass():
                    pass
                case ast.Expr(ast.Call() as call) if ast.unparse(call) in _BASE_INITS:
                    pass
                case ast.Assign([target], value) | ast.AnnAssign(target, _, ast.expr() as value):
                    self._store(target, value)
                case ast.AugAssign(target, ast.Add(), value):
                    self.used |= self._arguments(target)
                    self._store(target, ast.BinOp(value, ast.Add(), value))
                case ast.If(test, body, otherwise):
                    self.read(body if self._holds(test) else otherwise)
                    for each in (*body, *otherwise):
                        self.used |= self._arguments(each)
                case ast.Assert(test) if self._holds(test):
                    pass
                case _:
                    raise OnlyBuildingTells(ast.unparse(statement).splitlines()[0])

    def _store(self, target: ast.expr, value: ast.expr) -> None:
        key = _key(target)
        if key is None or not _is_computed(value):
            raise OnlyBuildingTells(ast.unparse(value))
        if not _consists_of(value, _STORED):
            self.used |= self._arguments(value)
        self._made_of[key] = self._made_of.get(key, set()) | self._arguments(value)
        # the default is no longer what a test would see
        self._variables.pop(key, None)

    def _holds(self, test: ast.expr) -> bool:
        """The test with the default arguments."""
        self.used |= self._arguments(test)
        names = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)}
        if not _is_computed(test) or not names <= self._variables.keys():
            raise OnlyBuildingTells(ast.unparse(test))
        code = compile(ast.Expression(test), "<a test of Data-Juicer's>", "eval")
        return bool(eval(code, dict(self._variables)))

    def _arguments(self, node: ast.AST) -> set[str]:
        keys = {_key(each) for each in ast.walk(node)}
        return {name for key in keys if key is not None for name in self._made_of.get(key, ())}


def _key(node: ast.AST) -> str | None:
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(ast.Name("self"), name):
            return f"self.{name}"
    return None


def _is_computed(node: ast.expr) -> bool:
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return (
        _consists_of(node, _COMPUTED)
        and all(ast.unparse(call.func) in _CALLED and not call.keywords for call in calls)
        and not names & {"args", "kwargs"}
    )


def _consists_of(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    return all(isinstance(each, kinds) for each in ast.walk(node))


def may_import(kind: type, *, package: str, loader: type, apart: Collection[object]) -> bool:
    """Whether code of `package` that is reached by name from the class may import a module when it is called.

    A `loader` imports what it stands for. What is in `apart` is not followed.
    """
    waiting, seen = list[Any]([kind]), {id(each) for each in apart}
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, loader) or (isinstance(each, ModuleType) and each.__name__.startswith(package)):
            return True
        if isinstance(each, type) and each.__module__.startswith(package):
            waiting += [*each.__mro__, *map(_function, vars(each).values())]
        elif isinstance(each, FunctionType) and each.__module__.startswith(package):
            codes = [*_codes(each.__code__)]
            if any(step.opname == "IMPORT_NAME" for code in codes for step in dis.get_instructions(code)):
                return True
            names = {name for code in codes for name in code.co_names}
            waiting += [_function(each.__globals__[name]) for name in names & each.__globals__.keys()]
    return False


def _function(value: Any) -> Any:
    """What a method, property or decorator wraps."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return inspect.unwrap(value) if isinstance(value, FunctionType) else value


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)
