#!/bin/sh
# Prints the path of a Python >= 3.12: $PYTHON if set, else one on PATH, else one of pyenv's.
# Versions the project is tested on (3.12, 3.13) come before newer ones.
set -u

is_new_enough() {
    "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    if is_new_enough "$PYTHON"; then
        command -v "$PYTHON"
        exit 0
    fi
    echo "PYTHON=$PYTHON is not a Python >= 3.12 with the venv module" >&2
    exit 1
fi

pyenv="${PYENV_ROOT:-$HOME/.pyenv}/versions"
for candidate in \
    python3.12 python3.13 "$pyenv"/3.12.*/bin/python "$pyenv"/3.13.*/bin/python \
    python3 python "$pyenv"/3.*/bin/python; do
    if is_new_enough "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done
echo "no Python >= 3.12 found on PATH or in $pyenv: install one, or name it with PYTHON=/path/to/python" >&2
exit 1
