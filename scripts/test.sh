#!/usr/bin/env bash
# Lint, type check and tests, in an environment of its own.
#   scripts/test.sh [pytest arguments]     the default lane, or the tests that are named
#   scripts/test.sh --quick                for every save: lint, and the tests without ranks and processes
#   scripts/test.sh --full                 every test that needs no accelerator and is not marked slow
# Tests beside other programs (TorchTitan, ...) run after scripts/judges.sh.
# tests/lanes.toml says which test is in which lane. The default lane draws some of the dear tests by the commit, and prints them.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
lane=()
case ${1:-} in
  --quick | --full) lane=(--lane "${1#--}"); shift ;;
esac
prepare_environment dev

bin=$(dirname "$PYTHON")
echo "lint: ruff"
"$bin/ruff" check .
"$bin/ruff" format --check .
# Types are checked beside the tests, which mostly wait for ranks.
types=$(mktemp)
checker=
trap '[ -z "$checker" ] || kill "$checker" 2> /dev/null || true; rm -f "$types"' EXIT
if [ "${lane[*]}" != "--lane quick" ]; then
  scripts/types.sh > "$types" 2>&1 &
  checker=$!
fi
echo "tests: pytest"
# More forks than the two cores, since ranks wait for each other. The tests of a file stay in one fork: they share
# fixtures. conftest.py puts long files first.
failed=0
forks=3
[ "${lane[*]}" != "--lane quick" ] || forks=0
"$PYTHON" -m pytest --forks "$forks" --durations=40 --durations-min=2 \
  "${lane[@]}" "$@" || failed=$?
if [ -n "$checker" ]; then
  echo "types: pyrefly"
  wait "$checker" || { cat "$types"; exit 1; }
fi
exit "$failed"
