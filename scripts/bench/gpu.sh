#!/usr/bin/env bash
# Measure titan on one GPU, in order of value: correctness, speed against TorchTitan and a bare loop, where a step's time
# goes, and the simulator's predictions.
#
#   scripts/bench/gpu.sh [FOLDER]      a call ends within LIMIT_S (540 s); repeat it until it says "complete"
#
# Each part leaves FOLDER/PART.log, and FOLDER/PART.done with its exit code and seconds; a part that is done is not
# repeated. FOLDER/report.md gathers them. PYTHON names the interpreter, HARDWARE the profile to compare with. TINY=1 tries
# it on a CPU at tiny sizes, where the figures mean nothing.
set -u
cd "$(dirname "$0")/../.."
FOLDER=${1:-outputs/gpu}
PYTHON=${PYTHON:-python3}
LIMIT_S=${LIMIT_S:-540}
HARDWARE=${HARDWARE:-h100-sxm}
SMALL=1B BLOCKS=8B-blocks SIZE=() CURVE=(--flavor debugmodel --batch 8 --seq-len 2048 --dtype bfloat16)
if [ -n "${TINY:-}" ]; then
  SMALL=tiny BLOCKS=debugmodel HARDWARE=cpu SIZE=(--seq-len 64 --warm-up 2 --steps 4) CURVE=(--steps 100)
fi
mkdir -p "$FOLDER"
INCOMPLETE=

# part NAME SECONDS COMMAND...: run it unless it is done, if that many seconds are left.
part() {
  local name=$1 needed=$2 left=$((LIMIT_S - SECONDS)) begin=$SECONDS code
  shift 2
  [ -f "$FOLDER/$name.done" ] && return
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
  part "$1" 60 "$PYTHON" scripts/bench/steps.py --model "$2" --variants "$3" --against "$4" --rounds "$5" \
    --json "$FOLDER/steps.json" --keep "$FOLDER/runs/$1" --limit-s $((LIMIT_S - SECONDS - 5)) "${SIZE[@]}"
}

machine() {
  nvidia-smi
  "$PYTHON" -c 'import torch, sys; print("torch", torch.__version__, "CUDA", torch.version.cuda, "Python", sys.version)'
}

profile() {
  local job=$FOLDER/runs/speed-1B/compile-0-titan
  "$PYTHON" -m titan.cli train "$job/job.toml" "$job/titan.toml" --job.dump_folder="$FOLDER/runs/profile" \
    --profiling.enable_profiling --profiling.profile_freq=10 --training.steps=12 --metrics.log_freq=1 &&
    "$PYTHON" -m titan.cli profile "$FOLDER/runs/profile"
}

# Predict every job that steps.py ran, with the measured profile, and set the run beside it.
predict() {
  local run code=0
  for run in "$FOLDER"/runs/speed-*/*-0-titan; do
    [ -f "$run/metrics.jsonl" ] || continue
    echo "## $run"
    "$PYTHON" -m titan.cli sim "$run/job.toml" "$run/titan.toml" --world-size 1 --hardware "$FOLDER/profile.toml" \
      --measured "$run" --json "$run/predicted.json" || code=1
  done
  return $code
}

report() {
  local log
  echo "# One GPU: $(date -u +%F)"
  for log in machine tests speed-1B speed-8B-blocks profile calibrate predict more-1B more-8B-blocks curve saves; do
    [ -f "$FOLDER/$log.done" ] || continue
    printf '\n## %s\n\n```text\n' "$(cat "$FOLDER/$log.done")"
    tail -n 60 "$FOLDER/$log.log"
    printf '```\n'
  done
}

export -f machine profile predict
export PYTHON FOLDER
part machine 5 bash -c machine
part tests 120 "$PYTHON" -m pytest -q -m gpu tests/gpu
steps speed-1B $SMALL eager,compile,compile+float8 titan,torchtitan,bare 2
steps speed-8B-blocks $BLOCKS eager,compile,compile+sac,compile+float8 titan,torchtitan,bare 2
part profile 60 bash -c profile
part calibrate 90 "$PYTHON" -m titan.cli sim --calibrate "$FOLDER/profile.toml" --hardware "$HARDWARE"
steps more-1B $SMALL ac,compile+ac,compile+sac,documents,compile+documents,muon,compile+cudnn,compile+flash titan 1
steps more-8B-blocks $BLOCKS ac,compile+ac,muon titan 1
part curve 120 "$PYTHON" scripts/bench/convergence.py "${CURVE[@]}" --folder "$FOLDER/curve" --picture "$FOLDER/curve.png"
part saves 90 "$PYTHON" scripts/bench/checkpoint.py --dim 2048
[ -f "$FOLDER/profile.toml" ] && part predict 60 bash -c predict
report > "$FOLDER/report.md"
[ -z "$INCOMPLETE" ] && echo "complete: $FOLDER/report.md"
exit 0
