#!/usr/bin/env bash
# Measure titan on one GPU, in order of value: kernels; pairs of titan and an earlier commit; TorchTitan; a profile; accumulated
# micro-batches; the bare loop; tests/gpu; then the simulator's measured profile, experts, hybrids and the rest.
#
#   scripts/bench/gpu.sh [FOLDER]      a call ends within LIMIT_S (540 s); repeat it until it says "complete"
#                                      (GRACE_S, 15 s, later if a part ignores SIGTERM)
#   scripts/bench/gpu.sh --plan [FOLDER]   run nothing; list the parts that are not done, in order, with their seconds (or PLAN=1)
#
# titan need not be installed: the script runs the clone that it lies in. WHEELS names a folder of wheels (wheels.txt beside this
# file lists them) for packages that the machine lacks; they go to FOLDER/site. What is missing then is said before the first part,
# and parts that need it are left out. BEFORE names a folder with titan/ and models/ of an earlier commit, for the pairs:
#
#   git archive COMMIT titan models | tar -x -C BEFORE
#
# Each part leaves FOLDER/PART.log, and FOLDER/PART.done with its exit code and seconds; a part that is done is not
# repeated. RETRY=1 repeats those that failed. ONLY="PART ..." runs these parts alone (tests: all of tests-*): ONLY=predict needs no
# GPU. FOLDER/report.md gathers the parts.
#
# A part has a time of its own. One that it does not end in, or that was running when the machine was taken away, was cut: the next call
# tries it again after all others, with all the time that is left. A part that was cut twice is given up.
#
# If each call gets a new machine: SAVE_TO=DIR packs FOLDER into DIR/state.tar.gz (and, below 15 MB each, compiled programs into
# DIR/cache.tar.gz and profiler traces into DIR/traces.tar.gz) after each part, and every half minute of a long one. RESUME_FROM=DIR
# unpacks state and cache when a call begins.
#
# PYTHON names the interpreter, HARDWARE the profile of the predictions (default: the card's own). TINY=1 tries all parts
# on a CPU at tiny sizes, where the figures mean nothing.
set -u
cd "$(dirname "$0")/../.."
[ "${1:-}" = --plan ] && PLAN=1 && shift
FOLDER=${1:-outputs/gpu}
PYTHON=${PYTHON:-python3}
LIMIT_S=${LIMIT_S:-540}
SMALL=1B BLOCKS=8B-blocks EXPERTS=30B-A3B-blocks HYBRID=80B-A3B-blocks CURVE=(--flavor debugmodel --batch 8 --seq-len 2048 --dtype bfloat16)
# Two windows of five steps: a start takes 12 s and a compilation 15 to 50, so that more steps would cost other rows their place.
SIZE=(--warm-up 5 --steps 10) LONG=(--warm-up 5 --steps 5) SAVES=(--dim 2048) PROFILED=12 KERNELS=()
FIRST=tests/gpu/test_cuda_memory.py LAST=tests/gpu/test_cuda_linear_attention.py
others=$(printf '%s\n' tests/gpu/test_*.py | grep -vx -e $FIRST -e $LAST)
# Tests that compile take longest.
TESTS=($FIRST $(grep -L compile $others) $(grep -l compile $others) $LAST)
if [ -n "${TINY:-}" ]; then
  SMALL=tiny BLOCKS=tiny-blocks EXPERTS=tiny-experts HYBRID=tiny-hybrid HARDWARE=cpu CURVE=(--steps 3) SAVES=(--dim 64) KERNELS=(--tiny)
  SIZE=(--seq-len 64 --warm-up 1 --steps 1) LONG=("${SIZE[@]}")
  TESTS=(tests/models/test_llama3.py)
fi
if [ -z "${PLAN:-}" ]; then
  mkdir -p "$FOLDER"
  FOLDER=$(cd "$FOLDER" && pwd)
fi
INCOMPLETE='' CHILD='' LATER=() LEFT_OUT='' SUM=0

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

# archive_small NAME FILE...: an archive for the way back from a lent machine, which takes files of 16 MiB at most.
archive_small() {
  archive "$@"
  [ "$(stat -c %s "$SAVE_TO/$1" 2> /dev/null || echo 0)" -lt 15000000 ] || rm "$SAVE_TO/$1"
}

