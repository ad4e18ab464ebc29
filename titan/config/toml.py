"""Reader of TOML with the line of every key, and writer of TOML values.

`tomllib` parses a text, but forgets positions. So `tomllib` goes first. Then the text is valid, and a scanner finds the line of
each key. The scanner knows only as much TOML as it needs: headers, dotted and quoted keys, and where a value ends. Mistakes
are raised as `ConfigError`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from pathlib import Path
from typing import Any

from titan.base.untrusted import InputError, printable, read_bytes, tomllib

from .errors import ConfigError, KeyPath, Problem, Table, key_text, nearest

# Text between tokens. It may contain commas, since they have no meaning for the scanner in valid TOML.
_BLANK = re.compile(r"(?:[\s,]|#[^\n]*)*")
_KEY = re.compile(r'[ \t]*([\w-]+|"(?:[^"\\]|\\.)*"|\'[^\']*\')[ \t]*')
# A key of 64 parts. The time and memory of a parser grow with the square of the number of parts.
_DEEP = re.compile(
    r"""(?:(?:\w[\w-]{0,63}|"[^"\n]{0,63}"|'[^'\n]{0,63}')[ \t]{0,9}\.[ \t]{0,9}){64}"""
)
# A job file is a few kilobytes; reading more would only cost memory.
_MAX_BYTES = 2**20
# A multi-line string may end in up to five quotes, of which three close it.
_SCALAR = re.compile(
    r'"""(?:[^\\]|\\.)*?"""(?:"{0,2})'
    r"|'''.*?'''(?:'{0,2})"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|[^,\]}#\n]+",
    re.DOTALL,
)


def read_toml(path: Path) -> tuple[Table, dict[KeyPath, int]]:
    """Read the tables of a file, and the line of every key path in them.

    Raises:
        ConfigError: the file is missing, or not valid TOML.
    """
    text = _read_text(path)
    try:
        # Search before parsing, which would itself take long for such a key.
        if _DEEP.search(text):
            raise RecursionError
        return tomllib.loads(text), _Scanner(text).scan()
    except RecursionError:
        raise ConfigError([Problem(str(path), 1, "", "values are nested too deeply")]) from None
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        raise ConfigError([_explain(error, path=path, text=text)]) from None


def table_beside(module: str, name: str) -> dict[str, Any]:
    """Return the content of a TOML file of titan's own.

    Args:
        module: `__file__` of a module.
        name: name of the file, in the same folder.
    """
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


def parse_value(text: str) -> Any:
    """Return `text` as a TOML value.

    Raises:
        ValueError: `text` is not a single TOML value.
    """
    try:
        table = tomllib.loads(f"value = {text}")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # "1\nx = 2" is valid TOML, but not a value.
    if list(table) != ["value"]:
        raise ValueError("more than a value")
    return table["value"]


def format_value(value: Any) -> str:
    """Return a string, number, boolean, date, list or table as TOML on one line. Keys without a value are left out."""
    if isinstance(value, bool):
        return str(value).lower()  # before int, of which bool is a subclass
    if isinstance(value, str):
        return printable(json.dumps(value, ensure_ascii=False))
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, dict):
        pairs = (
            f"{key_text([key])} = {format_value(item)}"
            for key, item in value.items()
            if item is not None
        )
        return f"{{{', '.join(pairs)}}}"
    return str(value)


def _read_text(path: Path) -> str:
    def problem(message: str, line: int = 0) -> ConfigError:
        return ConfigError([Problem(str(path), line, "", message)])

    try:
        return read_bytes(path, limit=_MAX_BYTES).decode("utf-8-sig")
    except InputError as error:
        message = str(error).removeprefix(printable(f"{path}: "))
        if isinstance(error.__cause__, FileNotFoundError):
            message = f"no such file{_nearest_files(path)}"
        if isinstance(error.__cause__, IsADirectoryError):
            message = f"a folder, not a job file{_nearest_files(path / 'x')}"
        raise problem(message) from None
    except UnicodeDecodeError as error:
        # Point at the line of the first byte that is not UTF-8.
        line = error.object[: error.start].count(b"\n") + 1
        byte = error.object[error.start]
        message = f"not UTF-8 text (byte 0x{byte:02x}); save the file as UTF-8"
        raise problem(message, line) from None
    except ValueError as error:  # a null character in the name
        raise problem(f"cannot be read: {error}") from None


