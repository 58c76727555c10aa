#!/usr/bin/env bash
# Builds the virtual environment of `verifiers`:  install.sh .venvs/verifiers
# One that this file and requirements.txt have built already is left as it is. PYTHON names another
# interpreter than python3; it must be 3.11 or newer.
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
venv=$1

built=$(cat "$here/requirements.txt" "$here/install.sh" | sha256sum)
if [ "$(cat "$venv/built" 2>/dev/null || true)" = "$built" ]; then
    exit 0
fi
"${PYTHON:-python3}" -m venv --clear "$venv"
"$venv/bin/python" -m pip -qq --disable-pip-version-check install --requirement "$here/requirements.txt"
"$venv/bin/python" -c 'import verifiers.v1'
echo "$built" >"$venv/built"
