"""Hooks of MkDocs: links out of the site, and the width from which the menu stands beside the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# A link to a file that is no page of the site: outside of docs/, or the log.
OUTSIDE = re.compile(
    r"\[([^\]]*)\]\((?:(?:\.\./)+((?:[^)#]*\.(?:py|yaml|toml|sbatch)|examples/[^)]*|(?:titan|train_configs)/[^)#]*"
    r"|(?:AGENTS|README)\.md))|(log\.md))[^)]*\)"
)
# Material hides the menu behind a button below 1,220 px, so that windows of 1,200 px had none.
MENU_FROM = {"76.25em": "68.75em", "76.234375em": "68.734375em"}


def on_config(config: Any) -> None:
    # Without an address there is nothing to edit, and MkDocs would link to a page of the site.
    config.edit_uri = "edit/main/docs/" if config.repo_url else None


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Point links to other files of the repository at its address; without one, name their paths."""

    def outside(link: re.Match[str]) -> str:
        text, path = link[1], link[2] or f"docs/{link[3]}"
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return OUTSIDE.sub(outside, markdown)


def on_post_build(*, config: Any) -> None:
    """Set the width from which the menu stands beside the page to 1,100 px."""
    for file in Path(config.site_dir, "assets").rglob("*.min.[cj]s*"):
        if file.suffix in (".css", ".js"):
            text = file.read_text(encoding="utf-8")
            for width, wanted in MENU_FROM.items():
                text = text.replace(width, wanted)
            file.write_text(text, encoding="utf-8")
