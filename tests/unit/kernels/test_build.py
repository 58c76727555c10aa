"""Native libraries: one build for each machine, or a reason why there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.generation.backends.native import DTYPE_DEFINES
from meshrl.kernels import delta, prebuilt_libraries
from meshrl.kernels import library_build as libraries
from tests.load import scaled

PROGRAM = """
import sys
import tempfile
from pathlib import Path
from meshrl.kernels import library_build
library_build.SOURCE_DIRECTORY = Path(sys.argv[1])
made = library_build.build_library("half", *sys.argv[2:])
print(made.reason or made.load().half(84), made.path, sep="|")
"""
SOURCE = """
#ifndef DIVISOR
#define DIVISOR 2
#endif
extern "C" int half(int n) { return n / DIVISOR; }
"""


MADE_BEFORE = """
import sys
import tempfile
from pathlib import Path
from meshrl.kernels import library_build
library_build.SOURCE_DIRECTORY, library_build.LIBRARIES = Path(sys.argv[1]), (("half", ""),)
library_build.build_for_all_processors(Path(sys.argv[2]))
"""


def build(
    tmp_path: Path, source: str = SOURCE, path: str | None = None, *more: str, native: str = ""
) -> list[str]:
    """Build or load a library in a separate process; return [answer or reason, path]. `native` is a
    folder of prebuilt libraries.
    """
    (tmp_path / "half.cpp").write_text(source)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "MESHRL_NATIVE": native}
    environment["TMPDIR"] = str(tmp_path)
    if path is not None:
        environment["PATH"] = path
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), *more],
        capture_output=True,
        text=True,
        timeout=scaled(100),
        env=environment,
        check=True,
    )
    return result.stdout.strip().split("|")


@pytest.mark.needs("compiler")
def test_library_is_built_once_and_rebuilt_when_its_source_changes(tmp_path: Path) -> None:
    answer, first = build(tmp_path)
    assert answer == "42"
    made = Path(first).stat().st_mtime_ns
    assert build(tmp_path) == [answer, first] and Path(first).stat().st_mtime_ns == made
    answer, second = build(tmp_path, SOURCE.replace("n /", "7 + n /"))
    assert answer == "49" and second != first


@pytest.mark.needs("compiler")
def test_each_set_of_definitions_has_its_own_library(tmp_path: Path) -> None:
    assert build(tmp_path, SOURCE, None, "DIVISOR=4")[0] == "21"
    assert build(tmp_path)[0] == "42"


@pytest.mark.needs("compiler")
def test_source_that_does_not_compile_returns_a_reason(tmp_path: Path) -> None:
    reason, path = build(tmp_path, "int half(")
    assert "cannot compile half.cpp" in reason and "error" in reason and path == "None"
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_missing_compiler_returns_a_reason(tmp_path: Path) -> None:
    reason, path = build(tmp_path, SOURCE, str(tmp_path))
    assert "no C++ compiler" in reason and path == "None"


@pytest.mark.needs("compiler")
def test_concurrent_processes_build_a_library_once(tmp_path: Path) -> None:
    (tmp_path / "half.cpp").write_text(SOURCE)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["TMPDIR"] = str(tmp_path)
    asked = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(3)
    ]
    answers = {process.communicate(timeout=scaled(100))[0] for process in asked}
    assert len(answers) == 1 and answers.pop().startswith("42|")
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 1


@pytest.mark.needs("compiler")
def test_library_writable_by_others_is_rebuilt_and_never_loaded(tmp_path: Path) -> None:
    answer, path = build(tmp_path)
    library = Path(path)
    library.write_bytes(b"planted")
    library.chmod(0o777)
    assert build(tmp_path) == [answer, path]
    assert library.stat().st_mode & 0o777 == 0o700
    if os.geteuid() == 0:
        library.write_bytes(b"planted")
        os.chown(library, 65534, 65534)
        assert build(tmp_path) == [answer, path] and library.stat().st_uid == 0
    library.parent.chmod(0o777)
    _, elsewhere = build(tmp_path)
    assert Path(elsewhere).parent != library.parent


@pytest.mark.needs("compiler")
def test_host_without_a_compiler_loads_a_prebuilt_library(tmp_path: Path) -> None:
    folder, empty = tmp_path / "native", tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "half.cpp").write_text(SOURCE)
    command = [sys.executable, "-c", MADE_BEFORE, str(tmp_path), str(folder)]
    subprocess.run(command, timeout=scaled(100), check=True)
    assert len(list(folder.glob("half-*.so"))) == len(prebuilt_libraries.list_processor_kinds())
    answer, found = build(tmp_path, SOURCE, str(empty), native=str(folder))
    if not prebuilt_libraries.list_processor_kinds():
        pytest.skip("none is made for this architecture")
    assert answer == "42" and Path(found).parent == folder
    assert not (tmp_path / "cache").exists()
    # A library of other sources, or one that others can write, is not loaded.
    assert build(tmp_path, f"{SOURCE}// newer", str(empty), native=str(folder))[1] == "None"
    for made in folder.glob("half-*.so"):
        made.chmod(0o777)
    assert build(tmp_path, SOURCE, str(empty), native=str(folder))[1] == "None"


def test_prebuilt_libraries_cover_all_requested_ones() -> None:
    asked = {("decoder", define) for define in DTYPE_DEFINES.values()} | {
        ("ops", ""),
        ("delta", ""),
        ("copy", ""),
    }
    assert asked | {(name, "") for name in libraries.TRAINING_LIBRARIES} == set(libraries.LIBRARIES)
    assert {f"{name}.cpp" for name, _ in asked} <= {
        p.name for p in libraries.SOURCE_DIRECTORY.iterdir()
    }


def test_cache_folder_of_another_user_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "no folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    taken = tmp_path / f"meshrl-native-{os.getuid()}-0"
    taken.mkdir()
    taken.chmod(0o777)
    made = libraries.get_cache_directory()
    assert made != taken and made.parent == tmp_path and made.stat().st_mode & 0o777 == 0o700
    assert libraries.get_cache_directory() == made


native = pytest.mark.needs("compiler")
BLOCKS = 1000  # bytes of a block in `rebuilt`: no multiple of the native code's stride


def draw_runs(
    elements: int, width: int, share: float, seed: int
) -> tuple[delta.ByteArray, delta.ByteArray]:
    """Draw two runs of bytes that differ in some bit of about `share` of their elements."""
    generator = np.random.default_rng(seed)
    old = generator.integers(0, 256, elements * width, np.uint8)
    new = old.copy()
    changed = np.flatnonzero(generator.random(elements) < share)
    new[changed * width + generator.integers(0, width, len(changed))] ^= np.uint8(
        1 << int(generator.integers(0, 8))
    )
    return old, new


def apply_differences(
    old: delta.ByteArray, found: delta.ElementDifferences, write: Callable[..., int]
) -> delta.ByteArray:
    """Rebuild the new run block by block from gaps and values alone."""
    width = found.values.itemsize
    positions = (np.cumsum(found.gaps.astype(np.int64) + 1) - 1).astype(np.uint32)
    new, done, step = old.copy(), 0, BLOCKS // width * width
    for first in range(0, len(new), step):
        done = write(new[first : first + step], first // width, positions, found.values, done)
    assert done == len(positions)
    return new


CASES = given(
    st.integers(0, 3000),
    st.sampled_from(delta.ELEMENT_WIDTHS),
    st.sampled_from([0.0, 0.001, 0.03, 0.5, 1.0]),
    st.integers(0, 1 << 30),
)


@settings(max_examples=80)
@CASES
def test_numpy_differences_rebuild_the_new_run(
    elements: int, width: int, share: float, seed: int
) -> None:
    old, new = draw_runs(elements, width, share, seed)
    found = delta.find_differences_numpy(old, new, width, elements)
    assert found is not None
    assert (apply_differences(old, found, delta.overwrite_elements_numpy) == new).all()


@native
@settings(max_examples=80)
@CASES
def test_native_differences_match_numpy(elements: int, width: int, share: float, seed: int) -> None:
    old, new = draw_runs(elements, width, share, seed)
    assert delta.load_library() is not None
    found = delta.find_differences(old, new, width, elements)
    plain = delta.find_differences_numpy(old, new, width, elements)
    assert found is not None and plain is not None
    assert all((a == b).all() and a.dtype == b.dtype for a, b in zip(found, plain, strict=True))
    assert (apply_differences(old, found, delta.overwrite_elements) == new).all()


@native
@settings(max_examples=80)
@given(
    st.integers(0, 400),
    st.sampled_from(delta.ELEMENT_WIDTHS),
    st.integers(0, 400),
    st.integers(0, 99),
)
def test_more_differences_than_the_limit_return_none(
    elements: int, width: int, most: int, seed: int
) -> None:
    old, new = draw_runs(elements, width, 0.5, seed)
    plain = delta.find_differences_numpy(old, new, width, most)
    assert (delta.find_differences(old, new, width, most) is None) == (plain is None)


@pytest.mark.parametrize(
    ("was", "now"),
    [(0.0, -0.0), (float("nan"), -float("nan")), (1.0, np.nextafter(np.float32(1), np.float32(2)))],
)
def test_equal_and_nan_values_are_compared_by_their_bits(was: float, now: float) -> None:
    old, new = (np.full(100, x, np.float32).view(np.uint8) for x in (was, was))
    new = new.copy()
    new.view(np.float32)[41] = now
    found = delta.find_differences(old, new, 4, 100)
    alike = delta.find_differences(old, old, 4, 100)
    assert found is not None and alike is not None
    assert found.gaps.tolist() == [41] and len(found.values) == 1
    assert alike.gaps.size == 0  # also for NaN


def test_runs_of_different_sizes_are_rejected() -> None:
    run = np.zeros(12, np.uint8)
    with pytest.raises(ValueError, match="12 and 8 bytes"):
        delta.find_differences(run, run[:8], 4, 3)
    with pytest.raises(ValueError, match="elements of 8"):
        delta.find_differences(run, run, 8, 3)
