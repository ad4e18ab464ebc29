# Sourced by the other scripts: makes a virtual environment with titan in it, or reuses it; sets $PYTHON.
#   prepare_environment EXTRA     installs titan, editable, with an extra that has a lock file: demo or dev (scripts/lock.sh)
# TITAN_VENV names another folder than .venv, TITAN_CONSTRAINTS another file than constraints.txt (with another torch).

unset PYTHONDONTWRITEBYTECODE # each process would compile torch

prepare_environment() {
  local extra=$1 venv=${TITAN_VENV:-.venv} constraints=${TITAN_CONSTRAINTS:-constraints.txt} lock base stamp sum torch began=$SECONDS
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
    if command -v uv > /dev/null; then
      uv venv --quiet --seed --python "$base" "$venv"
    else
      "$base" -m venv "$venv"
    fi
  fi
  echo "environment: 1 of 2, torch (200 MB for CPUs, 3 GB with CUDA) and the packages of $lock, at once"
  # torch's dependencies are in the lock file, but for CUDA's. It is compiled while other packages are fetched; a few of its
  # files are for a newer Python.
  {
    install --no-deps --constraint "$constraints" torch || exit 1
    "$PYTHON" -m compileall -qq "$venv"/lib/python*/site-packages/torch || true
  } &
  torch=$!
  install --require-hashes --no-deps --requirement "$lock" || { wait "$torch"; return 1; }
  wait "$torch"
  echo "environment: 2 of 2, titan itself, editable, and what of CUDA torch asks for"
  install --constraint "$constraints" --no-build-isolation --editable .
  echo "$sum" > "$stamp"
  echo "environment: $venv is ready after $((SECONDS - began)) s; to use it: source $venv/bin/activate"
}

# uv where it is installed, else pip. Modules are compiled when they are imported: of most packages few are.
install() {
  if command -v uv > /dev/null; then
    uv pip install --quiet --python "$PYTHON" "$@"
  else
    # A line for each file that is fetched, and none for what is there already.
    "$PYTHON" -m pip install --disable-pip-version-check --progress-bar off --no-compile "$@" |
      { grep --line-buffered -oE '^ *(Downloading|Processing|Using cached) .*|^Installing collected' || true; }
  fi
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
