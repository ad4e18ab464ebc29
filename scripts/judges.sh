#!/usr/bin/env bash
# Install other people's programs that tests compare titan with, into the test environment: TorchTitan, lm-evaluation-harness and
# flash-linear-attention. They are in no lock file. Without them these tests are skipped, and pytest's last lines name them.
#   scripts/judges.sh && scripts/test.sh --full
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
prepare_environment dev

kept=$(mktemp)
trap 'rm -f "$kept"' EXIT
"$PYTHON" -m pip freeze --exclude-editable > "$kept" # no judge changes another package
install --constraint "$kept" "lm-eval>=0.4.9" accelerate einops tyro tomli torchdata
# Without what their kernels need, such as Triton: the tests use their models and references, which are plain torch.
install --no-deps torchtitan==0.2.2 "fla-core>=0.6"
