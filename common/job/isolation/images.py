"""Images: the directory tree or OCI bundle in `sandbox.root`.

An image is the file system of the model's code.
"""

from __future__ import annotations

import json
import os
import platform
import struct
from pathlib import Path

from meshrl.common.base.errors import ConfigError

PYTHON_PATHS = ("/usr/bin/python3", "/usr/local/bin/python3", "/bin/python3")
MAX_LINKS = 40  # followed for one path, as many as Linux follows
# e_machine of the ELF header by uname's machine (elf.h).
MACHINES = {"x86_64": 62, "aarch64": 183, "riscv64": 243, "ppc64le": 21, "s390x": 22}
PT_INTERP = 3  # segment type of the program's loader
IMAGE_FIX = 'See docs/use/sandbox.md, "Images"'


def find_root(place: str) -> Path:
    """Return the root directory: `place`, or the root file system of an OCI bundle there.

    An OCI bundle has a `config.json` with `root.path`. ConfigError if `place` is neither.
    """
    path = Path(place)
    if not path.is_dir():
        raise ConfigError(f"there is no directory {place}", fix=IMAGE_FIX)
    bundle = path / "config.json"
    if not bundle.is_file():
        return path
    try:
        named = str(json.loads(bundle.read_text())["root"]["path"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{bundle} is not the configuration of an OCI bundle", fix=IMAGE_FIX
        ) from error
    root = path / named
    if not root.is_dir():
        raise ConfigError(
            f"{bundle} names the root {named}, which is not a directory", fix=IMAGE_FIX
        )
    return root


def resolve_in_image(root: Path, path: str) -> Path | None:
    """Return the location of an image's `path` on this host; None if it does not exist.

    Links are resolved inside the image, and none leads out of it.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    found: list[str] = []
    links = 0
    while parts:
        part = parts.pop(0)
        if part == "..":
            found = found[:-1]
            continue
        here = root.joinpath(*found, part)
        if here.is_symlink():
            links += 1
            target = os.readlink(here)
            if links > MAX_LINKS:
                return None
            if target.startswith("/"):
                found = []
            parts = [step for step in target.split("/") if step not in ("", ".")] + parts
        elif here.exists():
            found.append(part)
        else:
            return None
    return root.joinpath(*found)


def find_python(root: Path, interpreter: str = "") -> str:
    """Return the interpreter's path inside the image: `interpreter`, or the first usual one.

    ConfigError if it is missing or cannot run on this host: another architecture, no loader.
    """
    for path in [interpreter] if interpreter else PYTHON_PATHS:
        if not path.startswith("/"):
            raise ConfigError(f"{path} is not an absolute path inside the image", fix=IMAGE_FIX)
        program = resolve_in_image(root, path)
        if program is not None and program.is_file():
            _check_runnable(root, path, program)
            return path
    missing = interpreter or ", ".join(PYTHON_PATHS)
    raise ConfigError(
        f"{root} has no interpreter {missing}",
        fix="Install Python in the image, or set sandbox.python to the path of an "
        "interpreter inside it",
    )


def _check_runnable(root: Path, path: str, program: Path) -> None:
    if not os.access(program, os.X_OK):
        raise ConfigError(f"{path} of {root} is not executable", fix="Run `chmod a+x` on the file")
    with program.open("rb") as file:
        header = file.read(64)
        if header[:4] != b"\x7fELF":
            return  # a script, whose interpreter the kernel finds
        order = "<" if header[5] == 1 else ">"
        machine = struct.unpack_from(f"{order}H", header, 18)[0]
        expected = MACHINES.get(platform.machine(), machine)
        if machine != expected or header[4] != 2:
            raise ConfigError(
                f"{path} of {root} is a program of another architecture (ELF machine {machine}); "
                f"this host is {platform.machine()}",
                fix=f"Make the image for {platform.machine()}",
            )
        (offset,) = struct.unpack_from(f"{order}Q", header, 32)
        size, count = struct.unpack_from(f"{order}HH", header, 54)
        for number in range(count):
            file.seek(offset + number * size)
            segment = file.read(size)
            if struct.unpack_from(f"{order}I", segment)[0] == PT_INTERP:
                place, _, _, length = struct.unpack_from(f"{order}QQQQ", segment, 8)
                file.seek(place)
                loader = file.read(length).rstrip(b"\0").decode()
                if resolve_in_image(root, loader) is None:
                    raise ConfigError(
                        f"{path} of {root} needs the loader {loader}, which is missing in "
                        "the image",
                        fix="Add the C library that it was built with to the image",
                    )
