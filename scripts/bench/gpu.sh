#!/usr/bin/env bash
# Measure titan on one GPU, in order of value: speed beside a bare loop, the simulator's measured profile, where a step's time goes,
# experts; then tests/gpu, float8, larger blocks, TorchTitan and the rest.
#
#   scripts/bench/gpu.sh [FOLDER]      a call ends within LIMIT_S (540 s); repeat it until it says "complete"
#                                      (GRACE_S, 15 s, later if a part ignores SIGTERM)
#
# titan need not be installed: the script runs the clone that it lies in. WHEELS names a folder of wheels (wheels.txt beside this
# file lists them) for packages that the machine lacks; they go to FOLDER/site. What is missing then is said before the first part.
#
# Each part leaves FOLDER/PART.log, and FOLDER/PART.done with its exit code and seconds; a part that is done is not
# repeated. RETRY=1 repeats those that failed. ONLY="PART ..." runs these parts alone (tests: all of tests-*): ONLY=predict needs no
# GPU. FOLDER/report.md gathers the parts.
#
# A part has a time of its own. One that it does not end in, or that was running when the machine was taken away, was cut: the next call
# tries it again after all others, with all the time that is left. A part that was cut twice is given up.
#
# If each call gets a new machine: SAVE_TO=DIR packs FOLDER into DIR/state.tar.gz (and, below 15 MB, compiled programs into
# DIR/cache.tar.gz) after each part, and every half minute of a long one. RESUME_FROM=DIR unpacks them when a call begins.
#
# PYTHON names the interpreter, HARDWARE the profile to start the calibration from (default: the card's own). TINY=1 tries all parts
# on a CPU at tiny sizes, where the figures mean nothing.
set -u
cd "$(dirname "$0")/../.."
FOLDER=${1:-outputs/gpu}
PYTHON=${PYTHON:-python3}
LIMIT_S=${LIMIT_S:-540}
SMALL=1B BLOCKS=8B-blocks EXPERTS=30B-A3B-blocks HYBRID=80B-A3B-blocks SIZE=() CURVE=(--flavor debugmodel --batch 8 --seq-len 2048 --dtype bfloat16)
# Tests that compile come last: they take longest.
SAVES=(--dim 2048) PROFILED=12 TESTS=($(grep -L compile tests/gpu/test_*.py) $(grep -l compile tests/gpu/test_*.py))
if [ -n "${TINY:-}" ]; then
  SMALL=tiny BLOCKS=tiny EXPERTS=tiny-experts HYBRID=tiny-hybrid HARDWARE=cpu SIZE=(--seq-len 64 --warm-up 1 --steps 1) CURVE=(--steps 3) SAVES=(--dim 64)
  TESTS=(tests/models/test_llama3.py)
fi
mkdir -p "$FOLDER"
FOLDER=$(cd "$FOLDER" && pwd)
INCOMPLETE='' CHILD='' LATER=()

unpack() {
  local name
  for name in state cache; do
    [ -f "${RESUME_FROM:-}/$name.tar.gz" ] && tar -xzf "$RESUME_FROM/$name.tar.gz" -C "$FOLDER"
  done
  # Clones of several owners are no reason to stop for git.
  export PYTHONPATH=$PWD:$FOLDER/site${PYTHONPATH:+:$PYTHONPATH} TORCHINDUCTOR_CACHE_DIR=$FOLDER/inductor
  export TRITON_CACHE_DIR=$FOLDER/inductor/triton # inductor's own choice, and the settings of linear attention's kernels
}

# A new archive takes the place of the old one when it is whole: the machine may go at any time.
archive() {
  tar -czf "$SAVE_TO/$1.part" -C "$FOLDER" "${@:2}" 2> /dev/null
  [ $? -le 1 ] && mv "$SAVE_TO/$1.part" "$SAVE_TO/$1" # 1: a file grew meanwhile
}

