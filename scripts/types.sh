#!/usr/bin/env bash
# Check types with pyrefly, in the environment that scripts/test.sh makes; prints errors only.
#   scripts/types.sh [files]     these files, or what pyproject.toml names
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${TITAN_VENV:-.venv}/bin
names=$(mktemp)
trap 'rm -f "$names"' EXIT
# models/ is installed as titan.models, which its path does not tell.
"$bin/python" - > "$names" <<'END'
import json
from pathlib import Path

files = {str(file): file.with_suffix("").parts for file in Path("models").rglob("*.py")}
names = {file: ".".join(("titan", *parts)) for file, parts in files.items()}
print(json.dumps({file: name.removesuffix(".__init__") for file, name in names.items()}))
END
"$bin/pyrefly" check --config pyproject.toml --python-interpreter-path "$bin/python" --module-names "$names" \
  --min-severity error --summary=none --output-format min-text "$@"
