"""The core names no family, no picture, and no token where it need not: models/, titan/tasks and titan/contrib bring those."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support import models_page

ROOT = Path(__file__).parents[1]
# Why a file may name a family.
MAY_NAME_FAMILIES = {
    "titan/__init__.py": "finds models/ in a checkout by one of its folders",
    "titan/config/model.py": "the default of model.name",
    "titan/data/tokenizer.py": "formats of published tokenizers",
    "titan/tools/tokenizer.py": "formats of published tokenizers",
}
FAMILIES = {path.parent.name for path in (ROOT / "models").glob("*/__init__.py")}
FAMILIES -= {"common"}
# A family by its name, or by that without its number: "llama3", "llama".
_FAMILY = re.compile(
    "|".join(sorted({re.sub(r"[_0-9]\w*$", "", name) for name in FAMILIES})), re.I
)
_PICTURE = re.compile(r"(?<![a-z])(image|picture|pixel|vision|diffusion)s?(?![a-z])", re.I)
_TOKEN = re.compile(r"token|label", re.I)
# What trains, lays out and repairs any model.
GENERAL = (
    "titan/step/train_step.py",
    "titan/run/trainer.py",
    "titan/step/parallelize.py",
    "titan/run/",
    "titan/optim/",
    "titan/ops/",
    "titan/checkpoint/",
    "titan/parallel/",
)
# Names of figures that count positions, of an embedding in every model of the zoo, and of modules that do mean tokens.
MAY_SAY_TOKEN = re.compile(
    r"tokens_seen|since_tokens|token_urlsafe|tokens_per_s(tep)?|num_tokens|per_token|tok_embeddings|tokenizer|chunk_tokens|^tokens?$|^Tokenizer$|predicts_tokens|groups\.tokens"
)
MEANS_TOKENS = {
    "titan/parallel/expert.py": "experts route tokens",
    "titan/parallel/float8.py": "names of styles",
    "titan/parallel/tensor.py": "names of styles",
    "titan/parallel/tensor_styles.py": "names of styles",
    "titan/parallel/token_order.py": "experts route tokens",
    "titan/parallel/collectives.py": "experts route tokens",
    "titan/parallel/grouped_float8.py": "torchao's name of a function",
    "titan/checkpoint/identity.py": "which text and tokenizer a run has",
    "titan/checkpoint/saved_model.py": "the name of an option",
    "titan/huggingface/export.py": "files of the tokenizer",
    "titan/huggingface/load.py": "layers that predict further tokens",
    "titan/contrib/model_columns/loads.py": "experts route tokens",
    "titan/optim/expert_bias.py": "experts route tokens",
}


def _words(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the names and strings of the code, with their lines; comments and docstrings may say what they like."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in prose
        ):
            yield line, node.value
        for field in ("id", "attr", "arg", "name"):
            if isinstance(value := getattr(node, field, None), str):
                yield line, value


def _found(pattern: re.Pattern[str], paths: list[Path]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in paths:
        hits = [f"{line}: {word[:60]}" for line, word in _words(path) if pattern.search(word)]
        if hits:
            found[path.relative_to(ROOT).as_posix()] = hits
    return found


SOURCES = [
    path
    for path in sorted((ROOT / "titan").rglob("*.py"))
    if path.relative_to(ROOT).parts[1] not in ("tasks", "contrib")
]


def test_no_family_is_named() -> None:
    assert (
        {"llama3", "qwen3"} <= FAMILIES
        and _FAMILY.search("Llama")
        and _FAMILY.search("qwen3_moe")
    )
    found = _found(_FAMILY, SOURCES)
    assert found.keys() <= MAY_NAME_FAMILIES.keys(), found
    assert found.keys() == MAY_NAME_FAMILIES.keys(), (
        "a file no longer names one: shorten the list"
    )


def test_no_picture_is_named() -> None:
    assert (
        _PICTURE.search("image_size")
        and not _PICTURE.search("imagined")
        and not _PICTURE.search("dispatches")
    )
    draw = (
        "titan/tools/",
        "titan/sim/report/",
        "titan/ops/cluster/",
    )  # pictures of runs, containers' images
    paths = [p for p in SOURCES if not p.relative_to(ROOT).as_posix().startswith(draw)]
    assert _found(_PICTURE, paths).keys() == {
        "titan/huggingface/hf_model.py",  # the names of diffusers' files
        "titan/config/plug_ins.py",  # names of entry points
        "titan/checkpoint/saved_model.py",  # models without text
        "titan/tools/pictures.py",
    }


def test_what_works_on_any_model_does_not_speak_of_tokens() -> None:
    paths = [p for p in SOURCES if p.relative_to(ROOT).as_posix().startswith(GENERAL)]
    found = {
        file: left
        for file, hits in _found(_TOKEN, paths).items()
        if file not in MEANS_TOKENS
        and (left := [hit for hit in hits if not MAY_SAY_TOKEN.search(hit.split(": ", 1)[1])])
    }
    assert found == {}


def test_the_page_of_models_counts_the_rows_that_are_there() -> None:
    """`python -m tests.support.models_page` writes the table."""
    page = models_page.PAGE.read_text(encoding="utf-8")
    assert models_page.table() in page
    assert {*models_page.rows()} == FAMILIES | {"flux", "llava", "transformers"}
