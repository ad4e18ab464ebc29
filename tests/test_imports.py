"""Who may import whom, read from the source: imports inside functions count too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The parts of titan, from the bottom up: each may import those of the floors below its own. Imports for type checkers count like
# all others: a reader follows them, too.
FLOORS = (
    "base",
    "parallel",
    "config models losses",
    "commands data optim",
    "checkpoint observe tasks",
    "checks step",  # step: the program of a training step, which the simulator and the tests build, too
    "run",
    "cli train",
    "sim",  # the first ring: the core above this line imports none
    "numerics ops huggingface tools",
    "contrib",
)
FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts.split()}
# Rings that may use the simulator.
SIMULATES = re.compile(r"titan\.(ops|contrib)\b")
# They build the model of a plug-in, and call the loss of one, to check it.
TORCH_IN_CONFIG = {"titan.config.loss", "titan.config.model"}


def _sources() -> Iterator[tuple[str, Path]]:
    for folder, package in (("titan", "titan"), ("models", "titan.models")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if "tests" in parts:  # of titan/contrib
                continue
            yield ".".join([package, *parts]).removesuffix(".__init__"), path


SOURCES = dict(_sources())


@cache
def imports(module: str, *, top_level: bool = False) -> frozenset[str]:
    """Return the modules that a module imports, for type checkers too.

    Args:
        module: its name.
        top_level: only those that it imports as soon as it is imported itself, and not those for type checkers.
    """
    path, names = SOURCES[module], set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and top_level:
                continue
            if (
                isinstance(child, ast.If)
                and top_level
                and "TYPE_CHECKING" in ast.unparse(child.test)
            ):
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
    """Return the part that a module belongs to: a package, or a module directly in titan/."""
    return [*module.split("."), ""][1]


def test_parts_import_only_floors_below() -> None:
    assert len(FLOORS) <= 12
    forbidden = {
        (module, name)
        for module in SOURCES
        for name in imports(module)
        if name.startswith("titan.")
        and (own := part_of(module)) != (other := part_of(name))
        and not FLOOR[other] < FLOOR.get(own, 1)  # titan itself imports titan.base
    }
    assert forbidden == set()


def test_few_rings_use_the_simulator() -> None:
    using = {m for m in SOURCES if "sim" in map(part_of, imports(m)) and part_of(m) != "sim"}
    assert [module for module in using if not SIMULATES.match(module)] == []


def test_nothing_knows_titan_contrib() -> None:
    """Entry points in pyproject.toml name its parts, which know nothing of each other."""
    knowing = {
        path.relative_to(ROOT).as_posix(): {*re.findall(r"\btitan[./]contrib[./](\w+)", text)}
        for module, path in SOURCES.items()
        if (text := path.read_text(encoding="utf-8"))
    }
    strangers = {
        file: names
        for file, names in knowing.items()
        if names - {file.split("/")[2] if file.startswith("titan/contrib/") else ""}
    }
    assert strangers == {}


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
    assert others <= {
        "torch",
        "titan",
        "__future__",
        "collections",
        "dataclasses",
        "json",
        "math",
        "pathlib",
        "re",
        "typing",
    }


# A family that is another one with changed parts may import these of it. All else that families share is in models/common.
SUBCLASSES = {"llama3.model": "deepseek_v3 gpt_oss qwen3"}


def test_families_import_what_they_share_from_common() -> None:
    found: dict[str, set[str]] = {}
    for module in SOURCES:
        family = module.removeprefix("titan.models.").split(".")[0]
        for name in imports(module) if module.startswith("titan.models.") else ():
            other = name.removeprefix("titan.models.")
            if name.startswith("titan.models.") and other.split(".")[0] not in (
                "common",
                family,
            ):
                found.setdefault(other, set()).add(family)
    assert found == {k: {*v.split()} for k, v in SUBCLASSES.items()}


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
    assert _circles({m: (imports(m) & SOURCES.keys()) - {m} for m in SOURCES}) == set()


def test_a_circle_is_found() -> None:
    arrows = {"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}
    assert _circles(arrows) == {"b", "c"}


def test_no_hook_assigns_a_field_of_the_run_or_of_another_hook() -> None:
    """Hooks change a run through its methods alone: titan.run.progress.RunProgress."""
    assigned = [
        f"{module}: {ast.unparse(target)}"
        for module in SOURCES
        if re.search(r"^class .*\bHook\)", SOURCES[module].read_text(encoding="utf-8"), re.M)
        for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for targets in [node.targets if isinstance(node, ast.Assign) else [node.target]]
        for whole in targets
        for target in (whole.elts if isinstance(whole, ast.Tuple) else [whole])
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self"
    ]
    assert assigned == []
