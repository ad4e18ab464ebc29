"""Who may import whom, read from the source: imports inside functions count too, except for circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What each part may import of titan. A part is a package, or a module directly in titan/. Parts without a row, such as the
# trainer and the commands, are one part, "trainer". It may import everything except titan.sim, which only cli.py imports.
ALLOWED = {
    "untrusted": "",
    "hardware": "",
    "async_scalars": "",
    "run_folder": "titan untrusted",
    "models": "parallel",  # rows.py, documents.py
    "parallel": "untrusted",
    "loss": "parallel",
    "config": "titan hardware untrusted parallel",
    "optim": "config models parallel",
    "data": "config loss parallel untrusted",
    "checkpoint": "config data health optim parallel untrusted",
    "health": "async_scalars config parallel run_folder untrusted",
    "observe": "async_scalars config hardware health optim parallel run_folder untrusted",
    "watch": "observe untrusted",
    "cluster": "config health",
}
# Arrows of today that point upwards. Delete a row together with its arrow; the test fails for a row that is not needed.
EXCEPTIONS = {
    ("checkpoint", "trainer"),  # generate.py
    ("config", "checkpoint"),  # machine.py looks for the checkpoint to start from
    ("config", "data"),  # rules open the data sources
    ("config", "optim"),  # schedule.py
    ("trainer", "sim"),  # preflight reads hardware profiles
}  # fmt: skip
# It builds the model of a plug-in to check it.
TORCH_IN_CONFIG = {"titan.config.model"}


def _sources() -> Iterator[tuple[str, Path]]:
    for folder, package in (("titan", "titan"), ("models", "titan.models")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([package, *parts]).removesuffix(".__init__"), path


SOURCES = dict(_sources())


@cache
def imports(module: str, *, top_level: bool = False) -> frozenset[str]:
    """Return the modules that a module imports, without those for type checkers.

    Args:
        module: its name.
        top_level: only those that it imports as soon as it is imported itself.
    """
    path, names = SOURCES[module], set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and top_level:
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                child = ast.Module(body=child.orelse, type_ignores=[])
            if isinstance(child, ast.Import):
                names.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                parents = module.split(".")[: None if path.name == "__init__.py" else -1]
                parents = parents[: len(parents) - child.level + 1] if child.level else []
                base = ".".join([*parents, *([child.module] if child.module else [])])
                inner = {f"{base}.{alias.name}" for alias in child.names}
                names.update(inner & SOURCES.keys() or {base})
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(names)


def part_of(module: str) -> str:
    """Return the part that a module belongs to; "trainer" stands for all parts without a row."""
    part = [*module.split("."), "titan"][module != "titan"]
    return part if part in (*ALLOWED, "cli", "sim", "titan") else "trainer"


def test_parts_import_only_what_they_may() -> None:
    arrows = {
        (part_of(module), part_of(name))
        for module in SOURCES
        for name in imports(module)
        if name.partition(".")[0] == "titan"
    }
    forbidden = {
        (part, other)
        for part, other in arrows
        if part != other
        and (
            other not in ALLOWED[part].split()
            if part in ALLOWED
            else other == "sim" and part != "cli"
        )
    }
    assert forbidden == EXCEPTIONS


def test_config_imports_no_torch() -> None:
    modules = {m for m in SOURCES if part_of(m) == "config" and "torch" in imports(m)}
    assert modules == TORCH_IN_CONFIG
    assert not any("torch" in imports(module, top_level=True) for module in modules)


def test_models_import_only_torch_and_plans() -> None:
    others = {
        name.partition(".")[0]
        for module in SOURCES
        if part_of(module) == "models"
        for name in imports(module)
    }
    assert others <= {"torch", "titan", "__future__", "collections", "dataclasses", "math", "re", "typing"}  # fmt: skip


def test_no_import_circle() -> None:
    """Remove modules that import nothing of what is left, until nothing is left."""
    left = {m: (imports(m, top_level=True) & SOURCES.keys()) - {m} for m in SOURCES}
    while leaves := [module for module, names in left.items() if not names & left.keys()]:
        for module in leaves:
            del left[module]
    assert not left
