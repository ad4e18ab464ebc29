#!/usr/bin/env bash
# Lint, type check and tests, in an environment of its own.   scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
prepare_environment dev

bin=$(dirname "$PYTHON")
echo "lint: ruff"
"$bin/ruff" check .
"$bin/ruff" format --check .
# Types are checked beside the tests, which mostly wait for ranks.
types=$(mktemp)
trap 'kill "$checker" 2> /dev/null || true; rm -f "$types"' EXIT
"$bin/pyright" --pythonpath "$PYTHON" > "$types" &
checker=$!
echo "tests: pytest"
# More workers than the two cores, since ranks wait for each other. The tests of a file stay on one worker: they share
# fixtures. tests/conftest.py puts long files first.
failed=0
"$PYTHON" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" || failed=$?
echo "types: pyright"
wait "$checker" || { cat "$types"; exit 1; }
exit "$failed"
