#!/usr/bin/env bash
# make parity: recompute the golden arrays with torch and transformers, load what the project
# exports with plain transformers and peft, and write the table of differences into docs/parity.md.
#
#   tests/parity/run.sh [PYTHON]     PYTHON: the project's (default .venv/bin/python)
#
# torch lives in an environment of its own, .parity/env, made on the first run.
set -euo pipefail
cd "$(dirname "$0")/../.."
project=${1:-.venv/bin/python}
env=.parity/env

find_python311() {
    local candidate
    for candidate in python3.11 python3 "$HOME"/.pyenv/versions/3.11*/bin/python; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null
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

rm -rf .parity/out
JAX_PLATFORMS=cpu "$project" -m tests.parity.export .parity/out
"$env/bin/python" -m tests.parity.compare .parity/out docs/parity.md
