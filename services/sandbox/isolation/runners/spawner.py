"""Spawner that forks a bridge for each jail of a runner, as a zygote forks init processes.

`python -m meshrl.services.sandbox.isolation.runners.spawner CONTROL FOLDER INTERPRETER`. Each jail
has one packet in, with its descriptors, and one packet out when its bridge has been forked. Each
gets a new container. The spawner has a directory for its containers, by whose name the remains of a
killed sandbox are found.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import MeshError
from meshrl.common.job.isolation.runners import ContainerRunner
from meshrl.services.sandbox.isolation.outer_jail.interpreters import (
    JAIL_PACKAGE,
    MOUNT_POINT,
    PACKAGES_MOUNT_POINT,
    Interpreter,
    RootContent,
    list_root_content,
)
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.resources.users import PLAIN_ID
from meshrl.services.sandbox.isolation.runners import container_cleanup
from meshrl.services.sandbox.isolation.runners.bridge import Bridge
from meshrl.services.sandbox.jail import zygote
from meshrl.services.sandbox.jail.confinement import syscalls
from meshrl.services.sandbox.jail.metering import watch
from meshrl.services.sandbox.jail.wire import frames, mux

# The init process is root inside, which is not root here, and needs no more. The guest gets a user
# of its own, and is ended from there.
CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")
READ_ONLY = ("bind", "ro", "nosuid", "nodev")
OPEN_FILES = 1024  # of the relay and the init process; the guest has a limit of its own
CONTAINER_SCRATCH = "/tmp"  # scratch of a container that has a /tmp of its own
JAIL_SOURCES = Path(JAIL_PACKAGE)

# ---- the first lines that Python runs in a container --------------------------------------------

VERSION = """
import sys
sys.version_info >= (3, 8) or sys.exit(
    "meshrl: jails need Python 3.8 or newer, this is " + sys.version
)
"""
# Run where no bundle shows the package: it comes as the first frame, and is imported from that.
STREAMED_PACKAGE_CODE = (
    VERSION
    + """import importlib.util, json, os
def exactly(size):
    parts = b""
    while len(parts) < size:
        part = os.read(0, size - len(parts))
        if not part:
            sys.exit("the sandbox has exited")
        parts += part
    return parts
files = json.loads(exactly(int.from_bytes(exactly(4), "little")))
class Carried:
    def find_spec(self, name, path=None, target=None):
        if name in files:
            package = any(each.startswith(name + ".") for each in files)
            return importlib.util.spec_from_loader(name, self, is_package=package)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        module.__file__ = "<meshrl>/" + module.__name__
        exec(compile(files[module.__name__], module.__file__, "exec"), module.__dict__)
sys.meta_path.insert(0, Carried())
import jail.relay
jail.relay.main()
"""
)
MOUNTED_PACKAGE_CODE = (
    VERSION
    + """sys.path.insert(0, {!r})
