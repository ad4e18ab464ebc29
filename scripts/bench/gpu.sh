#!/usr/bin/env bash
# Measure titan on one GPU, in order of value: correctness, speed beside a bare loop, where a step's time goes, the simulator's
# measured profile; then float8, larger blocks, experts, TorchTitan and the rest.
#
#   scripts/bench/gpu.sh [FOLDER]      a call ends within LIMIT_S (540 s); repeat it until it says "complete"
#
# titan need not be installed: the script runs the clone that it lies in. WHEELS names a folder of wheels (wheels.txt beside this
# file lists them) for packages that the machine lacks; they go to FOLDER/site.
#
# Each part leaves FOLDER/PART.log, and FOLDER/PART.done with its exit code and seconds; a part that is done is not
# repeated. RETRY=1 repeats those that failed. ONLY="PART ..." runs these parts alone: ONLY=predict needs no GPU. FOLDER/report.md
# gathers the parts.
#
# If each call gets a new machine: SAVE_TO=DIR packs FOLDER into DIR/state.tar.gz (and, below 15 MB, compiled programs into
# DIR/cache.tar.gz) when a call ends, and RESUME_FROM=DIR unpacks them when one begins.
#
# PYTHON names the interpreter, HARDWARE the profile to start the calibration from (default: the card's own). TINY=1 tries all parts
# on a CPU at tiny sizes, where the figures mean nothing.
set -u
cd "$(dirname "$0")/../.."
FOLDER=${1:-outputs/gpu}
PYTHON=${PYTHON:-python3}
LIMIT_S=${LIMIT_S:-540}
SMALL=1B BLOCKS=8B-blocks EXPERTS=30B-A3B-blocks SIZE=() CURVE=(--flavor debugmodel --batch 8 --seq-len 2048 --dtype bfloat16)
SAVES=(--dim 2048) PROFILED=12 TESTS=(-m gpu tests/gpu)
if [ -n "${TINY:-}" ]; then
  SMALL=tiny BLOCKS=tiny EXPERTS=tiny-experts HARDWARE=cpu SIZE=(--seq-len 64 --warm-up 1 --steps 1) CURVE=(--steps 3) SAVES=(--dim 64)
  TESTS=(tests/models/test_llama3.py)
fi
mkdir -p "$FOLDER"
FOLDER=$(cd "$FOLDER" && pwd)
INCOMPLETE=

unpack() {
  local name
  for name in state cache; do
    [ -f "${RESUME_FROM:-}/$name.tar.gz" ] && tar -xzf "$RESUME_FROM/$name.tar.gz" -C "$FOLDER"
  done
  # Clones of several owners are no reason to stop for git.
  export PYTHONPATH=$PWD:$FOLDER/site${PYTHONPATH:+:$PYTHONPATH} TORCHINDUCTOR_CACHE_DIR=$FOLDER/inductor
}

pack() {
  [ -n "${SAVE_TO:-}" ] || return
  mkdir -p "$SAVE_TO"
  tar -czf "$SAVE_TO/state.tar.gz" -C "$FOLDER" --exclude=./inductor --exclude=./site --exclude='*.pt.trace.json*' \
    --exclude='./*/checkpoint' .
  [ -d "$FOLDER/inductor" ] && tar -czf "$SAVE_TO/cache.tar.gz" -C "$FOLDER" inductor
  [ "$(stat -c %s "$SAVE_TO/cache.tar.gz" 2> /dev/null || echo 0)" -lt 15000000 ] || rm "$SAVE_TO/cache.tar.gz"
  cp "$FOLDER/report.md" "$SAVE_TO/"
}

