"""Images as read-only file systems of model code; defects are reported before any start."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.common.api.sandbox import JailSettings
from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import SandboxConfig
from meshrl.common.job.isolation import images, isolation_probe
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.outer_jail.interpreters import select_interpreter
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from tests.unit.sandbox.launching import build_image, open_launcher

LIMITS = JailLimits(wall_s=60.0, cpu_s=20.0)
INSPECT_PROGRAM = """
import os, only_here
print(only_here.WORD, open("/etc/secret-name").read().strip(), os.path.exists("/etc/passwd"))
print(sorted(os.listdir("/dev")))
for path in ("/etc/x", "/x", os.path.dirname(only_here.__file__) + "/x", "/proc/x"):
    try:
        print(open(path, "w"))
    except OSError as error:
        print(type(error).__name__)
open("/tmp/x", "w").write("mine")
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Create an OCI bundle, and return it with the path of its Python."""
    directory = tmp_path_factory.mktemp("bundle")
    (directory / "rootfs").mkdir()
    python = build_image(directory / "rootfs")
    (directory / "config.json").write_text(json.dumps({"root": {"path": "rootfs"}}))
    return directory, python


@pytest.fixture
async def launcher(tmp_path: Path, bundle: tuple[Path, str]) -> AsyncIterator[JailLauncher]:
    interpreter = select_interpreter(JailSettings(root=str(bundle[0]), python=bundle[1]))
    log = tmp_path / "jails.log"
    async with open_launcher(
        log, interpreter=interpreter, homes=cgroups.find_parents()
    ) as launcher:
        yield launcher


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
async def test_program_sees_only_the_read_only_image(
    launcher: JailLauncher, bundle: tuple[Path, str]
) -> None:
    result = await launcher.run(JailProgram(INSPECT_PROGRAM), LIMITS)
    assert result.stderr == b""
    first, devices, *write_errors = result.stdout.decode().splitlines()
    assert first == "of the image image False"
    assert "sda" not in devices and "mem" not in devices and "null" in devices
    assert len(write_errors) == 4 and all(word.endswith("Error") for word in write_errors)
    assert not (bundle[0] / "rootfs" / "x").exists()
    assert not list((bundle[0] / "rootfs").rglob("x"))


@pytest.mark.needs("bwrap", "root")
async def test_setuid_programs_and_devices_of_an_image_have_no_effect(
    tmp_path: Path, bundle: tuple[Path, str]
) -> None:
    root = bundle[0] / "rootfs"
    device, program = root / "etc" / "zero", root / "etc" / "as_root"
    os.mknod(device, 0o20666, os.makedev(1, 5))
    program.write_bytes(images.resolve_in_image(root, bundle[1]).read_bytes())  # type: ignore[union-attr]
    program.chmod(0o4755)
    interpreter = select_interpreter(JailSettings(root=str(bundle[0]), python=bundle[1]))
    source = """
import os, subprocess
shown = subprocess.run(["/etc/as_root", "-I", "-S", "-c", "import os; print(os.geteuid())"],
                       capture_output=True, text=True, env={"PYTHONHOME": "/"})
print(shown.stdout.strip() == "0")
try:
    print(open("/etc/zero", "rb").read(1))
except OSError as error:
    print(error.errno)
"""
    try:
        async with open_launcher(tmp_path / "jails.log", interpreter=interpreter) as launcher:
            result = await launcher.run(JailProgram(source), LIMITS)
    finally:
        device.unlink()
        program.unlink()
    assert result.stdout.decode().split() == ["False", "13"]


def test_links_of_an_image_resolve_only_inside_it(tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/python3.9").write_text("#!\n")
    (tmp_path / "usr/bin/python3").symlink_to("/usr/bin/python3.9")
    (tmp_path / "bin").symlink_to("../../usr/bin")
    (tmp_path / "etc").symlink_to("/etc")
    (tmp_path / "loop").symlink_to("loop")
    assert images.resolve_in_image(tmp_path, "/bin/python3") == tmp_path / "usr/bin/python3.9"
    assert images.resolve_in_image(tmp_path, "/etc/passwd") is None
    assert images.resolve_in_image(tmp_path, "/loop") is None


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        ("nothing", "there is no directory"),
        ("empty", "has no interpreter /usr/bin/python3, "),
        ("config", "is not the configuration of an OCI bundle"),
        ("rootless", "names the root rootfs, which is not a directory"),
        ("mode", "is not executable"),
        ("machine", "is a program of another architecture (ELF machine 8)"),
        ("loader", "needs the loader /lib64/loader, which is missing"),
    ],
)
def test_image_defects_are_named(tmp_path: Path, defect: str, message: str) -> None:
    root, python_path = tmp_path / "image", "/usr/bin/python3"
    python = root / python_path[1:]
    if defect != "nothing":
        root.mkdir()
    if defect == "config":
        (root / "config.json").write_text("{}")
    if defect == "rootless":
        (root / "config.json").write_text('{"root": {"path": "rootfs"}}')
    if defect in ("mode", "machine", "loader"):
        python.parent.mkdir(parents=True)
        python.write_bytes(make_elf(8 if defect == "machine" else 0, "/lib64/loader"))
        python.chmod(0o644 if defect == "mode" else 0o755)
    with pytest.raises(ConfigError) as raised:
        images.find_python(images.find_root(str(root)))
    assert message in raised.value.message and raised.value.fix


def make_elf(machine: int, loader: str) -> bytes:
    """Return an ELF header with one segment that names its loader; machine 0 is this machine."""
    machine = machine or images.MACHINES.get(os.uname().machine, 0)
    word = loader.encode() + b"\0"
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHI", 2, machine, 1)
    head += struct.pack("<QQQIHHHHHH", 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return head + struct.pack("<IIQQQQQQ", 3, 4, 120, 0, 0, len(word), len(word), 1) + word


@pytest.mark.deep
@pytest.mark.needs("bwrap")
def test_old_python_and_missing_module_are_named(bundle: tuple[Path, str]) -> None:
    directory, python = bundle
    old_python = directory / "rootfs/etc/python3"
    old_python.write_text(
        f"#!{python}\nimport sys\nsys.version_info = (3, 7, 3)\nsys.version = '3.7.3'\n"
        "exec(sys.argv[sys.argv.index('-c') + 1])\n"
    )
    old_python.chmod(0o755)
    try:
        problem = isolation_probe.probe_isolation(
            SandboxConfig(root=str(directory), python="/etc/python3")
        ).interpreter_problem
    finally:
        old_python.unlink()
    assert "3.8 or newer, this is 3.7.3" in problem
    isolation = isolation_probe.probe_isolation(
        SandboxConfig(root=str(directory), python=python, imports=["only_here", "absent_here"])
    )
    assert "No module named 'absent_here'" in isolation.interpreter_problem
