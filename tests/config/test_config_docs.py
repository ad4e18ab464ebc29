"""The generated pages are those that the config classes make, and the schema admits what loads."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from titan.config.load import load_config
from titan.config.render import json_schema
from titan.config.schema import JobConfig

ROOT = Path(__file__).resolve().parents[2]
GEN_DOCS = runpy.run_path(str(ROOT / "scripts" / "gen_docs.py"))


def test_generated_pages_are_fresh() -> None:
    generated = GEN_DOCS["generated"]()
    stale = [
        path.name
        for path, content in generated.items()
        if path.read_text(encoding="utf-8") != content
    ]
    assert not stale, "run python scripts/gen_docs.py"


def test_reference_names_every_key_with_its_meaning() -> None:
    page = GEN_DOCS["reference_markdown"]()
    for name in JobConfig.model_fields:
        assert f"[{name}" in page
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 120
    assert [row for row in rows if row.rstrip(" |").endswith("|")] == []  # no meaning is empty
    assert "| `lr` | number > 0 | `0.0008` | Peak learning rate. |" in page
    assert "| `path` | text | required |" in page


@pytest.mark.parametrize(
    "job", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda p: p.stem
)
def test_schema_admits_shipped_jobs(job: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    set_keys = load_config(job).model_dump(exclude_unset=True)
    jsonschema.Draft202012Validator(json_schema()).validate(json.loads(json.dumps(set_keys)))


def test_schema_refuses_unknown_keys_and_describes_known_ones() -> None:
    schema = json_schema()
    assert schema["additionalProperties"] is False
    training = schema["$defs"]["TrainingSection"]
    assert training["properties"]["seq_len"]["description"] == "Tokens in each sequence."
    assert training["additionalProperties"] is False
    assert "anyOf" in schema["properties"]["optimizer"]
