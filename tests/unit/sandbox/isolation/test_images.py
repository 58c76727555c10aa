"""An image is the file system of what the model's code runs in, read-only; what it lacks is named
before anything starts.
"""

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
from tests.unit.sandbox.launching import image, launching

LIMITS = JailLimits(wall_s=60.0, cpu_s=20.0)
SEES = """
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
    """An OCI bundle, and the path of Python in it."""
    place = tmp_path_factory.mktemp("bundle")
    (place / "rootfs").mkdir()
    python = image(place / "rootfs")
    (place / "config.json").write_text(json.dumps({"root": {"path": "rootfs"}}))
    return place, python


@pytest.fixture
async def launcher(tmp_path: Path, bundle: tuple[Path, str]) -> AsyncIterator[JailLauncher]:
    interpreter = select_interpreter(JailSettings(root=str(bundle[0]), python=bundle[1]))
    log = tmp_path / "jails.log"
    async with launching(log, interpreter=interpreter, homes=cgroups.find_parents()) as made:
        yield made


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
async def test_the_image_is_all_that_a_program_sees_and_it_cannot_change_it(
    launcher: JailLauncher, bundle: tuple[Path, str]
) -> None:
    ran = await launcher.run(JailProgram(SEES), LIMITS)
    assert ran.stderr == b""
    first, devices, *written = ran.stdout.decode().splitlines()
    assert first == "of the image image False"
    assert "sda" not in devices and "mem" not in devices and "null" in devices
    assert len(written) == 4 and all(word.endswith("Error") for word in written)
    assert not (bundle[0] / "rootfs" / "x").exists()
    assert not list((bundle[0] / "rootfs").rglob("x"))


@pytest.mark.needs("bwrap", "root")
async def test_a_setuid_program_and_a_device_of_an_image_give_nothing(
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
        async with launching(tmp_path / "jails.log", interpreter=interpreter) as launcher:
            ran = await launcher.run(JailProgram(source), LIMITS)
    finally:
        device.unlink()
        program.unlink()
    assert ran.stdout.decode().split() == ["False", "13"]


def test_links_of_an_image_never_lead_out_of_it(tmp_path: Path) -> None:
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
    ("spoiled", "says"),
    [
        ("nothing", "there is no directory"),
        ("empty", "has no interpreter /usr/bin/python3, "),
        ("config", "is no configuration of an OCI bundle"),
        ("rootless", "names the root rootfs, which is no directory"),
        ("mode", "is not executable"),
        ("machine", "is a program of another architecture (ELF machine 8)"),
        ("loader", "is loaded by /lib64/loader, which is not there"),
    ],
)
def test_what_an_image_lacks_is_named_at_first(tmp_path: Path, spoiled: str, says: str) -> None:
    root, named = tmp_path / "image", "/usr/bin/python3"
    python = root / named[1:]
    if spoiled != "nothing":
        root.mkdir()
    if spoiled == "config":
        (root / "config.json").write_text("{}")
    if spoiled == "rootless":
        (root / "config.json").write_text('{"root": {"path": "rootfs"}}')
    if spoiled in ("mode", "machine", "loader"):
        python.parent.mkdir(parents=True)
        python.write_bytes(elf(8 if spoiled == "machine" else 0, "/lib64/loader"))
        python.chmod(0o644 if spoiled == "mode" else 0o755)
    with pytest.raises(ConfigError) as caught:
        images.find_python(images.find_root(str(root)))
    assert says in caught.value.message and caught.value.fix


def elf(machine: int, loader: str) -> bytes:
    """The head of a program with one segment, which names its loader; 0: of this machine."""
    machine = machine or images.MACHINES.get(os.uname().machine, 0)
    word = loader.encode() + b"\0"
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHI", 2, machine, 1)
    head += struct.pack("<QQQIHHHHHH", 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return head + struct.pack("<IIQQQQQQ", 3, 4, 120, 0, 0, len(word), len(word), 1) + word


@pytest.mark.deep
@pytest.mark.needs("bwrap")
def test_an_old_python_and_a_missing_module_are_named(bundle: tuple[Path, str]) -> None:
    place, python = bundle
    old = place / "rootfs/etc/python3"
    old.write_text(
        f"#!{python}\nimport sys\nsys.version_info = (3, 7, 3)\nsys.version = '3.7.3'\n"
        "exec(sys.argv[sys.argv.index('-c') + 1])\n"
    )
    old.chmod(0o755)
    try:
        said = isolation_probe.probe_isolation(
            SandboxConfig(root=str(place), python="/etc/python3")
        ).interpreter_problem
    finally:
        old.unlink()
    assert "3.8 or newer, this is 3.7.3" in said
    found = isolation_probe.probe_isolation(
        SandboxConfig(root=str(place), python=python, imports=["only_here", "absent_here"])
    )
    assert "No module named 'absent_here'" in found.interpreter_problem
