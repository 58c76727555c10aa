"""Fake GPUs: NVIDIA's management library, built here, that reports GPUs declared by a test."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.load import scaled

SOURCE = Path(__file__).with_name("nvml.c")
GIB = 1 << 30
LOST, NO_SUPPORT = 15, "-"  # NVML_ERROR_GPU_IS_LOST; the value that a GPU does not report
DRIVER_NOT_LOADED, VERSION_MISMATCH = 9, 18


def build_library(directory: Path) -> Path:
    """Build libnvidia-ml.so.1 below a directory that other tests may share; return its path."""
    place = directory / f"nvml-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    built = place / "libnvidia-ml.so.1"
    if not built.exists():
        place.mkdir(parents=True, exist_ok=True)
        unfinished = place / f"{os.getpid()}.so"
        words = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
        words += ["-Wl,-soname,libnvidia-ml.so.1", "-o", str(unfinished), str(SOURCE)]
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
        subprocess.run([compiler, *words], check=True, timeout=scaled(60))
        unfinished.replace(built)
    return place


class Gpus:
    """Table of GPUs that programs with `environment` see as the driver's; it may change at any
    time.
    """

    def __init__(self, directory: Path, libraries: Path) -> None:
        self._table = directory / "gpus.table"
        self._lines: list[str] = []
        self.environment = {"LD_LIBRARY_PATH": str(libraries), "NVML_TABLE": str(self._table)}
        self._write()

    def gpu(
        self,
        uuid: str,
        name: str = "NVIDIA H100",
        total: int | str = 80 * GIB,
        used: int = 0,
        *,
        busy: int | str = 0,
        celsius: int | str = 30,
        milliwatts: int | str = 70_000,
        ecc: int | str = 0,
        throttle: int | str = 1,
        mig: int = 0,
    ) -> None:
        """Add or change a GPU; `mig` -1 means that it does not support MIG."""
        self._set("gpu", uuid, name, total, used, busy, celsius, milliwatts, ecc, throttle, mig)

    def instance(
        self, parent: str, uuid: str, gi: int, ci: int = 0, total: int = 10 * GIB, used: int = 0
    ) -> None:
        """Add or change a MIG instance."""
        self._set("mig", uuid, "NVIDIA H100 MIG 1g.10gb", total, used, parent, gi, ci)

    def process(self, uuid: str, pid: int, size: int | str) -> None:
        """Add a process that uses memory of a device."""
        self._lines.append(f"process|{uuid}|{pid}|{size}")
        self._write()

    def xid(self, uuid: str, number: int) -> None:
        """Report a driver error (XID) of a GPU."""
        self._lines.append(f"xid|{uuid}|{number}")
        self._write()

    def fail(self, uuid: str, code: int) -> None:
        """Make every call about a GPU return an error from now on."""
        self._lines.append(f"fail|{uuid}|{code}")
        self._write()

    def clear(self) -> None:
        """Clear all errors and processes."""
        self._lines = [line for line in self._lines if line.split("|")[0] in ("gpu", "mig")]
        self._write()

    def fail_init(self, code: int) -> None:
        """Make the initialisation of the library fail."""
        self._lines.append(f"init|{code}")
        self._write()

    def _set(self, *words: str | int) -> None:
        line = "|".join(map(str, words))
        kind = f"{words[0]}|{words[1]}|"
        places = [i for i, other in enumerate(self._lines) if other.startswith(kind)]
        if places:
            self._lines[places[0]] = line
        else:
            self._lines.append(line)
        self._write()

    def _write(self) -> None:
        unfinished = self._table.with_suffix(".new")
        unfinished.write_text("\n".join(self._lines) + "\n")
        unfinished.replace(self._table)

    def run(self, code: str, **environment: str) -> str:
        """Return the output of a program that sees these GPUs."""
        inherited = {k: v for k, v in os.environ.items() if not k.endswith("_VISIBLE_DEVICES")}
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env={**inherited, **self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=scaled(60),
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()
