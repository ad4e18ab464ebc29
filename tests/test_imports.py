"""Who may import whom, read from the source: imports inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What each part may import of titan. A part is a package, or a module directly in titan/. Parts without a row, such as the
# trainer and the list of hooks, are one part, "trainer". titan.tools and titan.sim are above it: tools may import everything, sim
# everything but tools, and only cli.py imports them.
ALLOWED = {
    "untrusted": "",
    "hardware": "",
    "async_scalars": "",
    "run_folder": "titan untrusted",
    "models": "parallel tasks",  # rows.py, documents.py; a family's package builds its task
    "parallel": "untrusted",
    "loss": "loss_kernels parallel",
    "loss_kernels": "",
    "config": "titan hardware untrusted parallel",
    "optim": "config models parallel",
    "data": "config loss parallel untrusted",
    "checkpoint": "config data health optim parallel untrusted",
    "health": "async_scalars config hardware parallel run_folder untrusted",
    "observe": "async_scalars config hardware health optim parallel run_folder untrusted",
    # What a family's models are trained on: titan/models/NAME/task.py.
    "tasks": "config data loss models parallel task untrusted",
    "task": "checks config data loss models parallel",
    # Above data and checkpoints, below the trainer.
    "checks": "checkpoint config data hardware loss models optim parallel untrusted",
}
ABOVE = {"sim": {"sim", "cli", "tools"}, "tools": {"tools", "cli"}}  # who may import these
# They build the model of a plug-in, and call the loss of one, to check it.
TORCH_IN_CONFIG = {"titan.config.loss", "titan.config.model"}


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
    if module.startswith("titan.models.") and module.endswith((".task", ".pictures")):
        return "tasks"
    part = [*module.split("."), "titan"][module != "titan"]
    return part if part in (*ALLOWED, *ABOVE, "cli", "titan") else "trainer"


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
            else part not in ABOVE.get(other, {part})
        )
    }
    assert forbidden == set()


def test_only_a_package_knows_its_task() -> None:
    knowing = {m for m in SOURCES if any(part_of(name) == "tasks" for name in imports(m))}
    others = {m for m in knowing if part_of(m) != "tasks"}
    assert {SOURCES[m].name for m in others} == {"__init__.py"}


def test_hooks_know_their_run_and_not_the_trainer() -> None:
    """What a hook may use is declared: titan.hook.Run."""
    hooks = [m for m in SOURCES if m.startswith(("titan.hooks.", "titan.sim.twin."))]
    assert hooks and not any("titan.trainer" in imports(module) for module in hooks)


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
    assert others <= {"torch", "titan", "__future__", "collections", "dataclasses", "math", "pathlib", "re", "typing"}  # fmt: skip


# Modules that may be in a circle, and why.
CIRCLES: dict[str, str] = {}


def _circles(arrows: Mapping[str, AbstractSet[str]]) -> set[str]:
    """Return the modules that are in a circle, or lie between two."""
    left = dict(arrows)
    # First modules that import nothing of what is left, then those that nothing of it imports.
    while leaves := {module for module, names in left.items() if not names & left.keys()}:
        left = {module: names for module, names in left.items() if module not in leaves}
    while roots := left.keys() - set().union(*left.values()):
        left = {module: names for module, names in left.items() if module not in roots}
    return {*left}


def test_no_import_circle() -> None:
    """Imports inside functions count: one that waits until a function runs only hides a circle."""
    assert _circles({m: (imports(m) & SOURCES.keys()) - {m} for m in SOURCES}) == {*CIRCLES}


def test_a_circle_is_found() -> None:
    arrows = {"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}
    assert _circles(arrows) == {"b", "c"}


def test_the_tracer_knows_none_of_its_users() -> None:
    """They import its type, which is no circle only as long as it imports none of them."""
    users = ("async_tp", "compiled", "compiled_replay", "microbatches", "trace_jobs")
    used = imports("titan.sim.record.tracer")
    assert not used & {f"titan.sim.record.{name}" for name in users}
    assert not imports("titan.sim.record.observers") & SOURCES.keys()
