"""Keys of TorchTitan v0.2.2's files that titan renames or does not use.

A renamed key moves to its new place, with a warning. A key that titan does not use is ignored, with a warning, unless its
value turns something on: then it is an error. The tables are applied to each file before files are merged, so that an overlay
may use a new name for a key that an older file calls by its old name.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from titan.config.errors import Problem, SourceLocation, key_text
from titan.config.layer import ConfigLayer, LoadExtension, last
from titan.config.model import family
from titan.config.schema import ModelSection
from titan.config.toml import table_beside

TABLES = table_beside(__file__, "v0_2_2.toml")
RENAMED, UNUSED, IGNORED = (TABLES[name] for name in ("renamed", "unused", "ignored"))
_INSTEAD = TABLES["instead"]
# "8B_flex" and "debugmodel_varlen_attn" name the kernel of attention. Here the device decides on it (titan/parallel/documents.py).
_MASKED_FLAVOR = re.compile(r"(.+)_(?:flex|varlen)(?:_attn)?")


class TorchTitanFiles(LoadExtension):
    """Old names, unused keys and flavors of TorchTitan's files."""

    def rename(self, layer: ConfigLayer) -> tuple[list[str], list[Problem]]:
        """Apply the tables to a layer, in place.

        Args:
            layer: content of one file.

        Returns:
            Warnings and problems.
        """
        warnings: list[str] = []
        problems: list[Problem] = []
        for old, new in RENAMED.items():
            table = layer.table_of(old)
            if last(old) not in table:
                continue
            location = layer.locations[old]
            # Within one file neither of the two wins.
            if other := layer.locations.get(new):
                message = f"is the old name of {new}, which {other} sets too; keep {new} only"
                problems.append(location.problem(message))
                layer.remove(old)
                continue
            layer.move(old, new, table[last(old)])
            warnings.append(f"{location}: {old} is now {new}")
        for key in (*IGNORED, *UNUSED):
            if last(key) not in layer.table_of(key):
                continue
            value, location = layer.remove(key), layer.locations[key]
            if key in IGNORED or _is_off(value) or UNUSED[key] == value:
                warnings.append(f"{location}: {key} is ignored: titan has no use for it")
                continue
            # Name each key of a section that turns something on.
            keys = [key]
            if isinstance(value, dict):
                keys = [
                    f"{key}.{key_text([k])}" for k, inner in value.items() if not _is_off(inner)
                ]
            message = f"titan has no such setting; {_INSTEAD.get(key, 'remove the key')}"
            problems += [layer.locations[k].problem(message) for k in keys]
        return warnings, problems

    def complete(self, data: dict[str, Any], locations: dict[str, SourceLocation]) -> list[str]:
        """Replace a masked flavor of TorchTitan by its plain flavor and data.document_mask.

        TorchTitan has some flavors twice, the second time with document masks.

        Args:
            data: the merged job, which is changed in place.
            locations: places of its keys, for the warnings.

        Returns:
            Warnings.
        """
        model, masks = data.get("model"), data.get("data", {})
        if not isinstance(model, dict) or not isinstance(masks, dict):
            return []
        if not (match := _MASKED_FLAVOR.fullmatch(str(model.get("flavor")))):
            return []
        with suppress(KeyError):  # a family that does not exist is reported later
            known = family(model.get("name", ModelSection.model_fields["name"].default)).FLAVORS
            if model["flavor"] not in known and match[1] in known:
                data["data"] = {"document_mask": True} | masks
                where, name, model["flavor"] = (
                    locations["model.flavor"],
                    model["flavor"],
                    match[1],
                )
                return [f"{where}: {name} is {match[1]} with data.document_mask = true"]
        return []


def _is_off(value: Any) -> bool:
    # A section that is switched off turns nothing on, whatever its other keys say.
    """Return whether a value turns nothing on."""
    if isinstance(value, dict):
        return value.get("enable") is False or all(map(_is_off, value.values()))
    return not value
