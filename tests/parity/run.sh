#!/usr/bin/env bash
# make parity: recompute the golden arrays with torch and transformers, load what the project
# exports with plain transformers and peft, and write the table of differences into docs/parity.md.
#
#   tests/parity/run.sh [PYTHON]     PYTHON: the project's (default .venv/bin/python)
#
# torch lives in an environment of its own, .venv-parity, made on the first run. Everything is done
# with transformers 5 and again with 4.57, whose own dependencies lie beside the environment.
set -euo pipefail
cd "$(dirname "$0")/../.."
project=${1:-.venv/bin/python}
scratch=.venv-parity
env=$scratch/env
old=$scratch/transformers-4.57
old_packages=(transformers==4.57.6 'huggingface_hub>=0.36,<0.37' 'tokenizers>=0.22,<0.23')

find_python311() {
    local candidate
    for candidate in python3.11 python3 "$HOME"/.pyenv/versions/3.11*/bin/python; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null
        then
            command -v "$candidate"
            return
        fi
    done
    echo "make parity needs Python 3.11 (on PATH or in ~/.pyenv/versions) for torch" >&2
    return 1
}

if ! cmp -s tests/parity/requirements.txt "$env/requirements.txt"; then
    python=$(find_python311)
    echo "making $env with $python"
    rm -rf "$env"
    "$python" -m venv "$env"
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check \
        -r tests/parity/requirements.txt
    cp tests/parity/requirements.txt "$env/requirements.txt"
fi
if [ ! -e "$old/done" ]; then
    rm -rf "$old"
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --target "$old" "${old_packages[@]}"
    touch "$old/done"
fi

rm -rf $scratch/out $scratch/tables
mkdir -p $scratch/tables
JAX_PLATFORMS=cpu "$project" -m tests.parity.export $scratch/out
"$env/bin/python" -m tests.parity.compare $scratch/out $scratch/tables/1.md
PYTHONPATH=$old "$env/bin/python" -m tests.parity.compare $scratch/out $scratch/tables/2.md
cat tests/parity/head.md $scratch/tables/1.md $scratch/tables/2.md > docs/parity.md
echo "make parity: all differences are within their bounds; docs/parity.md has them"