# pack [cache]: save the state, and compiled programs that are new.
pack() {
  report > "$FOLDER/report.md"
  [ -n "${SAVE_TO:-}" ] || return
  mkdir -p "$SAVE_TO"
  archive state.tar.gz --exclude=./inductor --exclude=./site --exclude='*.pt.trace.json*' --exclude='./*/checkpoint' .
  cp "$FOLDER/report.md" "$SAVE_TO/"
  [ -n "${1:-}" ] && [ -n "$(find "$FOLDER/inductor" -newer "$FOLDER/inductor.packed" -print -quit 2>&1)" ] || return
  touch "$FOLDER/inductor.packed"
  [ -d "$FOLDER/inductor" ] && archive cache.tar.gz inductor
  [ "$(stat -c %s "$SAVE_TO/cache.tar.gz" 2> /dev/null || echo 0)" -lt 15000000 ] || rm "$SAVE_TO/cache.tar.gz"
}

# Times are for calls of 540 s; shorter and longer ones have shares of them.
share() { echo $(($1 * LIMIT_S < 540 ? 1 : $1 * LIMIT_S / 540)); }

# part NAME LEAST MOST COMMAND...: run it for at most MOST seconds, if at least LEAST are left, unless it is done. @LIMIT@ in the command
# becomes the seconds that it has.
part() {
  local name=$1 cuts=0 least most
  most=$(share "$3") least=$(share "$2")
  [ -n "${ONLY:-}" ] && [[ " $ONLY " != *" $name "* && " $ONLY " != *" ${name%%-test_*} "* ]] && return
  if [ -f "$FOLDER/$name.done" ]; then
    { [ -z "${RETRY:-}" ] || grep -q 'exit code 0' "$FOLDER/$name.done"; } && return
    rm -f "$FOLDER/$name.done" "$FOLDER/$name.cuts"
  fi
  [ -f "$FOLDER/$name.cuts" ] && cuts=$(wc -l < "$FOLDER/$name.cuts")
  case $cuts in
    0) try "$name" "$((least < $2 ? least : $2))" "$most" "${@:4}" ;;
    1) LATER+=("$(printf '%q ' "$@")") ;;
    *) give_up "$name" ;; # the machine went away during the second try
  esac
}

# What was cut in an earlier call: with all the time that is left, if that is more than it had. Else it would end as it did.
try_again() {
  local words arguments had least
  for words in ${LATER[@]+"${LATER[@]}"}; do
    eval "arguments=($words)"
    read -r had < "$FOLDER/${arguments[0]}.cuts"
    least=$((had * 5 / 4 < LIMIT_S * 3 / 4 ? had * 5 / 4 : LIMIT_S * 3 / 4))
    try "${arguments[0]}" "$least" "$LIMIT_S" "${arguments[@]:3}"
  done
  LATER=()
}

give_up() {
  echo "$1: given up, cut twice (it had $(paste -sd, "$FOLDER/$1.cuts") s); RETRY=1 tries it again" | tee "$FOLDER/$1.done"
  rm "$FOLDER/$1.cuts"
}

# try NAME LEAST MOST COMMAND...
try() {
  local name=$1 least=$2 left=$((LIMIT_S - SECONDS)) most begin=$SECONDS packed=$SECONDS code
  most=$(($3 < left ? $3 : left))
  shift 3
  if [ "$left" -lt "$least" ]; then
    echo "$name: left for the next call ($left s of $least)"
    INCOMPLETE=1
    return
  fi
  echo "$name ..."
  # Until it has ended it counts as cut: if the machine is taken away, nobody is left to say so.
  echo "$most" >> "$FOLDER/$name.cuts"
  pack
  timeout -k "${GRACE_S:-15}" "$most" "${@/#@LIMIT@/$((most - 5))}" > "$FOLDER/$name.log" 2>&1 &
  CHILD=$!
  {
    while kill -0 "$CHILD"; do
      sleep 0.2
      ((SECONDS - packed < 30)) || { pack; packed=$SECONDS; }
    done
    wait "$CHILD"
    code=$? CHILD=''
  } 2> /dev/null # bash reports what was killed
  if [ "$code" = 124 ] || { [ "$code" = 137 ] && [ $((SECONDS - begin)) -ge "$most" ]; }; then
    echo "$name: cut after $((SECONDS - begin)) s"
    if [ "$(wc -l < "$FOLDER/$name.cuts")" -ge 2 ]; then give_up "$name"; else INCOMPLETE=1; fi
  elif grep -q 'run the same command again' "$FOLDER/$name.log"; then
    # steps.py ends by itself and says what is left. A call in which none of its runs ended counts as a cut.
    grep -q ' s)$' "$FOLDER/$name.log" && rm "$FOLDER/$name.cuts"
    echo "$name: goes on with the next call"
    INCOMPLETE=1
  else
    rm "$FOLDER/$name.cuts"
    echo "$name: exit code $code, $((SECONDS - begin)) s" | tee "$FOLDER/$name.done"
  fi
  pack cache
}

