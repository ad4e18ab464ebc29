"""The table of docs/models.md: how many parity rows of each family have a technique. `python -m tests.support.models_page` writes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from tests.parity import test_composition, test_flux, test_moe, test_parity, test_windows
from tests.support.layouts import Layout
from titan.contrib.llava.tests import test_llava

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_NAMES = {
    "llama3": "Llama 3",
    "qwen3": "Qwen3, with experts",
    "deepseek_v3": "DeepSeek-V3",
    "gpt_oss": "gpt-oss",
    "transformers": "Mistral, Gemma 3 of transformers",
    "llava": "LLaVA",
    "flux": "Flux.1",
}


def _degree(layout: Layout, axis: str) -> int:
    return dict(layout.degrees).get(axis, 1)


def _setting(layout: Layout, name: str) -> object:
    return dict(layout.settings).get(name)


def _method(layout: Layout, name: str) -> bool:
    return _degree(layout, "cp") > 1 and name == (
        _setting(layout, "context_parallel_rotate_method") or "allgather"
    )


COLUMNS: dict[str, Callable[[Layout], bool]] = {
    "FSDP2": lambda x: _degree(x, "dp_shard") > 1,
    "DDP, HSDP": lambda x: _degree(x, "dp_replicate") > 1,
    "TP": lambda x: _degree(x, "tp") > 1,
    "CP all-gather": lambda x: _method(x, "allgather"),
    "CP ring": lambda x: _method(x, "ring"),
    "CP Ulysses": lambda x: _method(x, "ulysses"),
    "PP": lambda x: _degree(x, "pp") > 1,
    "EP": lambda x: (_setting(x, "expert_parallel_degree") or 1) != 1,
    "AC": lambda x: x.recompute != "none",
    "compile": lambda x: bool(x.compiled),
    "float8": lambda x: bool(x.float8),
}


def rows() -> dict[str, list[Layout]]:
    """Return the layouts that each family is trained on and compared with one process."""
    found: dict[str, list[Layout]] = {name: [] for name in _NAMES}
    windows = [
        replace(layout, **test_windows.MODELS[name])
        for name in ("mistral", "gemma3")  # those of transformers
        for layout in test_windows.LAYOUTS
    ]
    # Rows that name no model take that of their module.
    stacked = [
        replace(x, compiled="yes", recompute="selective") for x in test_composition.LAYOUTS
    ]
    in_8_bits = [replace(x, float8="yes") for x in test_composition.LAYOUTS]
    flux = [
        *test_flux.LAYOUTS,
        *(replace(layout, float8=recipe) for recipe, layout, _ in test_flux.FLOAT8),
    ]
    lists: list[tuple[str, Iterable[Layout]]] = [
        ("llama3", (*test_parity.LAYOUTS, *stacked, *in_8_bits)),
        ("qwen3", test_moe.LAYOUTS),
        ("", windows),
        ("flux", flux),
        ("", test_llava.LAYOUTS),
    ]
    for usual, layouts in lists:
        for layout in layouts:
            named = layout.model != Layout("").model
            found[layout.model[0] if named or not usual else usual].append(layout)
    return found


def table() -> str:
    """Return the table in Markdown."""
    lines = [
        f"| family | rows | {' | '.join(COLUMNS)} |",
        f"|---|{'--:|' * (len(COLUMNS) + 1)}",
    ]
    for name, layouts in rows().items():
        counts = [sum(map(has, layouts)) for has in COLUMNS.values()]
        cells = " | ".join(str(count or "-") for count in (len(layouts), *counts))
        lines.append(f"| {_NAMES[name]} | {cells} |")
    return "\n".join(lines)


def renewed(page: str) -> str:
    """Return the page with today's table in place of the one that begins with "| family | rows"."""
    return re.sub(
        r"\| family \| rows .*?(?=\n\n)", lambda _: table(), page, count=1, flags=re.S
    )


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
