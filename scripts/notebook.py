"""Turn a page of the documentation into a notebook: prose into cells of Markdown, blocks of bash into cells of `%%bash`.

Called by gen_docs.py, so that the page and its notebook never differ. A notebook is JSON (nbformat 4.5). It stands beside its
page, so that links hold.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_NOTICE = "*This notebook is generated from [{name}]({name}) by `scripts/gen_docs.py`. Change the page instead.*"
# Commands of a page run in the root of the checkout, if there is one, and find this kernel's programs.
_SETUP = """\
import os
import sys
from pathlib import Path

here = Path.cwd()
os.chdir(next((p for p in [here, *here.parents] if (p / "scripts/gen_docs.py").exists()), here))
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
"""
_GUARD = "command -v titan > /dev/null && exit  # it is installed\n"


def notebook(page: Path) -> str:
    """Return the notebook of a page. Cells that install titan do nothing where it is installed."""
    cells = [_cell("markdown", _NOTICE.format(name=page.name)), _code(_SETUP)]
    # Text, content of a block, text, ...
    text = page.read_text(encoding="utf-8")
    parts = re.split(r"^```bash\n(.*?)^```$\n?", text, flags=re.MULTILINE | re.DOTALL)
    for number, part in enumerate(parts):
        if number % 2:
            cells.append(_code("%%bash\n" + _GUARD * ("pip install" in part) + part))
        elif part.strip():
            cells.append(_cell("markdown", part))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    book = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _code(text: str) -> dict[str, Any]:
    return _cell("code", text) | {"execution_count": None, "outputs": []}


def _cell(kind: str, text: str) -> dict[str, Any]:
    return {
        "cell_type": kind,
        "metadata": {},
        "source": text.strip("\n").splitlines(keepends=True),
    }
