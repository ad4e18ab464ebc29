# Sourced by the other scripts: makes a virtual environment with titan in it, or reuses it; sets $PYTHON.
#   prepare_environment EXTRA     installs titan, editable, with an extra that has a lock file: demo or dev (scripts/lock.sh)
# TITAN_VENV names another folder than .venv, TITAN_CONSTRAINTS another file than constraints.txt (with another torch).

prepare_environment() {
  local extra=$1 venv=${TITAN_VENV:-.venv} constraints=${TITAN_CONSTRAINTS:-constraints.txt} lock base stamp sum began=$SECONDS
  PYTHON=$venv/bin/python
  lock=scripts/requirements-$extra.lock
  stamp=$venv/.titan-$extra
  sum=$(cat pyproject.toml "$constraints" "$lock" | cksum)
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$sum" ]; then
    echo "environment: $venv (ready)"
    return
  fi
  if [ ! -x "$PYTHON" ]; then
    base=$(find_python) || { echo "titan needs Python 3.10 to 3.13, with the venv module" >&2; return 1; }
    echo "environment: making $venv with $("$base" --version)"
    "$base" -m venv "$venv"
  fi
  echo "environment: 1 of 3, the packages of $lock, checked against their hashes (one to three minutes, once)"
  install --require-hashes --no-deps --requirement "$lock"
  echo "environment: 2 of 3, torch (200 MB for CPUs, 3 GB with CUDA; the longest)"
  if [ -t 1 ]; then # pip's own progress bar
    "$PYTHON" -m pip install --disable-pip-version-check --constraint "$constraints" torch
  else
    install --constraint "$constraints" torch
  fi
  echo "environment: 3 of 3, titan itself, editable"
  install --no-deps --no-build-isolation --editable .
  echo "$sum" > "$stamp"
  echo "environment: $venv is ready after $((SECONDS - began)) s; to use it: source $venv/bin/activate"
}

# pip, with a line for each file that it fetches and none for what is there already.
install() {
  "$PYTHON" -m pip install --disable-pip-version-check --progress-bar off "$@" |
    { grep --line-buffered -oE '^ *(Downloading|Processing|Using cached) .*|^Installing collected' || true; }
}

find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11 python3.10 python; do
    if command -v "$name" > /dev/null &&
      "$name" -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null; then
      echo "$name"
      return
    fi
  done
  return 1
}