def _nearest_files(path: Path) -> str:
    """Return a hint at a missing file: the file with a similar name, otherwise all files beside it."""
    try:
        beside = {p.name: str(p) for p in sorted(path.parent.glob("*.toml"))}
        known = {p.name: str(p) for p in sorted(Path("train_configs").glob("*.toml"))} | beside
    except (OSError, ValueError):
        return ""
    folders = (parent / "train_configs" for parent in Path(__file__).parents[1:3])
    file = f"{path.stem}.toml"
    if file not in known and any((folder / file).is_file() for folder in folders):
        return f"; titan brings this job: titan config --list {path.stem} --output {file}"
    if match := nearest(path.name, known):
        return f"; did you mean '{known[match]}'?"
    return f"; there are {', '.join((beside or known).values())}" if known else ""


# Booleans of other formats.
BOOLEANS: dict[str, bool] = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
}
_EXPLAINED = {
    "Cannot overwrite a value": "this key is set twice",
    "Cannot declare": "this table is written twice, or its name is already a value",
    "Cannot mutate": "a table written in braces cannot be added to below",
    "Cannot redefine": "this key is set twice",
}


def _explain(error: ValueError, *, path: Path, text: str) -> Problem:
    """Explain a syntax error in plain words, with the line itself and the usual cause."""
    lines = text.splitlines() or [""]
    # The message of tomllib ends with the place, or with a note that the text ended.
    reason, _, place = str(error).partition(" (at ")
    where = re.match(r"line (\d+), column", place)
    line = min(int(where[1]), len(lines)) if where else len(lines)
    plain = [text for begin, text in _EXPLAINED.items() if reason.startswith(begin)]
    reason = plain[0] if plain else reason[:1].lower() + reason[1:]
    source = lines[line - 1].strip()
    message = f"not valid TOML: {reason}, in `{source[:80]}`"
    # The usual cause: text without quotes, or a boolean in another spelling.
    if bare := re.fullmatch(r"([\w.\-]+\s*=\s*)([A-Za-z./~][^\"'\[\]{}#]*?)\s*(#.*)?", source):
        right = format_value(BOOLEANS.get(bare[2].lower(), bare[2]))
        message += f"; write {bare[1]}{right}"
    return Problem(str(path), line, "", message)


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self.newlines = [match.start() for match in re.finditer("\n", text)]
        self.num_tables: dict[KeyPath, int] = {}  # number of [[...]] headers so far, by name

    def scan(self) -> dict[KeyPath, int]:
        # Keys belong to the table whose header came last.
        table: KeyPath = ()
        while self._next():
            if self._next() == "[":
                table = self._header()
            else:
                self._pair(table)
        return self.lines

    def _next(self) -> str:
        """Skip blanks, commas and comments, and return the next character. Empty at the end."""
        self.at = self._match(_BLANK).end()
        return self.text[self.at : self.at + 1]

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self.text, self.at)
        assert match, f"no TOML at character {self.at}"
        return match

    def _mark(self, path: KeyPath, place: int) -> None:
        # Newlines before this place, counted by bisection.
        line = bisect_right(self.newlines, place - 1) + 1
        # A dotted key also creates the tables in front of it.
        for length in range(1, len(path)):
            self.lines.setdefault(path[:length], line)
        self.lines[path] = line

    def _keys(self) -> list[str]:
        keys: list[str] = []
        while not keys or self.text.startswith(".", self.at):
            self.at += bool(keys)
            match = self._match(_KEY)
            self.at = match.end()
            # Bare keys stand for themselves, quoted ones may have escapes.
            quoted = match[1][0] in "\"'"
            keys.append(parse_value(match[1]) if quoted else match[1])
        return keys

    def _header(self) -> KeyPath:
        """Read [table] or [[table]]. A name that is a list of tables means the last table of the list."""
        start = self.at
        brackets = 2 if self.text.startswith("[[", start) else 1
        self.at += brackets
        keys = self._keys()
        self.at += brackets
        path: KeyPath = ()
        for depth, key in enumerate(keys, 1):
            path += (key,)
            if brackets == 2 and depth == len(keys):
                self.num_tables[path] = self.num_tables.get(path, 0) + 1
            if path in self.num_tables:
                path += (self.num_tables[path] - 1,)
        self._mark(path, start)
        return path

    def _pair(self, table: KeyPath) -> None:
        start = self.at
        path = (*table, *self._keys())
        self._mark(path, start)
        self.at += 1  # the equals sign
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        # A value ends where a scalar does, or where its bracket closes.
        opening = self._next()
        if opening not in ("{", "["):
            self.at = self._match(_SCALAR).end()
            return
        self.at += 1
        index = 0
        while self._next() not in ("}", "]"):
            if opening == "{":
                self._pair(path)
            else:
                self._mark((*path, index), self.at)
                self._value((*path, index))
                index += 1
        self.at += 1
