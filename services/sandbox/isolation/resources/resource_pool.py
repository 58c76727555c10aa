"""Resources of jails: the control group, user and scratch directory of each running jail.

The scratch directory is on disk where no mount namespace provides one in memory.
"""

from __future__ import annotations

import itertools
import os
import secrets
import tempfile
from collections import deque
from dataclasses import dataclass

from meshrl.common.base.clock import Clock
from meshrl.common.job.isolation.runners import ContainerRunner
from meshrl.services.sandbox.isolation.resources import users
from meshrl.services.sandbox.isolation.resources.cgroups import PREFIX, Cgroup, CgroupParents
from meshrl.services.sandbox.isolation.resources.limits import JailLimits

EMPTY_POLL_S, MAX_EMPTY_POLLS = 0.002, 500  # for a free control group to become empty
REMOVE_POLL_S, MAX_REMOVE_POLLS = 0.02, 100  # for one to become empty before its removal
GUEST_NICE = 3  # of guests that no control group weighs: half of init's share and ours
OVERHEAD_BYTES = 16 << 20  # of a fork and its kernel structures in a control group
RUNNER_BYTES = 256 << 20  # of a runner's own processes and the kernel in them; runsc has 60 MiB
RUNNER_PROCESSES, RUNNER_THREADS = 256, 4  # threads of its own, and for one of the guest
OPEN_DIRECTORY_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CGROUP_NUMBERS = itertools.count()  # of control groups, which all launchers of a process share


@dataclass
class JailResources:
    """Resources that one jail has of its host."""

    cgroup: Cgroup | None
    user_index: int = -1  # of its user in the outer jail's block; -1: none of its own
    user_id: int = 0  # 0: the user that jails share
    scratch_path: str = ""  # on disk; empty: its files are in memory
    reference_count: int = 2  # the jail, and the zygote that may yet fork it


class JailResourcePool:
    """Pool of a launcher's jail resources, each reused once it is empty."""

    def __init__(
        self,
        clock: Clock,
        cgroup_parents: CgroupParents | None,
        runner: tuple[str, ...],
        scratch_on_disk: bool,
    ) -> None:
        """Create a pool; `runner`, if set, starts containers; `scratch_on_disk`: jails use disk."""
        self._clock, self._cgroup_parents, self._runner, self._scratch_on_disk = (
            clock,
            cgroup_parents,
            runner,
            scratch_on_disk,
        )
        self._free_cgroups: deque[Cgroup] = deque()
        # without a jail, longest unused first
        self.free_user_indices = deque(users.available_indices())
        self._created_cgroups: list[Cgroup] = []
        self._scratch_to_remove: list[str] = []  # scratch directories to be removed

    @property
    def guest_nice(self) -> int:
        """Increase of the guests' niceness."""
        return 0 if self._cgroup_parents and self._cgroup_parents.cpu else GUEST_NICE

    async def acquire(self, limits: JailLimits, outer_pid: int) -> JailResources:
        """Return unused resources for a jail in the outer jail with that pid."""
        place = JailResources(await self._acquire_cgroup(limits))
        try:
            if self.free_user_indices:
                place.user_index = self.free_user_indices.popleft()
                place.user_id = users.first_user_id(outer_pid) + place.user_index
            if self._scratch_on_disk:
                place.scratch_path = create_scratch(place.user_id)
        except BaseException:
            self.release(place)
            raise
        return place

    def drop_reference(self, resources: JailResources) -> None:
        """Drop a holder's reference, and release the resources after the last."""
        resources.reference_count -= 1
        if not resources.reference_count:
            self.release(resources)

    def release(self, resources: JailResources) -> None:
        if resources.user_index >= 0:
            self.free_user_indices.append(resources.user_index)
        if resources.cgroup is not None:
            self._free_cgroups.append(resources.cgroup)
        if resources.scratch_path:
            self._scratch_to_remove.append(resources.scratch_path)
            self._remove_scratch_directories()

    async def _acquire_cgroup(self, limits: JailLimits) -> Cgroup | None:
        """Return a control group without a jail.

        The last processes of a jail leave it a moment after its end, and its files a moment later.
        """
        if self._cgroup_parents is None:
            return None
        bounds = limits.memory_bytes + OVERHEAD_BYTES, limits.processes
        if self._runner:  # a kernel's files are its memory, and it has threads for each process
            size = limits.memory_bytes + RUNNER_BYTES + limits.scratch_bytes
            processes = limits.processes + RUNNER_PROCESSES + RUNNER_THREADS * limits.processes
            bounds = size, processes
        group = self._take_empty_cgroup(*bounds)
        for _ in range(MAX_EMPTY_POLLS):
            if group is not None or not self._free_cgroups or self._runner:
                break  # removing a container takes longer than making another group
            await self._clock.sleep(EMPTY_POLL_S)
            group = self._take_empty_cgroup(*bounds)
        if group is None:
            group = Cgroup(self._cgroup_parents, f"{PREFIX}{os.getpid()}-{next(_CGROUP_NUMBERS)}")
            self._created_cgroups.append(group)
            try:
                group.set_limits(*bounds)
            except BaseException:
                self._free_cgroups.append(group)
                raise
        return group

    def _take_empty_cgroup(self, memory_bytes: int, processes: int) -> Cgroup | None:
        for _ in range(len(self._free_cgroups)):
            self._free_cgroups.rotate(-1)
            group = self._free_cgroups[-1]
            if group.is_empty():
                if group.can_freeze:
                    group.set_frozen(False)
                if group.set_limits(memory_bytes, processes):
                    return self._free_cgroups.pop()
        return None

    @property
    def shares_users(self) -> bool:
        """True if the kernel also counts other processes of a jail's user.

        This is so unless each jail has a user of its own.
        """
        return self._scratch_on_disk or (
            bool(self._runner) and not ContainerRunner(self._runner).is_runsc
        )

    def _remove_scratch_directories(self) -> None:
        """Remove directories of ended jails; a process that still writes there delays it."""
        self._scratch_to_remove = [
            place for place in self._scratch_to_remove if not remove_scratch(place)
        ]

    async def stop(self) -> None:
        """Remove all resources, once the jails have ended."""
        self._remove_scratch_directories()
        for group in self._created_cgroups:
            for _ in range(MAX_REMOVE_POLLS):
                if group.is_empty():
                    break
                await self._clock.sleep(REMOVE_POLL_S)
            group.remove()
        self._created_cgroups, self._free_cgroups = [], deque()


