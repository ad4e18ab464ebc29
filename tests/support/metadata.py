"""Metadata of a package of examples/, as pip would install them."""

from __future__ import annotations

from pathlib import Path

from titan.config import model, plug_ins
from titan.config.toml import tomllib


def write_metadata(package: Path, folder: Path, **more: str) -> None:
    """Write the metadata of a package into a folder, with more entries of its groups."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    name = project["name"]
    (metadata := folder / f"{name.replace('-', '_')}-0.1.dist-info").mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n"
    (metadata / "METADATA").write_text(text)
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {what}" for key, what in (entries | more).items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


def forget() -> None:
    """Clear the caches of families and entry points."""
    for cached in (
        model.families,
        model.family,
        plug_ins.installed_entry_points,
        model.check_module,
    ):
        cached.cache_clear()
