#!/usr/bin/env bash
# Builds an environment whose SGLang serves small models on a CPU:  install.sh .venvs/sglang
# From wheels only, some 3 GB. What this folder has built already is left as it is. PYTHON names
# another interpreter than python3.
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
venv=$1

built=$(cd "$here" && find . -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 cat | sha256sum)
if [ "$(cat "$venv/built" 2>/dev/null || true)" = "$built" ]; then
    exit 0
fi
pip() { "$venv/bin/python" -m pip -qq --disable-pip-version-check "$@"; }
"${PYTHON:-python3}" -m venv --clear "$venv"
pip install torch==2.13.0  # exactly: an open range would pull gigabytes of CUDA packages
pip install --requirement "$here/requirements.txt" torch==2.13.0
pip install --no-deps sglang==0.5.23 torchvision==0.28.0
site=$("$venv/bin/python" -c "import site; print(site.getsitepackages()[0])")
cp -r "$here/sgl_kernel" "$site/"
for stand_in in torchvision_without_ops memory_without_pinning; do
    cp "$here/$stand_in.py" "$site/"
    echo "import $stand_in" >"$site/$stand_in.pth"
done
said=$("$venv/bin/python" -P -c "import sglang.launch_server, torchvision" 2>&1) ||
    { echo "$said" >&2; exit 1; }
echo "$built" >"$venv/built"
