#!/usr/bin/env bash
# Build the docs as a site in outputs/site; a warning is an error.   scripts/site.sh, or scripts/site.sh serve
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
prepare_environment dev

"$PYTHON" -m mkdocs "${1:-build}" --strict --config-file scripts/site/mkdocs.yml
