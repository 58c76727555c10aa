"""An image for tests: a root of its own, with the Python that runs them and little else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from meshrl.services.sandbox.isolation.outer_jail.interpreters import Interpreter

LEFT_OUT = ("site-packages", "test", "idlelib", "__pycache__", "config-*", "ensurepip", "tkinter")


def image(root: Path) -> str:
    """Fills `root`; returns the interpreter's path inside. A module `only_here` is installed."""
    python = os.path.realpath(Interpreter.own().python)
    library = Path(sysconfig.get_path("stdlib"))
    _put(root, python)
    for extension in (library / "lib-dynload").glob("*.so"):
        if extension.name.startswith(("_ctypes", "_struct", "_json", "_posixsubprocess", "select")):
            _libraries(root, str(extension))
    target = root / str(library).lstrip("/")
    ignore = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(library, target, ignore=ignore, copy_function=_link)
    packages = _packages(root, python)
    packages.mkdir(parents=True, exist_ok=True)
    (packages / "only_here.py").write_text("WORD = 'of the image'\n")
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc" / "secret-name").write_text("image\n")
    for place in (root, *root.rglob("*")):
        if place.is_dir() and not place.is_symlink():
            place.chmod(0o755)
    return python


def _packages(root: Path, python: str) -> Path:
    """Where that interpreter looks for packages; Debian's does so elsewhere."""
    code = "import site; print(site.getsitepackages()[-1])"
    said = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    return root / said.stdout.strip().lstrip("/")


def _put(root: Path, program: str) -> None:
    _copy(root, program)
    _libraries(root, program)


def _libraries(root: Path, program: str) -> None:
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for line in said.splitlines():
        for word in line.split():
            if word.startswith("/"):
                _copy(root, word)


def _copy(root: Path, place: str) -> None:
    target = root / place.lstrip("/")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(place), target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # of another file system
        shutil.copy(source, target)


if __name__ == "__main__":
    print(image(Path(sys.argv[1])))
