"""A hook of MkDocs: links from docs/ to files outside of it, such as examples, become their paths in the repository."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(
        r"\[([^\]]*)\]\((?:\.\./)+([^)#]*\.(?:py|yaml|toml|sbatch)|examples/[^)]*|AGENTS\.md)[^)]*\)",
        r"`\2`",
        markdown,
    )
