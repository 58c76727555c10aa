"""Triton kernels on a host without a GPU: results in Triton's interpreter, and compilation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.load import scaled

pytestmark = pytest.mark.needs("triton")
ROOT = Path(__file__).parents[3]

INTERPRETED = """
import torch
from meshrl.kernels.backends import triton_kernels
from tests.unit.kernels.operators_under_test import *

for dtype in DTYPES:
    for heads_and_width in ((1, 2, 32), (3, 1, 64), (7, 1, 80), (2, 1, 128)):
        check_varlen_prefill(triton_kernels, Attended([3, 0, 37, 1, 50], *heads_and_width, dtype))
    check_varlen_prefill(triton_kernels, Attended([140, 33, 1], 1, 1, 32, dtype), padding=40)
    check_varlen_prefill(triton_kernels, Attended([0], 1, 1, 32, dtype), padding=5)
    for window in (1, 20, 70):
        case = Attended([3, 0, 140, 1], 2, 1, 32, dtype, window=window)
        check_varlen_prefill(triton_kernels, case)
    for seed, vocab in enumerate((1, 50, 4095, 4096, 9000)):
        check_token_logprob(triton_kernels, vocab, dtype, seed)
logits = torch.zeros(2, 5000)
logits[0, 7] = torch.nan
found = triton_kernels.token_logprob(logits, torch.tensor([3, 3]), torch.ones(2))
assert found[0].isnan() and found[1].isfinite()
"""

COMPILED = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from meshrl.kernels.backends import triton_kernels

HOPPER = GPUTarget("cuda", 90, 32)


def compiled(kernel, signature, constants, **options):
    signature = signature | {name: "constexpr" for name in constants}
    return triton.compile(ASTSource(kernel, signature, constants), target=HOPPER, options=options)


for dtype, pointer in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
    tile = triton_kernels.choose_tile(64, dtype)
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
    wide = dtype == torch.float32
    signature = {
        **{name: pointer for name in ("queries", "keys", "values")},
        "starts": "*i32",
        "out": pointer,
        **{name: "i32" for name in ("sequences", "search_steps", "tokens", "heads", "kv_heads")},
        "scale": "fp32",
        "window": "i32",
    }
    constants = {"WIDTH": 64, "PADDED": 64, "WIDE": wide, **tile}
    built = compiled(triton_kernels.prefill_kernel, signature, constants, **options)
    assert built.asm["cubin"]
    assert ("wgmma" in built.asm["ptx"]) == (not wide)  # bfloat16 runs on the tensor cores
    signature = {"logits": pointer, "tokens": "*i64", "temperature": "*fp32", "out": "*fp32"}
    signature["vocab"] = "i32"
    constants = {"AT_ONCE": triton_kernels.LOGITS_PER_STEP}
    assert compiled(triton_kernels.logprob_kernel, signature, constants, num_warps=8).asm["cubin"]
"""


@pytest.mark.rotating(2)
@pytest.mark.parametrize(
    ("script", "settings"),
    [
        pytest.param(INTERPRETED, {"TRITON_INTERPRET": "1"}, id="interpreted"),
        pytest.param(COMPILED, {"TRITON_INTERPRET": "0"}, id="compiled"),
    ],
)
def test_triton_kernels_match_the_reference(
    script: str, settings: dict[str, str], pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    # Triton keys its compiled kernels by all their inputs.
    kept = pytestconfig.cache.mkdir("triton") if pytestconfig.cache else tmp_path
    environment = {**os.environ, "TRITON_CACHE_DIR": str(kept), **settings}
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=scaled(110),
    )
    assert run.returncode == 0, run.stderr
