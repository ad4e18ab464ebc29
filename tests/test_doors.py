"""Each installed part of `titan.extensions` keeps the contract of its kind."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.test_imports import SOURCES
from titan.config.errors import ConfigError
from titan.config.plug_ins import DOORS, load_part, load_plug_in, parts_of, plug_ins

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
PARTS = {e.name: e for e in plug_ins("titan.extensions") if not e.name.startswith("python.")}


def contracts() -> dict[str, type]:
    """Return the contracts of titan's own modules by kind."""
    for module, path in SOURCES.items():
        if "\n@door(" in path.read_text(encoding="utf-8"):
            import_module(module)
    return {kind: contract for contract, kind in DOORS.items()}


def functions(contract: type) -> Iterator[tuple[str, Any]]:
    """Yield the functions that a Protocol names."""
    for name, member in vars(contract).items():
        if inspect.isfunction(member) and (name == "__call__" or not name.startswith("_")):
            yield name, member


def takes(part: Any, asked: Any) -> None:
    """Call a function's signature in each way that its contract allows."""
    _, *every = inspect.signature(asked).parameters.values()
    parameters = [p for p in every if p.kind is not p.VAR_KEYWORD]
    own = inspect.signature(part)
    ordered = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    named = {p.name: 0 for p in parameters if p.kind is p.KEYWORD_ONLY}
    needed = {p.name: 0 for p in parameters if p.default is p.empty}
    own.bind(*ordered, **named)
    if all(p.kind is not p.POSITIONAL_ONLY for p in parameters):
        own.bind(**{p.name: 0 for p in parameters})
        own.bind(**needed)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_keeps_its_contract(name: str) -> None:
    kinds = contracts()
    part = load_plug_in(PARTS[name])
    contract = kinds.get(name) or kinds[name.partition(".")[0]]
    if isinstance(part, type) and contract in part.__mro__:
        assert isinstance(next(parts_of(contract)), contract)
        for member, asked in functions(contract):
            takes(getattr(part(), member), asked)
        return
    assert getattr(contract, "_is_protocol", False), f"{name} is no {contract.__name__}"
    for member, asked in functions(contract):
        takes(part if member == "__call__" else getattr(part, member), asked)
    assert [a for a in vars(contract).get("__annotations__", {}) if not hasattr(part, a)] == []


def test_the_page_has_every_kind() -> None:
    rows = re.findall(r"^\| `([\w.]+)\.NAME` \| \[`(\w+)`\]\(\.\./(\S+)\)", PAGE, re.MULTILINE)
    expected = {
        (kind, contract.__name__, str(inspect.getsourcefile(contract)).removeprefix(f"{ROOT}/"))
        for kind, contract in contracts().items()
    }
    assert {*rows} == expected


def test_no_part_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    contract = contracts()["launch"]
    monkeypatch.setattr("titan.config.plug_ins.plug_ins", lambda *_, **__: [])
    assert load_part(contract) is None


def test_a_part_of_a_base_class_is_a_subclass(monkeypatch: pytest.MonkeyPatch) -> None:
    contract = contracts()["load"]
    monkeypatch.setattr("titan.config.plug_ins.load_plug_in", lambda _: type("Duck", (), {}))
    with pytest.raises(ConfigError, match=r"load\.torchtitan.*is no subclass of LoadExtension"):
        [*parts_of(contract)]
    monkeypatch.setattr(
        "titan.config.plug_ins.load_plug_in", lambda _: type("Own", (contract,), {})
    )
    assert all(isinstance(part, contract) for part in parts_of(contract))