import jail.relay
sys.path.pop(0)
jail.relay.main()
"""
)


class ContainerSpawner:
    """Spawner of numbered containers."""

    def __init__(self, directory: Path, interpreter: Interpreter) -> None:
        """Create a spawner; `directory`: where its containers have their directories."""
        self._interpreter, self._container_number = interpreter, 0
        self._runner = ContainerRunner(interpreter.runner)
        self._runner.check()
        self._directory = directory
        self._root = self._directory / container_cleanup.ROOT
        self._package_frame = b""
        if self._runner.needs_bundle:
            self._root_content = list_root_content(interpreter)
            self._root.mkdir()
            create_root(self._root, self._root_content)
        else:
            self._package_frame = pack_jail_package()

    def _run_bridge(self, packet: bytes, descriptors: list[int]) -> None:
        """Run a bridge in a forked process: never returns."""
        # Apart from the spawner, whose session is killed with it, and signalled at its end.
        parent = os.getppid()
        self._control.close()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not syscalls.set_parent_death_signal(parent, signal.SIGTERM):
            os._exit(0)
        request: dict[str, Any] = json.loads(packet)
        fds = dict(zip(request["descriptors"], descriptors, strict=True))
        interpreter, runner = self._interpreter, self._runner
        place = self._directory / str(self._container_number)
        place.mkdir()
        limits = JailLimits(**request["limits"])
        # Its clock is measured here, where its waits for a core are visible.
        inside = replace(
            limits, wall_s=watch.MAX_SLOWDOWN * limits.wall_s + watch.MAX_SLOWDOWN_EXTRA_S
        )
        own = "" if runner.needs_bundle else f"/{self._directory.name}-{place.name}"
        jail_request = {
            "limits": inside.to_document(),
            "channels": [name for name in fds if name in mux.CHANNELS_BY_NAME],
            "preloaded_modules": interpreter.preloaded_modules,
            "searched_last": PACKAGES_MOUNT_POINT
            if runner.needs_bundle and interpreter.packages
            else "",
            "scratch": f"{CONTAINER_SCRATCH}{own}",
            "user": request["user"] or PLAIN_ID,
            "nice": 0,
            "counted": request["counted"],
            "stands": request.get("stands", False),
        }
        arguments = interpreter.build_command(
            MOUNTED_PACKAGE_CODE.format(MOUNT_POINT)
            if runner.needs_bundle
            else STREAMED_PACKAGE_CODE
        )
        if runner.needs_bundle:
            document = build_oci_config(self._root, self._root_content, arguments, limits)
            (place / "config.json").write_text(json.dumps(document))
        Bridge(
            runner,
            place,
            arguments,
            self._package_frame,
            limits,
            jail_request,
            fds,
            request["nice"],
        ).run()

    def serve(self, control: socket.socket) -> None:
        self._control = control

        def prepare() -> None:
            self._container_number += 1

        zygote.serve(control, self._run_bridge, prepare)


def pack_jail_package() -> bytes:
    """Pack the package that runs inside, as a frame."""
    files = {}
    for path in JAIL_SOURCES.rglob("*.py"):
        parts = ["jail", *path.relative_to(JAIL_SOURCES).with_suffix("").parts]
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return frames.pack(files)


# ---- OCI bundles: read-only roots, with nothing of this host that bubblewrap would hide ---------


def create_root(root: Path, content: RootContent) -> None:
    """Create the root: mount points for the rest, and the links."""
    for inside, place in content.binds.items():
        target = root / inside.lstrip("/")
        if os.path.isdir(place):
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
    for name in ("proc", "dev", "tmp", "etc"):
        (root / name).mkdir(exist_ok=True)
    for inside, text in content.links.items():
        (root / inside.lstrip("/")).symlink_to(text)
    for path in (root, *(each for each in root.rglob("*") if not each.is_symlink())):
        path.chmod(0o755)


def build_oci_config(
    root: Path, content: RootContent, arguments: list[str], limits: JailLimits
) -> dict[str, Any]:
    """Build `config.json` of the OCI runtime specification, 1.0."""
    scratch = ["nosuid", "nodev", "mode=1777", f"size={limits.scratch_bytes}"]
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": scratch},
    ]
    mounts += [
        {"destination": inside, "type": "bind", "source": place, "options": list(READ_ONLY)}
        for inside, place in content.binds.items()
    ]
    kinds = ("effective", "permitted", "bounding")
    return {
        "ociVersion": "1.0.2",
        "hostname": "jail",
        "root": {"path": str(root), "readonly": True},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "cwd": "/",
            "args": arguments,
            "env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"],
            "noNewPrivileges": True,
            "capabilities": {kind: list(CAPABILITIES) for kind in kinds},
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": OPEN_FILES, "hard": OPEN_FILES}],
        },
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/sys/firmware"],
            "readonlyPaths": ["/proc/sys", "/proc/sysrq-trigger"],
        },
    }


def main() -> None:
    parent = os.getppid()
    if not syscalls.set_parent_death_signal(parent, signal.SIGKILL):
        sys.exit("the sandbox has exited")
    os.umask(0o022)
    control = socket.socket(fileno=int(sys.argv[1]))
    container_cleanup.remove_stale()
    try:
        containers = ContainerSpawner(Path(sys.argv[2]), Interpreter.decode(sys.argv[3]))
    except (MeshError, OSError) as error:
        sys.exit(f"sandbox.runner: {error}")
    containers.serve(control)


if __name__ == "__main__":
    main()
