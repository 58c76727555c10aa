"""Control groups of jails: bound the memory and processes of each as a whole, on cgroup v1 or
v2.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "meshrl-jail-"
CONTROLLERS = ("memory", "pids")


@dataclass(frozen=True)
class Homes:
    """Directories in which groups can be made: one for both controllers (v2), or one for each."""

    version: int
    places: tuple[Path, ...]


def find() -> Homes | None:
    """Where this process may make groups with limits; None where it may not."""
    own = dict(_own())
    for version in (2, 1):
        homes = _unified(own) if version == 2 else _separate(own)
        if homes is not None and _works(homes):
            return homes
    return None


def _own() -> list[tuple[str, str]]:
    """(controller, path) of our groups; the controller is empty for v2."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        found += [(name, path) for name in controllers.split(",")]
    return found


def _unified(own: dict[str, str]) -> Homes | None:
    """A group with processes cannot hand controllers on, so its ancestors are looked at, too."""
    if not (ROOT / "cgroup.controllers").exists() or "" not in own:
        return None
    place = ROOT / own[""].lstrip("/")
    for home in (place, *place.parents):
        with contextlib.suppress(OSError):
            (home / "cgroup.subtree_control").write_text("+memory +pids")
        with contextlib.suppress(OSError):
            if set(CONTROLLERS) <= set((home / "cgroup.subtree_control").read_text().split()):
                return Homes(2, (home,))
        if home == ROOT:
            break
    return None


def _separate(own: dict[str, str]) -> Homes | None:
    if not all(name in own and (ROOT / name / "tasks").exists() for name in CONTROLLERS):
        return None
    return Homes(1, tuple(ROOT / name / own[name].lstrip("/") for name in CONTROLLERS))


def _works(homes: Homes) -> bool:
    try:
        group = Cgroup(homes, f"{PREFIX}probe-{os.getpid()}")
    except OSError:
        return False
    try:
        group.limit(64 << 20, 8)
    except OSError:
        return False
    finally:
        group.remove()
    return True


class Cgroup:
    """One jail's; used again when it is empty."""

    def __init__(self, homes: Homes, name: str) -> None:
        self._version = homes.version
        self._places = [home / name for home in homes.places]
        self._limits = (0, 0)
        self.lists: list[int] = []  # descriptors of its lists of processes, opened for writing
        try:
            for place in self._places:
                place.mkdir(exist_ok=True)
                flags = os.O_WRONLY | os.O_CLOEXEC
                self.lists.append(os.open(place / "cgroup.procs", flags))
        except OSError:
            self.remove()
            raise

    def limit(self, memory_bytes: int, processes: int) -> None:
        if (memory_bytes, processes) == self._limits:
            return
        memory, pids = self._places[0], self._places[-1]
        if self._version == 2:
            (memory / "memory.max").write_text(str(memory_bytes))
            with contextlib.suppress(OSError):  # a kernel without swap accounting
                (memory / "memory.swap.max").write_text("0")
        else:
            (memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
        (pids / "pids.max").write_text(str(processes))
        self._limits = (memory_bytes, processes)

    def killed(self) -> int:
        """Processes that went over the memory limit, so far."""
        name = "memory.events" if self._version == 2 else "memory.oom_control"
        for line in (self._places[0] / name).read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    def empty(self) -> bool:
        return all(not (place / "cgroup.procs").read_text() for place in self._places)

    def remove(self) -> None:
        """Removes the directories of the group, if nobody is left in them."""
        for fd in self.lists:
            os.close(fd)
        self.lists = []
        for place in self._places:
            with contextlib.suppress(OSError):
                place.rmdir()


def sweep(homes: Homes) -> None:
    """Removes groups whose sandbox, whose process number is in their names, has ended."""
    for home in homes.places:
        for place in home.glob(f"{PREFIX}*"):
            owner = place.name.removeprefix(PREFIX).partition("-")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                with contextlib.suppress(OSError):
                    place.rmdir()
