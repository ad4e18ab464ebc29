#!/usr/bin/env bash
# Build the docs as a site in outputs/site; a warning is an error.   scripts/site.sh, or scripts/site.sh serve
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
prepare_environment dev

# Pages link to the repository, if this clone came from an address that browsers know.
origin="$(git remote get-url origin 2>/dev/null || true)"
case "$origin" in https://*@*) ;; https://*) export TITAN_REPO_URL="${TITAN_REPO_URL:-${origin%.git}}" ;; esac

"$PYTHON" -m mkdocs "${1:-build}" --strict --config-file scripts/site/mkdocs.yml