# part NAME SECONDS COMMAND...: run it unless it is done, if that many seconds are left.
part() {
  local name=$1 needed=$2 left=$((LIMIT_S - SECONDS)) begin=$SECONDS code
  shift 2
  [ -n "${ONLY:-}" ] && [[ " $ONLY " != *" $name "* ]] && return
  if [ -f "$FOLDER/$name.done" ]; then
    { [ -z "${RETRY:-}" ] || grep -q 'exit code 0' "$FOLDER/$name.done"; } && return
    rm "$FOLDER/$name.done"
  fi
  if [ "$left" -lt "$needed" ]; then
    echo "$name: left for the next call ($left s of $needed)"
    INCOMPLETE=1
    return
  fi
  echo "$name ..."
  timeout "$left" "$@" > "$FOLDER/$name.log" 2>&1
  code=$?
  # 124: out of time. steps.py ends earlier by itself, and says what is left.
  if [ "$code" = 124 ] || grep -q 'run the same command again' "$FOLDER/$name.log"; then
    echo "$name: goes on with the next call"
    INCOMPLETE=1
    return
  fi
  echo "$name: exit code $code, $((SECONDS - begin)) s" | tee "$FOLDER/$name.done"
}

# steps NAME MODEL VARIANTS CONTESTANTS ROUNDS
steps() {
  part "$1" 60 "$PYTHON" scripts/bench/steps.py --model "$2" --variants "$3" --against "$4" --rounds "$5" ${RETRY:+--retry} \
    --json "$FOLDER/steps.json" --keep "$FOLDER/runs/$1" --cache "$FOLDER/inductor" --limit-s $((LIMIT_S - SECONDS - 5)) "${SIZE[@]}"
}

machine() {
  if [ -n "${WHEELS:-}" ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$FOLDER/site" "$WHEELS"/*.whl || return
  fi
  nvidia-smi
  "$PYTHON" -c 'import sys, titan.models.llama3, torch
print("torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version(), "Python", sys.version)'
}

profile() {
  local job=$FOLDER/runs/speed-1B/compile-0-titan
  "$PYTHON" -m titan.cli train "$job/job.toml" "$job/titan.toml" --job.dump_folder="$FOLDER/runs/profile" \
    --profiling.enable_profiling --profiling.profile_freq=10 --training.steps=$PROFILED --metrics.log_freq=1 &&
    "$PYTHON" -m titan.cli profile "$FOLDER/runs/profile"
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

report() {
  local done
  echo "# One GPU: $(date -u +%F)"
  for done in machine tests speed-1B profile calibrate float8-1B speed-8B speed-experts peers-1B peers-8B more-1B more-8B more-experts \
    curve saves predict; do
    [ -f "$FOLDER/$done.done" ] || continue
    printf '\n## %s\n\n```text\n' "$(cat "$FOLDER/$done.done")"
    tail -n 60 "$FOLDER/$done.log"
    printf '```\n'
  done
}

export -f machine profile predict
export PYTHON FOLDER PROFILED
unpack
rm -f "$FOLDER/machine.done" # each machine has its own, and gets the wheels
part machine 5 bash -c machine
# The first 9 minutes.
part tests 60 "$PYTHON" -m pytest -q -p no:cacheprovider "${TESTS[@]}"
steps speed-1B $SMALL compile titan,bare 1
part profile 60 bash -c profile
part calibrate 90 "$PYTHON" -m titan.cli sim --calibrate "$FOLDER/profile.toml" ${HARDWARE:+--hardware "$HARDWARE"}
# The second.
steps float8-1B $SMALL eager,compile+float8 titan,bare 1
steps speed-8B $BLOCKS compile,compile+float8 titan,bare 1
steps speed-experts $EXPERTS eager,compile titan 1
# The rest.
steps peers-1B $SMALL compile,eager torchtitan 1
steps peers-8B $BLOCKS compile,compile+sac torchtitan,titan 1
steps more-experts $EXPERTS compile+sac,compile+ac titan 1
steps more-1B $SMALL ac,compile+ac,compile+sac,documents,compile+documents,muon,compile+cudnn,compile+flash titan 1
steps more-8B $BLOCKS eager,ac,compile+ac,muon titan 1
"$PYTHON" -c 'import torchtitan' 2> /dev/null && part curve 120 "$PYTHON" scripts/bench/convergence.py "${CURVE[@]}" --folder "$FOLDER/curve" --picture "$FOLDER/curve.png"
part saves 90 "$PYTHON" scripts/bench/checkpoint.py "${SAVES[@]}"
[ -f "$FOLDER/profile.toml" ] && part predict 60 bash -c predict
report > "$FOLDER/report.md"
pack
[ -z "$INCOMPLETE" ] && echo "complete: $FOLDER/report.md"
exit 0
