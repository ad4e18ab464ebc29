"""Limits of the source: lengths, and one meaning for each public type."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.test_imports import SOURCES

MAX_FUNCTION, MAX_CLASS, MAX_FILE = 80, 300, 450
# What is longer today. Delete a row when it is not needed any more: the test fails for it then.
LONGER = {
    "titan.sim.replay",
}
# A family's modules have the names that its papers give them.
SHARED = {"Attention", "Block", "Transformer"}


def _tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def _length(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1  # pyright: ignore[reportAttributeAccessIssue]


def test_nothing_is_too_long() -> None:
    longer = set()
    for module, path in SOURCES.items():
        if len(path.read_text(encoding="utf-8").splitlines()) > MAX_FILE:
            longer.add(module)
        for node in ast.walk(_tree(module)):
            if isinstance(node, ast.FunctionDef) and _length(node) > MAX_FUNCTION:
                longer.add(f"{module}.{node.name}")
            if isinstance(node, ast.ClassDef) and _length(node) > MAX_CLASS:
                longer.add(f"{module}.{node.name}")
    assert longer == LONGER


def test_a_public_type_has_one_meaning() -> None:
    modules: dict[str, set[str]] = defaultdict(set)
    for module in SOURCES:
        for node in _tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].add(module)
    assert {
        name: where for name, where in modules.items() if len(where) > 1 and name not in SHARED
    } == {}
