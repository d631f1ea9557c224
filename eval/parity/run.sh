#!/usr/bin/env bash
# Parity with lm-evaluation-harness's own Hugging Face wrapper on the dense embedded model.
#
#   eval/parity/run.sh DATA_DIR [PYTHON] [LIMIT]     PYTHON: the project's (default .venv/bin/python)
#
# torch and transformers come from the environment that tests/parity/run.sh makes; the harness lies
# beside it.
set -euo pipefail
cd "$(dirname "$0")/../.."
data=${1:?"usage: eval/parity/run.sh DATA_DIR [PYTHON] [LIMIT]"}
project=${2:-.venv/bin/python}
limit=${3:-250}  # documents
scratch=.venv-parity
env=$scratch/env
harness=$scratch/lm-eval
if [ ! -x "$env/bin/python" ]; then
    echo "no $env: run tests/parity/run.sh first (make parity)" >&2
    exit 1
fi
if [ ! -e "$harness/done" ]; then
    rm -rf "$harness"
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check \
        --target "$harness" lm-eval==0.4.13
    touch "$harness/done"
fi
model=$("$project" -c 'from wide_jax.hf.resolve import resolve_model; print(resolve_model(None))')
mkdir -p $scratch/harness
PYTHONPATH=$harness HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 DISABLE_MULTIPROC=1 \
    "$env/bin/python" eval/parity/reference.py --model "$model" --task arc_easy \
    --data "$data/tasks/arc_easy_test.jsonl.gz" --limit "$limit" \
    --out $scratch/harness/arc_easy.json
"$project" -m eval.parity.compare --reference $scratch/harness/arc_easy.json \
    --data-dir "$data" --record eval/results/parity.jsonl
