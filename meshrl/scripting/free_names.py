"""Names that a definition takes from its module, found without running it."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from dataclasses import dataclass

# Names that every module has.
MODULE_NAMES = {"__name__", "__doc__", "__file__", "__spec__", "__package__", "__builtins__"}


@dataclass(frozen=True)
class FreeNames:
    """Names of a module that a definition uses."""

    needed: list[str]  # when it is defined or called
    in_annotations: list[str]  # nowhere else
    attribute_paths: set[str]  # as `os.path.join`: a path may name submodules


def find_free_names(text: str, own_name: str) -> FreeNames:
    """Return the names that a definition, without its surroundings, takes from its module."""
    tree = ast.parse(text)
    annotations = _AnnotationRemover()
    stripped = ast.unparse(ast.fix_missing_locations(annotations.visit(tree)))
    known = {*MODULE_NAMES, own_name}
    needed = sorted(set(_iterate_globals(symtable.symtable(stripped, "code", "exec"))) - known)
    annotated = sorted(annotations.names - known - {*needed})
    return FreeNames(needed, annotated, set(_iterate_paths(ast.parse(stripped))))


class _AnnotationRemover(ast.NodeTransformer):
    """Remover of annotations, which are not evaluated, and collector of the names in them."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_arg(self, node: ast.arg) -> ast.arg:
        self._collect(node.annotation)
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self._collect(node.annotation)
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._collect(node.returns)
        node.returns = None
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        self._collect(node.returns)
        node.returns = None
        return self.generic_visit(node)

    def _collect(self, annotation: ast.expr | None) -> None:
        if annotation is not None:
            self.names |= {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)}


def _iterate_globals(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        if table.get_type() == "module":
            if symbol.is_referenced() and not symbol.is_assigned():
                yield symbol.get_name()
        elif symbol.is_global():
            yield symbol.get_name()
    for child in table.get_children():
        yield from _iterate_globals(child)


def _iterate_paths(tree: ast.AST) -> Iterator[str]:
    """Yield the attribute paths that begin with a name."""
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            yield ".".join([node.id, *reversed(parts)])
