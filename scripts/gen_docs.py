"""Write docs/config.md and docs/schema.json from the config classes; a test fails when they are stale."""

from __future__ import annotations

import json
from pathlib import Path

from titan.config.render import json_schema, reference_markdown

DOCS = Path(__file__).resolve().parent.parent / "docs"


def generated() -> dict[Path, str]:
    """Path and content of every generated page."""
    return {
        DOCS / "config.md": reference_markdown(),
        DOCS / "schema.json": json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n",
    }


if __name__ == "__main__":
    for path, content in generated().items():
        path.write_text(content, encoding="utf-8")
        print(f"wrote {path}")
