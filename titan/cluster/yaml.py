"""YAML, written: dicts, lists, numbers and text, so that any reader of YAML 1.1 or 1.2 gets back what was given.

Text is bare where it is a plain word, a block where it has lines, and otherwise in double quotes as JSON has it, in which
nothing is special but what is escaped.
"""

from __future__ import annotations

import json
import re
from typing import Any

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}


def to_yaml(value: Any, *, indent: int = 0) -> str:
    """The lines of a dict or list, each `indent` spaces in."""
    pad = " " * indent
    lines = []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        start = f"{pad}{_scalar(key)}:" if isinstance(value, dict) else f"{pad}-"
        if isinstance(item, (dict, list)) and item:
            inner = to_yaml(item, indent=indent + 2)
            lines.append(
                f"{start}\n{inner}" if isinstance(value, dict) else start + inner[indent + 1 :]
            )
        elif isinstance(item, str) and _is_block(item):
            rows = (f"{pad}  {row}".rstrip() for row in item.removesuffix("\n").split("\n"))
            lines.append("\n".join([f"{start} |{'' if item.endswith(chr(10)) else '-'}", *rows]))
        else:
            lines.append(f"{start} {_scalar(item)}")
    return "\n".join(lines)


def _is_block(text: str) -> bool:
    """Whether a block gives it back: no blank at either end of a line, and no odd character."""
    rows = text.removesuffix("\n").split("\n")
    plain = all(row.isprintable() and row == row.rstrip() for row in rows)
    return len(rows) > 1 and plain and rows[0] == rows[0].lstrip() != "" and rows[-1] != ""


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if _WORD.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