# pack [cache]: save the state, and compiled programs that are new.
pack() {
  local traces=()
  report > "$FOLDER/report.md"
  [ -n "${SAVE_TO:-}" ] || return
  mkdir -p "$SAVE_TO"
  archive state.tar.gz --exclude=./inductor --exclude=./site --exclude='*/traces/*' --exclude='./*/checkpoint' .
  cp "$FOLDER/report.md" "$SAVE_TO/"
  [ -n "${1:-}" ] || return
  mapfile -t traces < <(cd "$FOLDER" && find runs -path '*/traces/*' -type f 2> /dev/null)
  [ ${#traces[@]} = 0 ] || archive_small traces.tar.gz "${traces[@]}"
  [ -n "$(find "$FOLDER/inductor" -newer "$FOLDER/inductor.packed" -print -quit 2>&1)" ] || return
  touch "$FOLDER/inductor.packed"
  [ -d "$FOLDER/inductor" ] && archive_small cache.tar.gz inductor
}

# Times are for calls of 540 s; shorter and longer ones have shares of them.
share() { echo $(($1 * LIMIT_S < 540 ? 1 : $1 * LIMIT_S / 540)); }

wanted() { [ -z "${ONLY:-}" ] || [[ " $ONLY " == *" $1 "* || " $ONLY " == *" ${1%%-test_*} "* ]]; }

# lacks PACKAGE: whether `packages` named it.
lacks() { [[ "$MISSING" == *"missing: $1, which"* ]]; }

# leave_out NAME WHY: a part that cannot run here takes no time, and is no reason to call again.
leave_out() {
  wanted "$1" || return
  echo "$1: left out: $2"
  LEFT_OUT+="$1: left out: $2"$'\n'
}

# part NAME LEAST EXPECTED MOST COMMAND...: run it for at most MOST seconds, if at least LEAST are left, unless it is done. In a short
# call it may take EXPECTED, up to 3/5 of the call. @LIMIT@ in the command becomes the seconds that it has.
part() {
  local name=$1 cuts=0 least most expected
  most=$(share "$4") least=$(share "$2")
  least=$((least < $2 ? least : $2)) expected=$(($3 < LIMIT_S * 3 / 5 ? $3 : LIMIT_S * 3 / 5))
  most=$((most < expected ? expected : most))
  wanted "$name" || return
  if [ -f "$FOLDER/$name.done" ]; then
    { [ -z "${RETRY:-}" ] || grep -q 'exit code 0' "$FOLDER/$name.done"; } && return
  fi
  if [ -n "${PLAN:-}" ]; then
    SUM=$((SUM + $3))
    printf '%-30s %5s %5s %8s %5s\n' "$name" "$least" "$most" "$3" "$SUM"
    return
  fi
  [ -f "$FOLDER/$name.done" ] && rm -f "$FOLDER/$name.done" "$FOLDER/$name.cuts"
  [ -f "$FOLDER/$name.cuts" ] && cuts=$(wc -l < "$FOLDER/$name.cuts")
  case $cuts in
    0) try "$name" "$least" "$most" "${@:5}" ;;
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
    try "${arguments[0]}" "$least" "$LIMIT_S" "${arguments[@]:4}"
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

# steps NAME MODEL VARIANTS CONTESTANTS EXPECTED MOST [OPTION...]: rows of these contestants, without those that cannot run here. EXPECTED
# has seconds for each contestant.
steps() {
  local name against=() seconds=0 expected=(${5//,/ }) options=("${SIZE[@]}")
  [ $# -gt 6 ] && options=("${@:7}")
  for name in ${4//,/ }; do
    if { [ "$name" = before ] && [ -z "${BEFORE:-}" ]; } || { [ "$name" = torchtitan ] && lacks torchtitan; }; then :; else
      against+=("$name")
      seconds=$((seconds + expected[0]))
    fi
    expected=("${expected[@]:1}")
  done
  [ ${#against[@]} = 0 ] && { leave_out "$1" "$4 is not installed"; return; }
  [[ $3 == *float8* ]] && lacks torchao && { leave_out "$1" "torchao is not installed"; return; }
  part "$1" 30 "$seconds" "$6" "$PYTHON" scripts/bench/steps.py --model "$2" --variants "$3" --against "$(IFS=,; echo "${against[*]}")" \
    --rounds "${ROUNDS:-1}" ${RETRY:+--retry} --json "$FOLDER/steps.json" --keep "$FOLDER/runs/$1" --cache "$FOLDER/inductor" \
    --limit-s @LIMIT@ "${options[@]}"
}

# Say which packages are missing; 3 if titan itself cannot run.
packages() {
  if [ -n "${WHEELS:-}" ] && [ -n "${PLAN:-}" ]; then
    export PYTHONPATH=$(printf '%s:' "$WHEELS"/*.whl)${PYTHONPATH:-} # a wheel can be searched as it is
  elif [ -n "${WHEELS:-}" ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$FOLDER/site" "$WHEELS"/*.whl ||
      echo "WHEELS=$WHEELS: not installed"
  fi
  "$PYTHON" -c '
import re, sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

def has(name):
    try:
        return find_spec(name) is not None
    except ImportError:  # of the package around it
        return False

[block] = re.findall(r"^dependencies = \[(.*?)^\]", open("pyproject.toml").read(), re.M | re.S)
rows = re.findall(r"^ *\"([\w-]+)[^;\"]*(;?)", block, re.M)
titan = [name for name, condition in rows if not condition or sys.version_info < (3, 11)]
others = {"pytest": "tests", "torchao": "rows with float8", "fla": "linear", "flash_attn_interface": "rows with fa3"}
for name in others:
    if not has(name):
        print(f"missing: {name}, which {others[name]} need")
if not all(map(has, ["torchtitan", "torchdata", "datasets", "tyro"])):
    print("missing: torchtitan, which peers and curve need (wheels.txt)")
oldest = re.search(r"^OLDEST, \w+ = \((\d+), (\d+)\)", open("titan/contrib/transformers/resolve.py").read(), re.M).groups()
try:
    found = version("transformers")
except PackageNotFoundError:
    found = "0.0"
if [*map(int, found.split(".")[:2])] < [*map(int, oldest)]:
    print("missing: transformers, which hybrid needs from", ".".join(oldest), "on; here is", found)
if names := [name for name in titan if not has(name)]:
    print("missing:", ", ".join(names) + ", without which titan cannot run. Install them, or name a folder of wheels: WHEELS")
    sys.exit(3)
'
}

machine() {
  nvidia-smi
  nvidia-smi --query-gpu=name,power.limit,clocks.sm,clocks.max.sm,clocks.mem --format=csv
  "$PYTHON" -c 'import sys, titan.models.llama3, torch
print("torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version(), "Python", sys.version)'
}

# profile ROW VARIANT: where the time of a step of this row's run goes. With shapes, the trace can correct the simulator's profile.
profile() {
  local job=$FOLDER/runs/$1/$2-0-titan run=$FOLDER/runs/profile-$1
  "$PYTHON" -m titan.cli train "$job/job.toml" "$job/titan.toml" --job.dump_folder="$run" --profiling.enable_profiling \
    --profiling.record_shapes --profiling.profile_freq=10 --training.steps=$PROFILED --metrics.log_freq=1 &&
    "$PYTHON" -m titan.cli profile "$run"
}

# Predict every job that steps.py ran, and set the run beside it.
predict() {
  local run code=0 card=${HARDWARE:-}
  [ -n "$card" ] || card=$("$PYTHON" -c 'import torch; from titan.base.hardware import recognise; print(recognise(torch.cuda.get_device_name()).name)')
  for run in "$FOLDER"/runs/*/*-0-titan; do
    [ -f "$run/metrics.jsonl" ] || continue
    echo "## $run"
    "$PYTHON" -m titan.cli sim "$run/job.toml" "$run/titan.toml" --world-size 1 --hardware "$card" \
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
    [ -f "$FOLDER/$name.log" ] && tail -n 90 "$FOLDER/$name.log"
    printf '```\n'
  done
  [ -z "$LEFT_OUT" ] || printf '\n## Left out\n\n%s' "$LEFT_OUT"
  for name in "$FOLDER"/*.cuts; do
    [ -f "$name" ] && printf '\n## %s: cut or running, to be tried again\n' "$(basename "$name" .cuts)"
  done
}

export -f machine profile predict
export PYTHON FOLDER PROFILED HARDWARE
[ -n "${PLAN:-}" ] || unpack
MISSING=$(packages)
code=$?
[ -z "$MISSING" ] || echo "$MISSING"
[ $code = 3 ] && exit 2
if [ -n "${BEFORE:-}" ]; then
  BEFORE=$(cd "$BEFORE" 2> /dev/null && [ -d titan ] && [ -d models ] && pwd) || { echo "BEFORE: no folder with titan/ and models/"; exit 2; }
  export BEFORE
else
  echo "before: left out of the pairs: BEFORE names no folder of an earlier commit"
fi
if [ -n "${PLAN:-}" ]; then
  printf '%-30s %5s %5s %8s %5s\n' part least most expected sum
else
  trap stop TERM INT HUP
  rm -f "$FOLDER/machine.done" "$FOLDER/machine.cuts" # each machine has its own
  card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1)
  if [ -f "$FOLDER/card" ] && [ "$(cat "$FOLDER/card")" != "$card" ] && [ -f "$FOLDER/steps.json" ]; then
    before=steps-$(tr -cs 'a-zA-Z0-9\n' - < "$FOLDER/card").json
    echo "this is $card; the figures of $(cat "$FOLDER/card") stay in $before"
    mv "$FOLDER/steps.json" "$FOLDER/$before"
  fi
  echo "$card" > "$FOLDER/card"
fi
profiled() { # ROW VARIANT
  if [[ $LEFT_OUT == *"$1: left out"* ]]; then
    leave_out "profile-$1" "as $1 is"
  elif [ -n "${PLAN:-}" ] || [ -f "$FOLDER/$1.done" ]; then
    part "profile-$1" 40 50 150 bash -c "profile $1 $2"
  elif [ -z "${ONLY:-}" ]; then
    echo "profile-$1: comes after $1"
    INCOMPLETE=1
  fi
}

# Expected seconds are of one H100 with torch 2.11: a start 12 s, a compilation 15 to 50 (what an earlier row compiled is in the cache), a
# step 0.25 to 0.32. The first call of 540 s: what only a GPU decides, and pairs on one card.
part machine 5 6 60 bash -c machine
part kernels 40 60 100 "$PYTHON" scripts/bench/gpu_kernels.py --json "$FOLDER/kernels.json" "${KERNELS[@]}"
steps pair-8B $BLOCKS compile titan,before 33,25 200
steps pair-8B-float8 $BLOCKS compile+float8 titan,before 45,33 200
steps pair-1B $SMALL compile titan,before 38,30 200
steps peers-8B $BLOCKS compile torchtitan 39 150
steps peers-8B-float8 $BLOCKS compile+float8 torchtitan 46 150
steps peers-1B $SMALL compile torchtitan 38 150
profiled pair-8B-float8 compile+float8
steps accumulated-8B $BLOCKS compile+accumulate4 titan,torchtitan 38,44 250 "${LONG[@]}"
# The second call, of 150 s.
steps rows-1B-float8 $SMALL compile+float8 titan,torchtitan 42,42 250
steps bare-8B $BLOCKS compile bare 62 200
steps bare-1B $SMALL compile bare 66 200
steps chunks-1B $SMALL compile+chunk8192 titan 36 120
if lacks flash_attn_interface; then leave_out attention-1B "flash_attn_interface (FlashAttention 3) is not installed"; else
  steps attention-1B $SMALL compile+fa3 titan 36 120
fi
# Then whether it computes what a CPU computes. At SIGTERM pytest prints the failures so far, as at control-C.
RUN_TESTS='import signal, sys, pytest; signal.signal(signal.SIGTERM, signal.default_int_handler); sys.exit(pytest.main(sys.argv[1:]))'
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
for file in "${TESTS[@]}"; do
  name=tests-$(basename "$file" .py)
  if lacks pytest; then leave_out "$name" "pytest is not installed"; elif [ "$name" = tests-test_two_gpus ] && [ "$gpus" -lt 2 ]; then
    leave_out "$name" "GPUs here: $gpus"
  else
    part "$name" 20 "$(grep -q compile "$file" && echo 90 || echo 30)" 200 "$PYTHON" -c "$RUN_TESTS" -q -p no:cacheprovider -m "not slow" "$file"
  fi
done
# The rest.
steps speed-1B $SMALL eager titan,torchtitan,bare 30,30,30 300
profiled pair-1B compile
steps speed-experts $EXPERTS eager,compile titan 75 150
profiled speed-experts compile
if lacks transformers; then leave_out hybrid "transformers is too old"; else steps hybrid $HYBRID eager,compile titan 120 400; fi
steps more-experts $EXPERTS compile+sac,compile+ac titan 100 300
steps more-1B $SMALL ac,compile+ac,compile+sac,documents,compile+documents,muon titan 250 500
[ -n "${TINY:-}" ] || steps kernels-1B $SMALL compile+cudnn,compile+flash titan 70 200
steps more-8B $BLOCKS eager,ac,compile+ac,compile+sac,muon titan 180 400
steps bare-float8 $SMALL compile+float8 bare 70 200
if [ -n "${TINY:-}" ]; then :; elif lacks fla; then leave_out linear "flash-linear-attention is not installed"; else
  part linear 60 300 400 "$PYTHON" scripts/bench/linear_attention.py
fi
if lacks torchtitan; then leave_out curve "torchtitan is not installed"; else
  part curve 120 250 400 "$PYTHON" scripts/bench/convergence.py "${CURVE[@]}" --folder "$FOLDER/curve" --picture "$FOLDER/curve.png"
fi
part saves 90 150 300 "$PYTHON" scripts/bench/checkpoint.py "${SAVES[@]}"
if [ -n "${PLAN:-}" ]; then
  [ -f "$FOLDER/predict.done" ] || part predict 60 60 300 bash -c predict
  exit 0
fi
try_again
# Again as long as there are new runs.
[ -n "$(find "$FOLDER/runs" -name metrics.jsonl -newer "$FOLDER/predict.done" -print -quit 2> /dev/null)" ] && rm "$FOLDER/predict.done"
part predict 60 60 300 bash -c predict
try_again
pack cache
[ -z "$INCOMPLETE" ] && echo "complete: $FOLDER/report.md"
exit 0