def create_scratch(user_id: int) -> str:
    """Create a scratch directory; as root, of that user, or with 0 of the user that jails share."""
    place = tempfile.mkdtemp(prefix=PREFIX)
    if os.getuid() == 0:
        os.chown(place, user_id or users.PLAIN_ID, user_id or users.PLAIN_ID)
    return place


def remove_scratch(path: str) -> bool:
    """Remove a scratch directory with all that a program has left there.

    False if a process still writes there, or the directory is not ours. Each directory is moved up
    before its content is read, so that neither the length of a path nor the depth of a recursion
    bounds what can be removed. No link is followed, as the program's last processes may still
    create some.
    """
    mark, number = secrets.token_hex(8), 0
    pending = [""]
    try:
        top = os.open(path, OPEN_DIRECTORY_FLAGS)
    except OSError:
        return not os.path.lexists(path)
    try:
        os.chmod(f"/proc/self/fd/{top}", 0o700)
        while pending:
            name = pending.pop()
            folder = os.open(name or ".", OPEN_DIRECTORY_FLAGS, dir_fd=top)
            try:
                opened = f"/proc/self/fd/{folder}"
                os.chmod(opened, 0o700)
                for entry in os.listdir(os.fsencode(opened)):
                    moved = f"{mark}-{number}"
                    if _move_up_or_unlink(folder, entry, top, moved):
                        pending.append(moved)
                        number += 1
            finally:
                os.close(folder)
            if name:
                os.rmdir(name, dir_fd=top)
        os.rmdir(path)
    except OSError:
        return False
    finally:
        os.close(top)
    return True


def _move_up_or_unlink(folder: int, entry: bytes, top: int, name: str) -> bool:
    """Move a directory to the top, or unlink anything else; return whether it was moved."""
    try:
        below = os.open(entry, OPEN_DIRECTORY_FLAGS, dir_fd=folder)
    except NotADirectoryError:
        os.unlink(entry, dir_fd=folder)
        return False
    try:
        os.chmod(f"/proc/self/fd/{below}", 0o700)  # moving it needs write permission
    finally:
        os.close(below)
    os.rename(entry, name, src_dir_fd=folder, dst_dir_fd=top)
    return True
