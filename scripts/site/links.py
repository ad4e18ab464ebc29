"""Hooks of MkDocs: links from docs/ to files outside of it, such as examples, become their paths in the repository."""

from __future__ import annotations

import re
from typing import Any


def on_config(config: Any) -> None:
    # Without an address there is nothing to edit, and MkDocs would link to a page of the site.
    config.edit_uri = "edit/main/docs/" if config.repo_url else None


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(
        r"\[([^\]]*)\]\((?:\.\./)+([^)#]*\.(?:py|yaml|toml|sbatch)|examples/[^)]*|(?:titan|train_configs)/[^)#]*|(?:AGENTS|README)\.md)[^)]*\)",
        r"`\2`",
        markdown,
    )
