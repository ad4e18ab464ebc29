#!/usr/bin/env bash
# A short tour: train a small Llama on real text with two CPU ranks, then plot its loss and let it write.
set -euo pipefail
cd "$(dirname "$0")/.."
cat << END
titan's tour has four parts:
  1. an environment in ${TITAN_VENV:-.venv}   one to five minutes, the first time only
  2. training                  about two minutes on two idle cores
  3. a plot of the loss        seconds
  4. text from the model       seconds
END
. scripts/environment.sh
prepare_environment demo
prepared=$SECONDS

bin=$(dirname "$PYTHON")
run=outputs/demo
rm -rf "$run"
bold= plain=
if [ -t 1 ]; then bold=$(printf '\033[1m') plain=$(printf '\033[0m'); fi
say() { printf '\n%s$' "$bold"; printf ' %q' "$@"; printf '%s\n' "$plain"; "$@"; }

say "$bin/titan" train train_configs/demo.toml --nproc 2
trained=$SECONDS
say "$bin/titan" plot "$run" --output "$run/loss.png"
say "$bin/titan" generate "$run" --prompt "def " --max-new-tokens 240

cat << END

That took $prepared s for the environment, $((trained - prepared)) s for training, and $((SECONDS - trained)) s for the plot and the text.

What is there now, below $run:
  config.toml       the resolved job file: \`titan train $run/config.toml\` runs it again
  metrics.jsonl     every logged step          loss.png   its curves
  tensorboard/      the same for TensorBoard:  tensorboard --logdir $run
  checkpoint/       docs/checkpoints.md, "Continue a finished run", goes on from here

To use titan in this shell:
  source $(dirname "$PYTHON")/activate
  titan --help
END
