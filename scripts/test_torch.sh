#!/usr/bin/env bash
# Run the tests on another torch, before a release: scripts/test_torch.sh 2.11.0 [pytest arguments]
#
# The environment is .venv-torch-VERSION. From PyPI it has torch's CUDA build (5 GB), which needs no driver: fake tensors on "cuda",
# which a CPU build refuses, are tested then, too (tests/parallel/test_fake_cuda.py).
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?usage: scripts/test_torch.sh VERSION [pytest arguments], such as 2.11.0}
shift
. scripts/environment.sh
export TITAN_VENV=${TITAN_VENV:-.venv-torch-$version}
TITAN_CONSTRAINTS=$(mktemp)
export TITAN_CONSTRAINTS
trap 'rm -f "$TITAN_CONSTRAINTS"' EXIT
echo "torch==$version" > "$TITAN_CONSTRAINTS"
prepare_environment dev
"$PYTHON" -m pytest --forks 3 "$@"
