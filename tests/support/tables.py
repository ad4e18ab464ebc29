"""Tables of tests, as data beside them: `table(__file__, "name")` is "name" of test_x.json for test_x.py."""

import json
from pathlib import Path
from typing import Any


def table(file: str, name: str) -> Any:
    return json.loads(Path(file).with_suffix(".json").read_text(encoding="utf-8"))[name]
