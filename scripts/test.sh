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
echo "types: pyright"
"$bin/pyright" --pythonpath "$PYTHON" > /tmp/titan-pyright.$$ || { cat /tmp/titan-pyright.$$; rm -f /tmp/titan-pyright.$$; exit 1; }
rm -f /tmp/titan-pyright.$$
echo "tests: pytest"
# Two workers; the tests of a file stay on one, since they share fixtures. tests/conftest.py puts long files first.
exec "$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
