"""Which attributes of our classes the source reads, found by following annotations: no code is run.

An expression's class is known where it is `self`, a parameter with an annotation, a name that was assigned,
looped over or unpacked from such an expression, an attribute with an annotation, or a call of a function with
one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

Reads = set[tuple[str, str]]


class Attributes:
    """The annotated attributes of all classes, and what functions return."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.of: dict[str, dict[str, str]] = {}
        self.bases: dict[str, list[str]] = {}
        self.returns: dict[str, str] = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._take_class(node)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    self.returns.setdefault(node.name, ast.unparse(node.returns) if node.returns else "")

    def _take_class(self, node: ast.ClassDef) -> None:
        known = self.of.setdefault(node.name, {})
        self.bases[node.name] = [ast.unparse(base) for base in node.bases]
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                known[item.target.id] = ast.unparse(item.annotation)
            elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                known.setdefault(item.name, ast.unparse(item.returns) if item.returns else "")
                known |= dict(_assigned_in(item))

    def type_of(self, kind: str, attribute: str) -> str:
        """The annotation of an attribute of a class or of its bases; empty where it is not known."""
        for name in (kind, *self.bases.get(kind, ())):
            if attribute in self.of.get(name, {}):
                return self.of[name][attribute]
        return ""

    def classes_in(self, annotation: str) -> Iterator[str]:
        """Our classes that an annotation names: `list[X]` and `X | None` stand for X,
        whose reader reads its items.
        """
        return (word for word in _words(annotation) if word in self.of)


@cache
def _words(annotation: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.findall(r"\w+", annotation)))


def _assigned_in(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, str]]:
    """`self.x = x`, where `x` is an annotated parameter, several at once, too; and `self.x: X = …`."""
    types = annotated(method)
    for node in ast.walk(method):
        if isinstance(node, ast.Assign):
            for target, value in _pairs(node.targets[0], node.value):
                if isinstance(target, ast.Attribute) and isinstance(value, ast.Name) and value.id in types:
                    yield target.attr, types[value.id]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            yield node.target.attr, ast.unparse(node.annotation)


def annotated(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> dict[str, str]:
    """The parameters of a function with their annotations."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return {each.arg: ast.unparse(each.annotation) for each in every if each.annotation is not None}


def reads_of(tree: ast.Module, attributes: Attributes) -> Reads:
    """(class, attribute) for every attribute that the module reads from an
    expression whose class is known.
    """
    reads: Reads = set()
    _Module(attributes, reads).visit(tree)
    return reads


class _Module(ast.NodeVisitor):
    def __init__(self, attributes: Attributes, reads: Reads) -> None:
        self.attributes, self.reads, self.env, self.kind = attributes, reads, dict[str, str](), ""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.kind = self.kind, node.name
        self.generic_visit(node)
        self.kind = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = self.env
        self.env = outer | annotated(node) | ({"self": self.kind} if self.kind else {})
        # twice: a name may be read above the line that assigns it, in a loop or a function inside
        for _ in range(2):
            for part in node.body:
                self.visit(part)
        self.env = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            for name, value in _pairs(target, node.value):
                self._bind(name, self._type(value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._bind(node.target, ast.unparse(node.annotation))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._bind(node.target, self._type(node.value))

    def visit_For(self, node: ast.For | ast.comprehension) -> None:
        self._bind(node.target, self._type(node.iter))
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit_For(node)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        # what is looped over stands behind what is made of it
        for generator in node.generators:
            self.visit(generator)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load):
            for kind in self.attributes.classes_in(self._type(node.value)):
                self.reads.add((kind, node.attr))

    def visit_Call(self, node: ast.Call) -> None:
        """`getattr(x, key)` may read any of x."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr":
            given = node.args[1]
            for kind in self.attributes.classes_in(self._type(node.args[0])):
                named = given.value if isinstance(given, ast.Constant) else None
                self.reads |= {(kind, name) for name in ([named] if named else self.attributes.of[kind])}

    def _bind(self, target: ast.expr, kind: str) -> None:
        """A tuple that is unpacked gives each of its names the classes that it holds."""
        if isinstance(target, ast.Name) and kind:
            self.env[target.id] = kind
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._bind(part, kind)

    def _type(self, node: ast.expr) -> str:
        """The annotation of an expression, all classes that it may hold; empty where it is not known."""
        match node:
            case ast.Name(id=name):
                return self.env.get(name, "")
            case ast.Attribute(value=value, attr=attribute):
                kinds = self.attributes.classes_in(self._type(value))
                return " ".join(self.attributes.type_of(kind, attribute) for kind in kinds)
            case ast.Call(func=ast.Name(id=name)) if name in self.attributes.of:
                return name
            case ast.Call(func=ast.Name(id=name), args=args):
                return self.attributes.returns.get(name, "") or " ".join(self._type(arg) for arg in args)
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                returned = self._type(node.func) or self.attributes.returns.get(name, "")
                return returned or (self._type(value) if name in ("values", "items", "get") else "")
            case ast.Await(value=value) | ast.Starred(value=value) | ast.Subscript(value=value):
                return self._type(value)
            case ast.IfExp(body=first, orelse=second):
                return f"{self._type(first)} {self._type(second)}"
            case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
                return " ".join(self._type(part) for part in parts)
            case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element):
                return self._type(element)
        return ""


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def parsed(folders: Iterable[Path]) -> Mapping[Path, ast.Module]:
    """The modules below some folders."""
    files = (file for folder in folders for file in sorted(folder.rglob("*.py")))
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
