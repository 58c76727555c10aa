"""Builder of the C++ sources of `csrc/` for this machine's processor, once, and their loader.

The name of a library contains a digest of all its inputs: sources, flags, compiler and the
processor's features (hosts of different generations may share a home directory). Without a compiler
the result is a reason instead of a library, and the caller uses PyTorch. A prebuilt library for the
processor (`kernels/prebuilt_libraries.py`) takes precedence.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshrl.kernels import prebuilt_libraries
from meshrl.kernels.prebuilt_libraries import is_trusted

SOURCE_DIRECTORY = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")
# -O2 runs at half the speed. Errno and traps would forbid vector code.
COMPILER_FLAGS = (
    *("-O3", "-std=c++20", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wno-psabi", "-shared", "-fPIC"),
)
NATIVE_PROCESSOR_FLAGS = ("-march=native",)
TRAINING_LIBRARIES = ("varlen", "pointwise")  # libraries of a training pass on a CPU
# All libraries, by name and definition.
LIBRARIES = (
    ("decoder", ""),
    ("decoder", "MESHRL_STORAGE=bf16"),
    ("ops", ""),
    ("delta", ""),
    ("copy", ""),
    *((name, "") for name in TRAINING_LIBRARIES),
)
NO_COMPILER_REASON = f"no C++ compiler ({', '.join(COMPILERS)}) on PATH"
NOT_BUILT_REASON = "compiled at the first start, in some 10 s"
BUILD_TIMEOUT_S = 300.0  # some 10 s on an idle core
PREBUILD_TIMEOUT_S = 3600.0  # each; only the build of an image waits for it, on any machine


@dataclass(frozen=True)
class Library:
    """Shared library, or the reason why there is none."""

    path: Path | None
    reason: str = ""

    def load(self) -> ctypes.CDLL:
        """Load the library's functions; raise FileNotFoundError, with the reason, if there is
        none.
        """
        if self.path is None:
            raise FileNotFoundError(self.reason)
        return ctypes.CDLL(str(self.path))

    def load_with_signatures(
        self,
        signatures: Mapping[str, Sequence[Any]],
        result: Any = ctypes.c_int,
        results: Mapping[str, Any] | None = None,
    ) -> ctypes.CDLL:
        """Return the library with its functions' types; results are `result` or of `results`."""
        loaded = self.load()
        for name, arguments in signatures.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, (results or {}).get(name, result)
        return loaded


@cache
def build_library(name: str, definition: str = "") -> Library:
    """Return the library of `csrc/<name>.cpp`, built if needed.

    It is compiled with `-D<definition>` if one is given.
    """
    if prebuilt := prebuilt_libraries.find_prebuilt(
        name, definition, COMPILER_FLAGS, _list_sources(name)
    ):
        return Library(prebuilt)
    command = _get_compiler_command(name, definition)
    if not command:
        return Library(None, NO_COMPILER_REASON)
    try:
        path = get_cache_directory() / f"{name}-{_compute_digest(command)}.so"
        if not is_trusted(path):
            with lock_build(path.with_suffix(".lock")):
                if not is_trusted(path):
                    install_compiled(command, path)
    except subprocess.CalledProcessError as error:
        first = next((line for line in error.stderr.splitlines() if "error" in line), None)
        why = error.stderr.strip()[-200:] if first is None else first.strip()
        return Library(None, f"{command[0]} cannot compile {name}.cpp: {why}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Library(None, f"{name}.cpp cannot be built: {error}")
    return Library(path)


def find_library(name: str, definition: str = "") -> Library:
    """Return the library if it is built, else the reason why `build_library` would build it."""
    if prebuilt := prebuilt_libraries.find_prebuilt(
        name, definition, COMPILER_FLAGS, _list_sources(name)
    ):
        return Library(prebuilt)
    command = _get_compiler_command(name, definition)
    if not command:
        return Library(None, NO_COMPILER_REASON)
    try:
        path = get_cache_directory() / f"{name}-{_compute_digest(command)}.so"
    except OSError as error:
        return Library(None, str(error))
    return Library(path) if is_trusted(path) else Library(None, NOT_BUILT_REASON)


def build_for_all_processors(folder: Path) -> None:
    """Compile every library for every kind of processor of this architecture into the folder.

    The folder serves hosts without a compiler. Raise CalledProcessError or FileNotFoundError if a
    compilation fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, define in LIBRARIES:
        for kind in prebuilt_libraries.list_processor_kinds():
            command = _get_compiler_command(name, define, kind.flags)
            if not command:
                raise FileNotFoundError(NO_COMPILER_REASON)
            called = prebuilt_libraries.get_file_name(
                name, define, kind, COMPILER_FLAGS, _list_sources(name)
            )
            install_compiled(command, folder / called, 0o755, PREBUILD_TIMEOUT_S)


def _list_sources(name: str) -> list[Path]:
    return [SOURCE_DIRECTORY / f"{name}.cpp", *sorted(SOURCE_DIRECTORY.glob("*.h"))]


def _get_compiler_command(
    name: str, define: str, processor: tuple[str, ...] = NATIVE_PROCESSOR_FLAGS
) -> list[str]:
    """Return the compiler's command line without an output; empty without a compiler."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return []
    defines = [f"-D{define}"] if define else []
    return [compiler, *COMPILER_FLAGS, *processor, *defines, str(SOURCE_DIRECTORY / f"{name}.cpp")]


def get_cache_directory() -> Path:
    """Return the folder of built libraries: the user's cache, else a folder of the user's in /tmp.

    If another user takes a name in /tmp, that costs a further compilation.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache, prefix = Path(home) / "meshrl" / "native", f"meshrl-native-{os.getuid()}-"
    places = sorted(Path(tempfile.gettempdir()).glob(f"{prefix}*"))
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        places.insert(0, cache)
    except OSError:  # the user has no writable cache
        pass
    for place in places:
        # Code is loaded from the folder: no other user may have created it or written to it.
        if os.access(place, os.W_OK) and is_trusted(place):
            return place
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        fix = "set XDG_CACHE_HOME to a directory that you own"
        raise OSError(f"there is no directory for compiled libraries ({error}); {fix}") from error


def _compute_digest(command: list[str]) -> str:
    hasher = hashlib.sha256()
    for path in _list_sources(Path(command[-1]).stem):
        hasher.update(path.read_bytes())
    compiler = subprocess.run(
        [command[0], "--version"],
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=True,
    )
    for text in (
        *command[:-1],
        compiler.stdout,
        platform.machine(),
        prebuilt_libraries.read_processor_features(),
    ):
        hasher.update(text.encode() + b"\0")
    return hasher.hexdigest()[:20]


def install_compiled(
    command: list[str], path: Path, mode: int = 0o700, timeout_s: float = BUILD_TIMEOUT_S
) -> None:
    """Run a compiler's command and install its output atomically; CalledProcessError if it
    fails.
    """
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        arguments = [*command, "-o", str(draft)]
        subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_s, check=True)
        draft.chmod(mode)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def lock_build(lock: Path) -> Iterator[None]:
    """Hold a lock during a build; the kernel releases the lock of a process that dies."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
