#!/usr/bin/env bash
# The two-minute tour: train a small Llama on real text with two CPU ranks, then look at it and let it write.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
prepare_environment demo

bin=$(dirname "$PYTHON")
run=outputs/demo
rm -rf "$run"
bold= plain=
if [ -t 1 ]; then bold=$(printf '\033[1m') plain=$(printf '\033[0m'); fi
say() { printf '\n%s$' "$bold"; printf ' %q' "$@"; printf '%s\n' "$plain"; "$@"; }

say "$bin/titan" train train_configs/demo.toml --nproc 2
say "$bin/titan" plot "$run" --output "$run/loss.png"
say "$bin/titan" generate --checkpoint "$run" --prompt "def " --max-new-tokens 240

cat << END

What is there now, below $run:
  config.toml       the resolved job file: \`titan train $run/config.toml\` runs it again
  metrics.jsonl     every logged step          loss.png   its curves
  tensorboard/      the same for TensorBoard:  tensorboard --logdir $run
  checkpoint/       run the train command again, with --training.steps=600, and it goes on from here
END
