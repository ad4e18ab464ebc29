# Sourced by the other scripts: makes a virtual environment with titan in it, or reuses it; sets $PYTHON.
#   prepare_environment EXTRA     installs titan, editable, with an extra of pyproject.toml (demo, dev, ...)
# TITAN_VENV names another folder than .venv.

prepare_environment() {
  local extra=$1 venv=${TITAN_VENV:-.venv} base stamp
  PYTHON=$venv/bin/python
  stamp=$venv/.titan-$extra
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(cksum pyproject.toml constraints.txt)" ]; then
    echo "environment: $venv (ready)"
    return
  fi
  if [ ! -x "$PYTHON" ]; then
    base=$(find_python) || { echo "titan needs Python 3.10 to 3.13, with the venv module" >&2; return 1; }
    echo "environment: making $venv with $("$base" --version)"
    "$base" -m venv "$venv"
  fi
  echo "environment: installing titan[$extra] and what it needs (torch is the large one; once)"
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$extra]"
  cksum pyproject.toml constraints.txt > "$stamp"
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
