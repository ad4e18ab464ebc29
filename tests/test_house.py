"""Limits of the source: lengths, budgets of folders, and one meaning for each public type."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.support.lanes import tomllib
from tests.test_imports import ROOT, SOURCES

MAX_FUNCTION, MAX_CLASS, MAX_FILE = 75, 300, 450
# What is longer today. Delete a row when it is not needed any more: the test fails for it then.
LONGER: set[str] = set()
# A family's modules have the names that its papers give them, and its task those that titan reads.
SHARED = {"Attention", "Block", "TaskOptions", "Transformer"}


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


# Modules that look for several words in a text, since its author gives them nothing else.
READS_WORDS = {
    "titan.config.toml": "the place of a mistake in the message of tomllib",
    "titan.health.errors": "a counter's name in the kernel's file",
    "titan.tools.doctor.diagnosis": "the name that the flight recorder gives to the axis of all ranks",
    "titan.tools.doctor.evidence": "the heading of a thread in a stack that Python wrote",
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
                if asks and any(_has_words(part) for arg in node.args for part in ast.walk(arg)):
                    found.add(module)
    assert found == {*READS_WORDS}


# ---- budgets -------------------------------------------------------------------------------------

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(text: str) -> int:
    """Return the number of lines with code: no blanks, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and ast.get_docstring(node, clean=False) is not None:
                lines -= {*range(first.lineno, (first.end_lineno or 0) + 1)}
    return len(lines)


def _sizes() -> Counter[str]:
    """Return the code lines of each row of the table."""
    sizes: Counter[str] = Counter()
    for top in ("titan", "models", "tests"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            # The tests of titan/contrib lie in its folders.
            folder = "tests" if "tests" in parts else "/".join(parts[: 2 if top == "titan" else 1])
            size = code_lines(path.read_text(encoding="utf-8"))
            sizes[folder] += size
            if folder not in ("tests", "titan/sim", "titan/tools", "titan/contrib"):
                sizes["core"] += size
    return sizes


def _words() -> int:
    """Return the words of the pages, without the generated ones and the log."""
    generated = {ROOT / "docs" / name for name in ("config.md", "log.md", "zoo.md")}
    pages = {*ROOT.glob("docs/**/*.md")} - generated
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def test_no_folder_grows_beyond_its_budget() -> None:
    table = tomllib.loads((ROOT / "tests/budgets.toml").read_text(encoding="utf-8"))
    sizes = _sizes()
    sizes["docs"] = _words()
    over = [
        f"{row}: {sizes[row]} of {most}; name what this replaces, or raise the budget in tests/budgets.toml with a reason"
        for row, most in (table["code"] | table["words"]).items()
        if not 0 < sizes[row] <= most
    ]
    assert not over, "\n".join(over)


def test_code_lines_are_counted() -> None:
    text = '"""A module.\n\nIts text."""\n\nx = 1  # one\n\n# none\ndef f():\n    """Two."""\n    return """\n    a"""\n'
    assert code_lines(text) == 4


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
            if "Args:" not in doc and (len(node.args.kwonlyargs) > 5 or (is_public and count > 4)):
                silent.append(f"{module}.{name}: Args")
            raises = any(isinstance(child, ast.Raise) and child.exc for child in ast.walk(node))
            if is_public and raises and not re.search(r"\b[Rr]aises?\b", doc):
                silent.append(f"{module}.{name}: Raises")
    assert silent == []
