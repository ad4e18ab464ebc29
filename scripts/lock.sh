#!/usr/bin/env bash
# Write the lock files: what scripts/demo.sh, the Docker image and scripts/test.sh install besides torch, with hashes, for every Python
# and platform that titan supports. Versions stay as they are, except with --upgrade. Run it, read the diff, run
# scripts/test.sh, commit.   pip install uv; scripts/lock.sh [--upgrade]
set -euo pipefail
cd "$(dirname "$0")/.."
inputs=$(mktemp -d)
trap 'rm -rf "$inputs"' EXIT

# torch comes from where the user gets it (CPU or CUDA), at constraints.txt's version; leave out it and its CUDA libraries,
printf '%s\n' "torch; sys_platform == 'never'" "triton; sys_platform == 'never'" > "$inputs/overrides.txt"
# but lock the rest of what it needs, and what builds titan.
printf '%s\n' filelock 'typing-extensions>=4.10' sympy networkx jinja2 fsspec 'setuptools>=77' > "$inputs/torch.in"

for extra in demo image dev; do
  uv pip compile pyproject.toml "$inputs/torch.in" --extra "$extra" --universal --python-version 3.10 --generate-hashes "$@" \
    --overrides "$inputs/overrides.txt" --no-emit-package torch --no-emit-package triton \
    --no-annotate --no-header --quiet --output-file "scripts/requirements-$extra.lock"
done
