#!/usr/bin/env bash
# A short tour: train a small Llama on the text of Python's library with two CPU ranks, plot its loss, and let it write.
#   scripts/demo.sh [--section.key=value ...]     keys of the job, such as --training.steps=20
set -euo pipefail
cd "$(dirname "$0")/.."
cat << END
titan's tour has four parts, two minutes in all on two idle cores once the packages are fetched:
  1. an environment in ${TITAN_VENV:-.venv}, the first time only
  2. a vocabulary learnt from the text of Python's library, and a job for it
  3. training; what the model writes is printed as it learns
  4. a plot of the loss, and text
END
. scripts/environment.sh
prepare_environment demo
prepared=$SECONDS

bin=$(dirname "$PYTHON")
run=outputs/demo
rm -rf "$run" "${run}_tokenizer" "$run.toml"
mkdir -p outputs
bold= plain=
if [ -t 1 ]; then bold=$(printf '\033[1m') plain=$(printf '\033[0m'); fi
say() { printf '\n%s$' "$bold"; printf ' %q' "$@"; printf '%s\n' "$plain"; "$@"; }

say "$bin/titan" init "$run.toml" --text stdlib
say "$bin/titan" train "$run.toml" --nproc 2 "$@"
trained=$SECONDS
say "$bin/titan" plot "$run" --output "$run/loss.png"
say "$bin/titan" generate "$run" --prompt def --temperature 0.6 --max-new-tokens 160

cat << END

That took $prepared s for the environment, $((trained - prepared)) s for the vocabulary and training, and $((SECONDS - trained)) s for the plot and the text.

What is there now:
  $run.toml          the job, short and commented
  $run/              metrics.jsonl, loss.png, samples/, checkpoint/; \`titan watch $run\` is a live page

Now your own text, a file or a folder of .txt and .md files (of code, 'REPO/**/*.py'):
  source $(dirname "$PYTHON")/activate
  titan init mine.toml --text FILE_OR_FOLDER
  titan train mine.toml --nproc 2

Models of Hugging Face, Parquet and TensorBoard need more packages: pip install -e '.[huggingface,tensorboard]'
END
