"""Places of jails: the control group, user and scratch directory that one has while it runs. It is
on disk where no mount namespace gives it one in memory.
"""

from __future__ import annotations

import itertools
import os
import secrets
import tempfile
from collections import deque
from dataclasses import dataclass

from meshrl.common.base.clock import Clock
from meshrl.common.job.isolation.runners import Runner
from meshrl.services.sandbox.isolation.resources import users
from meshrl.services.sandbox.isolation.resources.cgroups import PREFIX, Cgroup, Homes
from meshrl.services.sandbox.isolation.resources.limits import JailLimits

LEAVING_S, LEAVING_LOOKS = 0.002, 500  # for a free control group to become empty
ENDING_S, ENDING_LOOKS = 0.02, 100  # for one to become empty that is to be removed
GUEST_NICE = 3  # of guests that no control group weighs: each half of their keepers and of us
OVERHEAD_BYTES = 16 << 20  # what a fork and its kernel structures add to a control group
RUNNER_BYTES = 256 << 20  # of a runner's own processes and the kernel in them; runsc has 60 MiB
RUNNER_PROCESSES, RUNNER_THREADS = 256, 4  # threads of its own, and for one of the guest
DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NUMBERS = itertools.count()  # of control groups, which all launchers of a process name alike


@dataclass
class JailPlace:
    """What one jail has of its host."""

    group: Cgroup | None
    slot: int = -1  # of its user in the outer jail's block; -1: it has none of its own
    user: int = 0  # 0: the one that jails share
    scratch: str = ""  # on disk; empty: its files are in memory
    holders: int = 2  # the jail, and the zygote that may yet begin it


class JailPlaces:
    """The places of a launcher's jails, each used again once it is empty."""

    def __init__(
        self, clock: Clock, homes: Homes | None, runner: tuple[str, ...], on_disk: bool
    ) -> None:
        """`runner`: what starts containers, if something does; `on_disk`: jails work there."""
        self._clock, self._homes, self._runner, self._on_disk = clock, homes, runner, on_disk
        self._groups: deque[Cgroup] = deque()
        self.users = deque(users.given())  # of which no jail is, longest unused first
        self._made: list[Cgroup] = []
        self._littered: list[str] = []  # scratch directories that are still to be cleared away

    @property
    def nice(self) -> int:
        """What guests add to their niceness."""
        return 0 if self._homes and self._homes.cpu else GUEST_NICE

    async def take(self, limits: JailLimits, outer: int) -> JailPlace:
        """A place that no jail is in, for a jail in the outer jail of that process number."""
        place = JailPlace(await self._group(limits))
        try:
            if self.users:
                place.slot = self.users.popleft()
                place.user = users.block(outer) + place.slot
            if self._on_disk:
                place.scratch = make_scratch(place.user)
        except BaseException:
            self.give_back(place)
            raise
        return place

    def leave(self, place: JailPlace) -> None:
        """One of its holders needs it no more."""
        place.holders -= 1
        if not place.holders:
            self.give_back(place)

    def give_back(self, place: JailPlace) -> None:
        if place.slot >= 0:
            self.users.append(place.slot)
        if place.group is not None:
            self._groups.append(place.group)
        if place.scratch:
            self._littered.append(place.scratch)
            self._clear()

    async def _group(self, limits: JailLimits) -> Cgroup | None:
        """One that no jail is in. The last processes of a jail leave it a moment after its end, and
        its files a moment later.
        """
        if self._homes is None:
            return None
        bounds = limits.memory_bytes + OVERHEAD_BYTES, limits.processes
        if self._runner:  # a kernel's files are its memory, and it has threads for each process
            size = limits.memory_bytes + RUNNER_BYTES + limits.scratch_bytes
            processes = limits.processes + RUNNER_PROCESSES + RUNNER_THREADS * limits.processes
            bounds = size, processes
        group = self._empty_group(*bounds)
        for _ in range(LEAVING_LOOKS):
            if group is not None or not self._groups or self._runner:
                break  # a container takes longer to be taken down than another group to be made
            await self._clock.sleep(LEAVING_S)
            group = self._empty_group(*bounds)
        if group is None:
            group = Cgroup(self._homes, f"{PREFIX}{os.getpid()}-{next(_NUMBERS)}")
            self._made.append(group)
            try:
                group.limit(*bounds)
            except BaseException:
                self._groups.append(group)
                raise
        return group

    def _empty_group(self, memory_bytes: int, processes: int) -> Cgroup | None:
        for _ in range(len(self._groups)):
            self._groups.rotate(-1)
            group = self._groups[-1]
            if group.empty():
                if group.freezes:
                    group.freeze(False)
                if group.limit(memory_bytes, processes):
                    return self._groups.pop()
        return None

    @property
    def shares_users(self) -> bool:
        """Whether the kernel of a jail counts processes of its user elsewhere, too, unless it has
        one of its own.
        """
        return self._on_disk or (bool(self._runner) and not Runner(self._runner).runsc)

    def _clear(self) -> None:
        """Directories of jails that have ended; what still runs there keeps one for a moment."""
        self._littered = [place for place in self._littered if not remove_scratch(place)]

    async def stop(self) -> None:
        """Clears all away, once the jails have ended."""
        self._clear()
        for group in self._made:
            for _ in range(ENDING_LOOKS):
                if group.empty():
                    break
                await self._clock.sleep(ENDING_S)
            group.remove()
        self._made, self._groups = [], deque()


def make_scratch(user: int) -> str:
    """A new one; as root, of that user, or with 0 of the one that jails share."""
    place = tempfile.mkdtemp(prefix=PREFIX)
    if os.getuid() == 0:
        os.chown(place, user or users.PLAIN_ID, user or users.PLAIN_ID)
    return place


def remove_scratch(place: str) -> bool:
    """Removes it with all that a program has left there, however deep, closed or named; False if
    somebody still writes there, or it is not ours.

    Each directory is moved up before its content is looked at, so that neither the length of a path
    nor the depth of a recursion bounds what can be removed. No link is followed, as the program's
    last processes may still be there to place some.
    """
    mark, number = secrets.token_hex(8), 0
    pending = [""]
    try:
        top = os.open(place, DIRECTORY)
    except OSError:
        return not os.path.lexists(place)
    try:
        os.chmod(f"/proc/self/fd/{top}", 0o700)
        while pending:
            name = pending.pop()
            folder = os.open(name or ".", DIRECTORY, dir_fd=top)
            try:
                opened = f"/proc/self/fd/{folder}"
                os.chmod(opened, 0o700)
                for entry in os.listdir(os.fsencode(opened)):
                    moved = f"{mark}-{number}"
                    if _moved_up(folder, entry, top, moved):
                        pending.append(moved)
                        number += 1
            finally:
                os.close(folder)
            if name:
                os.rmdir(name, dir_fd=top)
        os.rmdir(place)
    except OSError:
        return False
    finally:
        os.close(top)
    return True


def _moved_up(folder: int, entry: bytes, top: int, name: str) -> bool:
    """Moves a directory to the top; removes anything else, and says so."""
    try:
        below = os.open(entry, DIRECTORY, dir_fd=folder)
    except NotADirectoryError:
        os.unlink(entry, dir_fd=folder)
        return False
    try:
        os.chmod(f"/proc/self/fd/{below}", 0o700)  # to be moved is to be written
    finally:
        os.close(below)
    os.rename(entry, name, src_dir_fd=folder, dst_dir_fd=top)
    return True
