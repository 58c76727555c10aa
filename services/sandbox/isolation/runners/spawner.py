"""Forks a bridge for each jail of a runner, as a zygote forks keepers:
`python -m services.sandbox.isolation.runners.spawner JSON`.

One packet in for each jail, with its descriptors; one out when its bridge has been forked. A
container starts afresh for each. It holds a directory for its containers, by whose name what a
killed sandbox has left is found.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.base.errors import MeshError
from common.job.isolation.runners import Runner
from services.sandbox.isolation.outer_jail.outer import INSIDE, PACKAGES
from services.sandbox.isolation.resources.users import PLAIN_ID
from services.sandbox.isolation.runners import bundle, leftovers
from services.sandbox.isolation.runners.bridge import Bridge
from services.sandbox.isolation.runners.first import CARRIED, SHOWN
from services.sandbox.jail import zygote
from services.sandbox.jail.confinement import kernel
from services.sandbox.jail.metering import watch
from services.sandbox.jail.wire import frames, mux

IN_CONTAINER = "/tmp"  # scratch of a container that has a /tmp of its own
SOURCES = Path(bundle.JAIL)


@dataclass(frozen=True)
class Spawner:
    """What its containers are made of."""

    control: int  # descriptor of its socket
    folder: str  # where its containers have their directories
    command: tuple[str, ...]  # the job's `sandbox.runner`
    python: str
    isolated: bool
    places: tuple[str, ...]
    warm: tuple[str, ...]
    packages: tuple[str, ...]
    root: str

    def argument(self) -> str:
        return json.dumps(asdict(self))


class Containers:
    """Begins them, each with a number."""

    def __init__(self, spawner: Spawner) -> None:
        self._spawner, self._count = spawner, 0
        self._runner = Runner(spawner.command)
        self._runner.check()
        self._folder = Path(spawner.folder)
        self._root = self._folder / leftovers.ROOT
        self._carried = b""
        if self._runner.bundled:
            image = spawner.root
            self._shown = (
                bundle.of_image(image, spawner.packages)
                if image
                else bundle.of_host(spawner.places, spawner.packages)
            )
            self._root.mkdir()
            bundle.lay_out(self._root, self._shown)
        else:
            self._carried = carried()

    def begin(self, request: dict[str, Any], fds: dict[str, int]) -> None:
        """In a fork: never returns."""
        spawner, runner = self._spawner, self._runner
        place = self._folder / str(self._count)
        place.mkdir()
        limits = request["limits"]
        # Its clock is watched from here, where one sees what it waits for a core.
        inside = {**limits, "wall_s": watch.SLOWEST * limits["wall_s"] + watch.SLOWEST_S}
        scratch = IN_CONTAINER
        if not runner.bundled:
            scratch = f"{IN_CONTAINER}/{self._folder.name}-{place.name}"
        asked = {
            "limits": inside,
            "channels": [name for name in fds if name in mux.NAMED],
            "warm": spawner.warm,
            "searched_last": PACKAGES if runner.bundled and spawner.packages else "",
            "scratch": scratch,
            "user": request["user"] or PLAIN_ID,
            "nice": 0,
            "counted": request["counted"],
            "stands": request.get("stands", False),
        }
        flags = ["-I", "-S"] if spawner.isolated else ["-I"]
        code = SHOWN.format(INSIDE) if runner.bundled else CARRIED
        arguments = [spawner.python, *flags, "-c", code]
        if runner.bundled:
            document = bundle.configuration(self._root, self._shown, arguments, limits)
            bundle.write(place, document)
        Bridge(runner, place, arguments, self._carried, limits, asked, fds, request["nice"]).run()

    def serve(self, control: socket.socket) -> None:
        while True:
            packet, descriptors = zygote.received(control)
            if not packet:
                return
            request = json.loads(packet)
            named = dict(zip(request["descriptors"], descriptors, strict=True))
            self._count += 1
            try:
                if os.fork() == 0:
                    self._become_bridge(control)
                    self.begin(request, named)
            except OSError as error:
                zygote.refuse(named["keeper"], error)
            finally:
                for fd in descriptors:
                    os.close(fd)
            control.send(zygote.DONE)

    def _become_bridge(self, control: socket.socket) -> None:
        """Apart from the spawner, whose session is killed with it, and told when that has ended."""
        parent = os.getppid()
        control.close()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(0)


def carried() -> bytes:
    """The package that runs inside, as a frame."""
    files = {}
    for path in SOURCES.rglob("*.py"):
        parts = ["jail", *path.relative_to(SOURCES).with_suffix("").parts]
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return frames.pack(files)


def main() -> None:
    values = json.loads(sys.argv[1])
    tuples = ("command", "places", "warm", "packages")
    spawner = Spawner(**{**values, **{name: tuple(values[name]) for name in tuples}})
    parent = os.getppid()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the sandbox has ended")
    os.umask(0o022)
    control = socket.socket(fileno=spawner.control)
    leftovers.sweep()
    try:
        containers = Containers(spawner)
    except (MeshError, OSError) as error:
        sys.exit(f"sandbox.runner: {error}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.send(b"warm")
    containers.serve(control)


if __name__ == "__main__":
    main()