# The call itself is to end: nothing is left running, and what there is is saved.
stop() {
  [ -n "$CHILD" ] && kill -KILL -- "-$CHILD" 2> /dev/null
  pack cache
  exit 143
}

# steps NAME MODEL VARIANTS CONTESTANTS ROUNDS MOST
steps() {
  part "$1" 60 "$6" "$PYTHON" scripts/bench/steps.py --model "$2" --variants "$3" --against "$4" --rounds "$5" ${RETRY:+--retry} \
    --json "$FOLDER/steps.json" --keep "$FOLDER/runs/$1" --cache "$FOLDER/inductor" --limit-s @LIMIT@ "${SIZE[@]}"
}

# Say which packages are missing; 3 if titan itself cannot run.
packages() {
  if [ -n "${WHEELS:-}" ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$FOLDER/site" "$WHEELS"/*.whl ||
      echo "WHEELS=$WHEELS: not installed"
  fi
  "$PYTHON" -c '
import re, sys
from importlib.util import find_spec
[block] = re.findall(r"^dependencies = \[(.*?)^\]", open("pyproject.toml").read(), re.M | re.S)
rows = re.findall(r"^ *\"([\w-]+)[^;\"]*(;?)", block, re.M)
titan = [name for name, condition in rows if not condition or sys.version_info < (3, 11)]
lacks = lambda names: [name for name in names if not find_spec(name)]
others = {"pytest": "tests", "torchao": "rows with float8", "torchtitan": "peers and curve"}
for name in lacks(others):
    print(f"missing: {name}, which {others[name]} need")
if names := lacks(titan):
    print("missing:", ", ".join(names) + ", without which titan cannot run. Install them, or name a folder of wheels: WHEELS")
    sys.exit(3)
'
}

machine() {
  nvidia-smi
  "$PYTHON" -c 'import sys, titan.models.llama3, torch
print("torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version(), "Python", sys.version)'
}

# profile ROW: where the time of a step of this row's compiled run goes.
profile() {
  local job=$FOLDER/runs/$1/compile-0-titan run=$FOLDER/runs/profile-$1
  "$PYTHON" -m titan.cli train "$job/job.toml" "$job/titan.toml" --job.dump_folder="$run" \
    --profiling.enable_profiling --profiling.profile_freq=10 --training.steps=$PROFILED --metrics.log_freq=1 &&
    "$PYTHON" -m titan.cli profile "$run"
}

# Predict every job that steps.py ran, with the measured profile, and set the run beside it.
predict() {
  local run code=0
  for run in "$FOLDER"/runs/*/*-0-titan; do
    [ -f "$run/metrics.jsonl" ] || continue
    echo "## $run"
    "$PYTHON" -m titan.cli sim "$run/job.toml" "$run/titan.toml" --world-size 1 --hardware "$FOLDER/profile.toml" \
      --measured "$run" --json "$run/predicted.json"
    [ $? = 2 ] && code=2 # 1: the job does not fit
  done
  return $code
}

# The parts in the order in which they ended, the machine first.
report() {
  local name
  echo "# One GPU: $(date -u +%F)"
  for name in machine $(cd "$FOLDER" && ls -tr -- *.done 2> /dev/null | sed 's/\.done$//' | grep -vx machine); do
    [ -f "$FOLDER/$name.done" ] || continue
    printf '\n## %s\n\n```text\n' "$(cat "$FOLDER/$name.done")"
    [ -f "$FOLDER/$name.log" ] && tail -n 60 "$FOLDER/$name.log"
    printf '```\n'
  done
  for name in "$FOLDER"/*.cuts; do
    [ -f "$name" ] && printf '\n## %s: cut or running, to be tried again\n' "$(basename "$name" .cuts)"
  done
}

export -f machine profile predict
export PYTHON FOLDER PROFILED
unpack
packages
[ $? = 3 ] && exit 2
trap stop TERM INT HUP
rm -f "$FOLDER/machine.done" "$FOLDER/machine.cuts" # each machine has its own
card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1)
if [ -f "$FOLDER/card" ] && [ "$(cat "$FOLDER/card")" != "$card" ] && [ -f "$FOLDER/steps.json" ]; then
  before=steps-$(tr -cs 'a-zA-Z0-9\n' - < "$FOLDER/card").json
  echo "this is $card; the figures of $(cat "$FOLDER/card") stay in $before"
  mv "$FOLDER/steps.json" "$FOLDER/$before"
fi
echo "$card" > "$FOLDER/card"
part machine 5 60 bash -c machine
# The first call: what only a GPU can tell.
steps speed-1B $SMALL compile,eager titan,bare 1 300
part calibrate 60 180 "$PYTHON" -m titan.cli sim --calibrate "$FOLDER/profile.toml" ${HARDWARE:+--hardware "$HARDWARE"}
profiled() {
  if [ -f "$FOLDER/$1.done" ]; then part "profile-$1" 45 150 bash -c "profile $1"; elif [ -z "${ONLY:-}" ]; then echo "profile-$1: comes after $1"; INCOMPLETE=1; fi
}
profiled speed-1B
steps speed-experts $EXPERTS eager,compile titan 1 150
profiled speed-experts
# Then whether it computes what a CPU computes.
for file in "${TESTS[@]}"; do
  part "tests-$(basename "$file" .py)" 30 200 "$PYTHON" -m pytest -q -p no:cacheprovider -m "not slow" "$file"
done
# The rest.
[ -n "${TINY:-}" ] || part linear 60 400 "$PYTHON" scripts/bench/linear_attention.py
steps float8-1B $SMALL compile+float8 titan,bare 1 300
steps speed-8B $BLOCKS compile,compile+float8 titan,bare 1 400
steps peers-1B $SMALL compile,eager torchtitan 1 300
steps peers-8B $BLOCKS compile,compile+sac torchtitan,titan 1 400
steps hybrid $HYBRID eager,compile titan 1 400
steps more-experts $EXPERTS compile+sac,compile+ac titan 1 300
steps more-1B $SMALL ac,compile+ac,compile+sac,documents,compile+documents,muon,compile+cudnn,compile+flash titan 1 500
steps more-8B $BLOCKS eager,ac,compile+ac,muon titan 1 400
"$PYTHON" -c 'import torchtitan' > /dev/null 2>&1 && part curve 120 400 "$PYTHON" scripts/bench/convergence.py "${CURVE[@]}" --folder "$FOLDER/curve" --picture "$FOLDER/curve.png"
part saves 90 300 "$PYTHON" scripts/bench/checkpoint.py "${SAVES[@]}"
try_again
# Again as long as there are new runs.
[ -n "$(find "$FOLDER/runs" -name metrics.jsonl -newer "$FOLDER/predict.done" -print -quit 2> /dev/null)" ] && rm "$FOLDER/predict.done"
[ -f "$FOLDER/profile.toml" ] && part predict 60 300 bash -c predict
try_again
pack cache
[ -z "$INCOMPLETE" ] && echo "complete: $FOLDER/report.md"
exit 0
