"""CUDA sources on a host without a GPU: compilation for Hopper, and results under emulation.

For the results, the same sources run on the processor, under emulated/cuda_runtime.h.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from meshrl.kernels.backends.cuda_launchers import Launchers, choose_num_splits
from meshrl.kernels.cuda_build import CUDA_SOURCES, NVCC_FLAGS
from tests.load import scaled
from tests.unit.kernels.operators_under_test import (
    DTYPES,
    Attended,
    check_buckets,
    check_paged_decode,
    check_paged_write,
)

pytestmark = pytest.mark.group("cuda sources")  # one build for all tests
LAUNCH = re.compile(r"([\w]+(?:<[\w, ]*>)?)\s*<<<([^;]*?), ([^;,]*), 0, \w+>>>\(([^;]*?)\);")
FLAGS = ("-O0", "-std=c++20", "-Wno-unknown-pragmas", "-shared", "-fPIC")
PROCESSORS = 132  # multiprocessors of an H200


@pytest.fixture(scope="module")
def emulated_launchers(tmp_path_factory: pytest.TempPathFactory) -> Launchers:
    """Compile launchers of the CUDA sources for this processor."""
    folder = tmp_path_factory.mktemp("emulated")
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    rewritten = folder / "emulated.cpp"
    texts = [
        LAUNCH.subn(r"emulated::run(\2, \3, [=] { \1(\4); });", s.read_text()) for s in CUDA_SOURCES
    ]
    assert [count for _, count in texts] == [4, 2]
    # Constants of several sources have the same names, so that each has a namespace; headers come
    # first.
    headers = sorted(
        {line for text, _ in texts for line in text.splitlines() if "#include" in line}
    )
    bodies = [re.sub(r"#include.*", "", text) for text, _ in texts]
    rewritten.write_text(
        "\n".join([*headers, *(f"namespace source{i} {{\n{b}\n}}" for i, b in enumerate(bodies))])
    )
    library = folder / "emulated.so"
    here = Path(__file__).parent / "emulated"
    command = [compiler, *FLAGS, f"-I{here}", str(rewritten), "-o", str(library)]
    subprocess.run(command, check=True, timeout=scaled(100))
    return Launchers(ctypes.CDLL(str(library)), PROCESSORS, lambda: 0)


@pytest.mark.needs("nvcc")
@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda path: path.name)
def test_source_compiles_for_hopper(
    source: Path, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    # Not optimised, which takes a third of the time; a deep test compiles as users do.
    target = ["-gencode=arch=compute_90,code=sm_90", "-cubin", "-Werror=all-warnings"]
    target += ["-Xcicc=-O0", "-Xptxas=-O0"]
    command = ["nvcc", *NVCC_FLAGS, *target, str(source)]
    version = subprocess.run(
        ["nvcc", "--version"], capture_output=True, check=True, timeout=scaled(60)
    )
    same = hashlib.sha256(repr([command, version.stdout, source.read_bytes()]).encode())
    kept = pytestconfig.cache.mkdir("cuda") if pytestconfig.cache else tmp_path
    compiled = kept / f"{source.stem}-{same.hexdigest()[:20]}.cubin"
    if not compiled.exists():  # takes some seconds
        draft = tmp_path / compiled.name
        run = subprocess.run(
            [*command, "-o", str(draft)], capture_output=True, text=True, timeout=scaled(110)
        )
        assert run.returncode == 0, run.stderr
        shutil.move(draft, compiled)
    assert compiled.stat().st_size > 0


@pytest.mark.rotating(3)
@pytest.mark.needs("compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "kv_heads", "width"),
    [(1, 2, 32), (2, 1, 64), (3, 1, 128), (6, 1, 32), (7, 2, 64), (8, 1, 128), (9, 1, 32)],
)
def test_query_attends_to_its_sequence(
    emulated_launchers: Launchers, group: int, kv_heads: int, width: int, dtype: torch.dtype
) -> None:
    check_paged_decode(emulated_launchers, Attended([0, 17, 70], group, kv_heads, width, dtype))


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("longest", [1, 64, 65, 200, 400])
def test_context_splits_are_merged(
    emulated_launchers: Launchers, longest: int, dtype: torch.dtype
) -> None:
    case = Attended([longest, 0, longest // 3], 2, 1, 32, dtype)
    spare = 70  # blocks of a bucket's table: several splits, some without tokens
    assert choose_num_splits(3, spare, PROCESSORS) > 3
    check_paged_decode(emulated_launchers, case, spare)


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "width"), [(1, 32), (2, 128), (3, 80)])
def test_tokens_are_written_where_attention_reads_them(
    emulated_launchers: Launchers, kv_heads: int, width: int, dtype: torch.dtype
) -> None:
    check_paged_write(emulated_launchers, Attended([33, 0, 5], 1, kv_heads, width, dtype))


@pytest.mark.needs("compiler")
def test_lanes_are_packed_and_scattered_back(emulated_launchers: Launchers) -> None:
    for index in ([], [-1, 3, 0, -1, 6], [5]):
        check_buckets(emulated_launchers, index)
    wide = torch.randn(2, 70_000)  # more than the thread blocks of a row process in one iteration
    assert torch.equal(emulated_launchers.bucket_pack(wide, torch.tensor([1])), wide[1:])


def test_context_is_split_until_the_gpu_is_full() -> None:
    # 256 tokens each
    assert choose_num_splits(groups=1, table_width=4096, num_multiprocessors=132) == 256
    assert choose_num_splits(groups=8, table_width=4096, num_multiprocessors=132) == 66
    assert choose_num_splits(groups=1000, table_width=4096, num_multiprocessors=132) == 1
    assert choose_num_splits(groups=1, table_width=31, num_multiprocessors=132) == 1
    assert choose_num_splits(groups=1, table_width=1, num_multiprocessors=132) == 1
