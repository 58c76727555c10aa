"""Memory that tensors give back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.load import scaled

# Every second of many blocks is freed, while the heap is kept as a role process has it.
PROGRAM = """
import sys
import torch
from meshrl.common.model.files.storages import return_blocks

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

if sys.argv[1] == "returned":
    return_blocks(1 << 20)
blocks = [torch.ones(1 << 20) for _ in range(32)]
before = resident()
del blocks[::2]
print((before - resident()) >> 20)
"""
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


@pytest.mark.deep
@pytest.mark.parametrize(("how", "freed_mib"), [("kept", 0), ("returned", 64)])
def test_large_blocks_go_back_where_that_is_wished(how: str, freed_mib: int) -> None:
    words = [sys.executable, "-c", PROGRAM, how]
    environment = os.environ | KEPT
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=scaled(120.0)
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == pytest.approx(freed_mib, abs=8)
