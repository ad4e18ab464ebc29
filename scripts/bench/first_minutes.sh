#!/usr/bin/env bash
# Time the README's two commands, each in a fresh clone without an environment, and write the minutes into the README.
#   scripts/bench/first_minutes.sh [TIMES]     default: 3 of each, on idle cores; the median counts
set -euo pipefail
cd "$(dirname "$0")/../.."
times=${1:-3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for name in demo test; do
  for ((n = 1; n <= times; n++)); do
    git clone --quiet . "$folder/$name$n"
    began=$SECONDS
    TITAN_VENV=.venv bash "$folder/$name$n/scripts/$name.sh" > "$folder/$name$n.log" 2>&1 || echo "$name.sh $n failed" >&2
    echo $((SECONDS - began)) >> "$folder/$name"
    grep -hE '^(environment: .* ready|That took|[0-9=]* ?.*(passed|failed) in )' "$folder/$name$n.log" || true
    rm -rf "$folder/$name$n"
  done
  seconds=$(sort -n "$folder/$name" | sed -n "$(((times + 1) / 2))p")
  echo "$name.sh: $(paste -sd ' ' "$folder/$name") s; median $seconds"
  sed -i -E "s/^(scripts\/$name\.sh .*: )[0-9]+ minutes?/\1$(((seconds + 59) / 60)) minutes/" README.md
done
