"""Who may import whom, read from the source: imports inside functions count too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What each part may import of titan, from the bottom up. A part is a package, or a module directly in titan/. Imports for type
# checkers count like all others: a reader follows them, too.
ALLOWED = {
    "base": "",
    "untrusted": "base",
    "hardware": "",
    "async_scalars": "",
    "loss_kernels": "",
    "parallel": "base untrusted",
    "models": "parallel untrusted",
    "vocabulary": "parallel",
    "loss": "loss_kernels parallel vocabulary",
    "config": "base titan parallel untrusted",
    "commands": "config",
    "run_writer": "untrusted",
    "run_folder": "run_writer titan untrusted",
    "data": "config loss parallel run_writer untrusted",
    "optim": "config models parallel",
    "generation": "data models parallel",
    "tasks": "config data generation loss models parallel run_writer untrusted",
    "health": "async_scalars base config hardware parallel run_folder run_writer untrusted",
    "observe": "async_scalars config hardware optim parallel run_writer untrusted",
    "checkpoint": "base config data health optim parallel titan untrusted",
    "checks": "checkpoint config data hardware optim parallel untrusted",
    # The program of a step: titan.step.train_step builds it, and the simulator and the tests build the same one.
    "resolved": "config parallel tasks",
    "parallelize": "config models parallel resolved untrusted",
    "random_draws": "config parallel untrusted",
    "whole_model": "loss parallel parallelize resolved untrusted",
    "step_report": "",
    "refusals": "untrusted",
    "train_step": "async_scalars config optim parallel parallelize random_draws refusals resolved step_report tasks whole_model",
    "recording": "config observe parallel run_folder tasks titan train_step whole_model",
    # The run.
    "run": "base config health",
    "hook": "async_scalars data observe train_step",
    "progress": "config data hardware hook observe resolved run run_folder run_writer tasks train_step",
    "hooks": "async_scalars base checkpoint config data health hook observe optim parallel parallelize progress recording run_writer train_step untrusted",
    "trainer": "async_scalars checks config data hardware health hook observe parallel progress random_draws resolved run run_folder run_writer tasks train_step",
    "train": "base checkpoint checks config data health hooks parallel run run_folder trainer untrusted",
}
# Who may import these. They may import all parts, but not each other against this order.
ABOVE = {
    "bench": {"bench", "sim", "tools"},
    "sim": {"sim", "cli", "tools", "contrib"},
    "tools": {"tools", "cli", "contrib"},
    "ops": {"ops"},
    "cli": {"cli"},
    "contrib": {"contrib"},
}
# Parts that the core does not import: it finds them by entry points.
RINGS = re.compile(
    r"titan\.(models\.(transformers|flux|llava)|tasks\.(flow|image_text|patches)|parallel\.linear_attention"
    r"|models\.common\.(linear_attention|short_convolution)|contrib"
    r"|checkpoint\.(huggingface|export|quantized|hf_)|tools\.(?!saved_model)|sim|cli"
    r"|observe\.(estimate|routing|trace))"
)
# Modules behind entry points, beside those in titan/contrib: none but themselves imports them, so each can be deleted.
OPTIONAL = """
    checks.evaluation_rules data.examples data.passes data.scoring hooks.evaluation tools.evaluate
    optim.average tools.average
    data.parts tools.prepare_hosts sim.price.calibrate parallel.overlap
"""
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
    """Return the part that a module belongs to."""
    return [*module.split("."), "titan"][module != "titan"]


def test_parts_import_only_what_they_may() -> None:
    arrows = {
        (part_of(module), part_of(name))
        for module in SOURCES
        for name in imports(module)
        if name.partition(".")[0] == "titan"
    }
    assert {part for arrow in arrows for part in arrow} <= {*ALLOWED, *ABOVE, "titan"}
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


def test_no_part_imports_one_above_it() -> None:
    """The rows are in order: each imports rows before it."""
    for number, (part, others) in enumerate(ALLOWED.items()):
        assert {*others.split()} <= {"titan", *[*ALLOWED][:number]}, part


def test_the_core_imports_no_ring() -> None:
    assert not [m for m in SOURCES if not RINGS.match(m) and any(map(RINGS.match, imports(m)))]


def test_nothing_knows_titan_contrib() -> None:
    """Entry points in pyproject.toml name its parts, which know nothing of each other."""
    knowing = {
        path.relative_to(ROOT).as_posix(): {*re.findall(r"\btitan[./]contrib[./](\w+)", text)}
        for path in SOURCES.values()
        if (text := path.read_text(encoding="utf-8"))
    }
    strangers = {
        file: names
        for file, names in knowing.items()
        if names - {file.split("/")[2] if file.startswith("titan/contrib/") else ""}
    }
    assert strangers == {}


def test_no_part_imports_an_optional_one() -> None:
    own = {f"titan.{name}" for name in OPTIONAL.split()}
    users = {m for m in SOURCES if imports(m) & own and part_of(m) != "contrib"}
    assert users <= own


def test_config_imports_no_torch() -> None:
    modules = {m for m in SOURCES if part_of(m) == "config" and "torch" in imports(m)}
    assert modules == TORCH_IN_CONFIG
    assert not any("torch" in imports(module, top_level=True) for module in modules)


def test_models_import_only_torch_and_plans() -> None:
    others = {
        name.partition(".")[0]
        for module in SOURCES
        if part_of(module) == "models" and not module.startswith("titan.contrib.transformers")
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
SUBCLASSES = {"llama3.model": "deepseek_v3 gpt_oss llava qwen3"}
# LLaVA has a whole Llama as its language model.
CONTAINED = {"llama3.config": "llava", "llama3.huggingface": "llava"}


def test_families_import_what_they_share_from_common() -> None:
    found: dict[str, set[str]] = {}
    for module in SOURCES:
        family = module.removeprefix("titan.models.").split(".")[0]
        for name in imports(module) if module.startswith("titan.models.") else ():
            other = name.removeprefix("titan.models.")
            if name.startswith("titan.models.") and other.split(".")[0] not in ("common", family):
                found.setdefault(other, set()).add(family)
    assert found == {k: {*v.split()} for k, v in (SUBCLASSES | CONTAINED).items()}


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
        if re.match(r"titan\.hooks\.|titan\.(contrib\.\w+|sim\.twin)\.hook$", module)
        for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for targets in [node.targets if isinstance(node, ast.Assign) else [node.target]]
        for whole in targets
        for target in (whole.elts if isinstance(whole, ast.Tuple) else [whole])
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self"
    ]
    assert assigned == []
