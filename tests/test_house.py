"""Limits of the source: lengths in tokens, and one meaning for each public type. tests/budgets.toml limits the mass."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from tests.test_imports import SOURCES

# In tokens, since lines can be squeezed. No docstring counts.
MAX_FUNCTION, MAX_CLASS, MAX_FILE = 790, 2_920, 3_820
# What is longer today. Delete a row when it is not needed any more: the test fails for it then.
LONGER: set[str] = set()
# A family's modules have the names that its papers give them, and its task those that titan reads.
SHARED = {"Attention", "Block", "TaskOptions", "Transformer"}


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def _tokens(tree: ast.AST) -> int:
    """Count names, operators, numbers and strings, whatever the layout of their lines."""
    text = ast.unparse(tree)
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    return sum(token.type in kinds and not token.string.startswith('"""') for token in found)


def _is_longer(node: ast.AST, lines: list[str], limit: int) -> bool:
    # Words and signs, and the brackets that ast.unparse may add to a tuple, are no fewer, and counted in no time.
    parts = (node, *getattr(node, "decorator_list", ()))
    first = min(getattr(part, "lineno", 1) for part in parts)
    text = "\n".join(lines[first - 1 : getattr(node, "end_lineno", None)])
    most = len(re.findall(r"\w+|[^\w\s]", text)) + 2 * text.count(",")
    return 1.1 * most > limit and _tokens(node) > limit


def test_nothing_is_too_long() -> None:
    longer = set()
    limits: dict[type, int] = {
        ast.Module: MAX_FILE,
        ast.ClassDef: MAX_CLASS,
        ast.FunctionDef: MAX_FUNCTION,
    }
    for module, path in SOURCES.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(_tree(module)):
            limit = limits.get(type(node))
            if limit and _is_longer(node, lines, limit):
                longer.add(".".join((module, *filter(None, [getattr(node, "name", "")]))))
    assert longer == LONGER


def _guesses(tree: ast.AST) -> int:
    """Count lookups of an attribute by a public name that its object may lack. Names that are computed or private do not count."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            [name] = [
                ast.literal_eval(a) for a in node.args[1:2] if isinstance(a, ast.Constant)
            ] or [""]
            may_lack = node.func.id == "hasattr" or (
                node.func.id == "getattr" and len(node.args) == 3
            )
            found += may_lack and name != "" and not name.startswith("_")
    return found


def test_guesses_at_attributes_only_fall() -> None:
    assert sum(_guesses(_tree(module)) for module in SOURCES) <= 61


def test_only_the_model_section_resolves_sizes() -> None:
    called = re.compile(r"(resolve\w*|model_config)\((.*\.model|section|self)\)")
    texts = {module: path.read_text(encoding="utf-8") for module, path in SOURCES.items()}
    assert [m for m, text in texts.items() if called.search(text)] == ["titan.config.model"]


def test_a_public_type_has_one_meaning() -> None:
    modules: dict[str, set[str]] = defaultdict(set)
    for module in SOURCES:
        for node in _tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].add(module)
    assert {
        name: where for name, where in modules.items() if len(where) > 1 and name not in SHARED
    } == {}


# Modules that look for several words in a text, since its author gives them nothing else.
READS_WORDS = {
    "titan.config.toml": "the place of a mistake in the message of tomllib",
    "titan.ops.activity": "a counter's name in the kernel's file",
    "titan.ops.doctor.diagnosis": "the name that the flight recorder gives to the axis of all ranks",
    "titan.ops.doctor.evidence": "the heading of a thread in a stack that Python wrote",
}


def _has_words(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and " " in str(node.value).strip()


def test_nothing_decides_by_a_sentence() -> None:
    """Errors and findings have a kind, so that a better sentence changes nothing."""
    found = set()
    for module in SOURCES:
        for node in ast.walk(_tree(module)):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
                if _has_words(node.left):
                    found.add(module)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                asks = node.func.attr in ("startswith", "endswith", "find", "search", "match")
                if asks and any(
                    _has_words(part) for arg in node.args for part in ast.walk(arg)
                ):
                    found.add(module)
    assert found == {*READS_WORDS}


# Rooms whose functions other people call.
PUBLIC = re.compile(
    r"titan\.(parallel|tasks|models)\.|titan\.(hook|resolved|train_step|sim\.simulate|sim\.script)$"
)


def _public_functions(module: str) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """Yield the name, the tree and the docstring of each public function and method. A method without one is an override."""
    for node in _tree(module).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node, ast.get_docstring(node) or ""
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
            for method in methods:
                doc = ast.get_docstring(method)
                if doc and not method.name.startswith("_"):
                    yield f"{node.name}.{method.name}", method, doc


def test_functions_explain_their_arguments_and_errors() -> None:
    """ruff asks for the form of docstrings; this asks for sections where a reader needs them."""
    silent = []
    for module in SOURCES:
        for name, node, doc in _public_functions(module):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([arg for arg in every if arg.arg not in ("self", "cls", "ctx")])
            is_public = PUBLIC.match(module)
            if "Args:" not in doc and (
                len(node.args.kwonlyargs) > 5 or (is_public and count > 4)
            ):
                silent.append(f"{module}.{name}: Args")
            raises = any(isinstance(child, ast.Raise) and child.exc for child in ast.walk(node))
            if is_public and raises and not re.search(r"\b[Rr]aises?\b", doc):
                silent.append(f"{module}.{name}: Raises")
    assert silent == []
