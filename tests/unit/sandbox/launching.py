"""Jails and programs for tests: launchers, an image, and processes as another user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil

from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.outer_jail.interpreters import Interpreter
from meshrl.services.sandbox.isolation.resources.cgroups import CgroupParents
from tests.load import scaled


@contextlib.asynccontextmanager
async def open_launcher(
    log: Path | None = None,
    *,
    tier: str = "bwrap",
    interpreter: Interpreter | None = None,
    homes: CgroupParents | None = None,
) -> AsyncIterator[JailLauncher]:
    """Open a launcher and stop it at the end."""
    jail_interpreter = interpreter or Interpreter.default()
    launcher = JailLauncher(SystemHost(), SystemClock(), tier, jail_interpreter, homes, log)
    try:
        yield launcher
    finally:
        await launcher.stop()


ROOT = Path(__file__).parents[3]
PLAIN = ("-m", "tests.unit.sandbox.plain_user", sys.executable)
STILL_ROOT = ("-m", "tests.unit.sandbox.plain_user", "--still-root", sys.executable)


def run_program(program: str, *arguments: str, become: Sequence[str] = ()) -> str:
    """Return the output of a program, which must exit with status 0."""
    completed = subprocess.run(
        [sys.executable, *become, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=scaled(100),
    )
    assert completed.returncode == 0, completed.stderr[-2000:]
    return completed.stdout


SOON_S = 60.0  # for a jail to start on a busy host
ZYGOTE = 1  # Python process of a launcher without jails
JAIL = 2  # Python processes of a jail: its init process and its guest


def list_descendant_programs(pid: int) -> list[str]:
    """List the program names of a process's descendants."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended since it was listed
            found.append(process.name())
    return found


def list_pythons(launcher: JailLauncher) -> list[str]:
    """List the Python processes of the launcher's outer jail: the jails' and the zygote."""
    return [name for name in list_descendant_programs(launcher.pid) if name.startswith("python")]


async def wait_for_guests(launcher: JailLauncher, jails: int = 1) -> None:
    """Wait until the programs of this many jails have started."""
    async with asyncio.timeout(scaled(SOON_S)):
        while len(list_pythons(launcher)) < ZYGOTE + jails * JAIL:
            await asyncio.sleep(0.005)


OMITTED_FILES = (
    "site-packages",
    "test",
    "idlelib",
    "__pycache__",
    "config-*",
    "ensurepip",
    "tkinter",
)


def build_image(root: Path) -> str:
    """Fill `root` and return the interpreter's path inside. A module `only_here` is installed."""
    python = os.path.realpath(Interpreter.default().python)
    library = Path(sysconfig.get_path("stdlib"))
    _copy_program(root, python)
    for extension in (library / "lib-dynload").glob("*.so"):
        if extension.name.startswith(("_ctypes", "_struct", "_json", "_posixsubprocess", "select")):
            _copy_libraries(root, str(extension))
    target = root / str(library).lstrip("/")
    ignore = shutil.ignore_patterns(*OMITTED_FILES)
    shutil.copytree(library, target, ignore=ignore, copy_function=_link)
    packages = _find_packages_dir(root, python)
    packages.mkdir(parents=True, exist_ok=True)
    (packages / "only_here.py").write_text("WORD = 'of the image'\n")
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc" / "secret-name").write_text("image\n")
    for path in (root, *root.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    return python


def _find_packages_dir(root: Path, python: str) -> Path:
    """Return the package directory of that interpreter; Debian's interpreter uses another one."""
    code = "import site; print(site.getsitepackages()[-1])"
    output = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    return root / output.stdout.strip().lstrip("/")


def _copy_program(root: Path, program: str) -> None:
    _copy_file(root, program)
    _copy_libraries(root, program)


def _copy_libraries(root: Path, program: str) -> None:
    output = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for line in output.splitlines():
        for word in line.split():
            if word.startswith("/"):
                _copy_file(root, word)


def _copy_file(root: Path, path: str) -> None:
    target = root / path.lstrip("/")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(path), target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the target is on another file system
        shutil.copy(source, target)


if __name__ == "__main__":
    print(build_image(Path(sys.argv[1])))
