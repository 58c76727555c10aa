#!/usr/bin/env bash
# Builds the virtual environment that trl_grpo.py runs in:  install_trl.sh .venvs/trl
# An environment that this file and trl.txt have built already is left as it is. PYTHON names
# another interpreter than python3.
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
venv=$1

built=$(cat "$here/trl.txt" "$here/install_trl.sh" | sha256sum)
if [ "$(cat "$venv/built" 2>/dev/null || true)" = "$built" ]; then
    exit 0
fi
pip() { "$venv/bin/python" -m pip -qq --disable-pip-version-check "$@"; }
"${PYTHON:-python3}" -m venv --clear "$venv"
pip install torch==2.13.0 # first and by itself: an open range would pull CUDA packages
pip install --requirement "$here/trl.txt"
check='from trl import GRPOConfig, GRPOTrainer'
said=$("$venv/bin/python" -c "$check" 2>&1) || { echo "$said" >&2; exit 1; }
echo "$built" >"$venv/built"
