"""System calls for which Python has no function."""

from __future__ import annotations

import ctypes
import os
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_NEWTIME = 0x00000080
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
# linux/statfs.h and linux/mount.h: no set-user-id, devices, programs; of access times none, none of
# directories, or relative ones.
STATFS_TO_MOUNT_FLAGS = ((2, 2), (4, 4), (8, 8), (0x400, 0x400), (0x800, 0x800), (0x1000, 0x200000))
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 47, 2
CAP_SETGID, CAP_SETUID = 6, 7
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
CAP_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)
# Looked up here, before any fork, which would look it up again.
libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
libc.mount.argtypes = [*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p]
libc.unshare.argtypes = [ctypes.c_int]
libc.setns.argtypes = [ctypes.c_int, ctypes.c_int]
libc.capset.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
libc.syscall.restype = ctypes.c_long


def call_libc(name: str, *arguments: object) -> int:
    """Call a function of the C library and return its result; OSError names the function."""
    result: int = getattr(libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    call_libc("unshare", flags)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = source.encode(), target.encode(), kind.encode() or None
    call_libc("mount", *words, flags, options.encode() or None)


def remount_read_only(path: str) -> None:
    """Remount a mount point read-only: files keep their times, owners and modes.

    A device can still be written. The flags of the mount are retained, as a mount of another user
    namespace requires.
    """
    has = os.statvfs(path).f_flag
    mount_flags = sum(ours for theirs, ours in STATFS_TO_MOUNT_FLAGS if has & theirs)
    mount("none", path, "", MS_REMOUNT | MS_BIND | MS_RDONLY | mount_flags)


def prctl(option: int, value: int, third: int = 0) -> None:
    call_libc("prctl", option, value, third, 0, 0)


def set_parent_death_signal(parent: int, signal_number: int) -> bool:
    """Request a signal at the end of our parent; False if it has ended already."""
    prctl(PR_SET_PDEATHSIG, signal_number)
    return os.getppid() == parent


def switch_user(user_id: int) -> None:
    """Switch to that user, to the group of that number, and to no other group."""
    os.setgroups([])
    os.setresgid(user_id, user_id, user_id)
    os.setresuid(user_id, user_id, user_id)


def drop_capabilities() -> None:
    """Drop all capabilities; no program can regain any, as none gives new privileges any more."""
    header = struct.pack("Ii", CAP_VERSION_3, 0)
    call_libc("capset", header, bytes(24))
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def retain_capabilities(capabilities: tuple[int, ...]) -> None:
    """Retain only these capabilities, also for programs that we execute."""
    bits = sum(1 << capability for capability in capabilities)
    call_libc(
        "capset", struct.pack("Ii", CAP_VERSION_3, 0), struct.pack("6I", *[bits] * 3, 0, 0, 0)
    )
    for capability in capabilities:
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability)


def list_mapped_users() -> list[range]:
    """Return the users of our namespace; no process can switch to another user."""
    with open("/proc/self/uid_map") as file:
        lines = [list(map(int, line.split())) for line in file]
    return [range(first, first + count) for first, _, count in lines]


def map_own_ids(user: int, group: int, proc_fd: int) -> None:
    """Map our outer ids into a new user namespace; `proc_fd` is a /proc."""
    write_file("self/setgroups", "deny", proc_fd)
    write_file("self/uid_map", f"{user} {user} 1", proc_fd)
    write_file("self/gid_map", f"{group} {group} 1", proc_fd)


def write_file(path: str, text: str, directory_fd: int | None = None) -> None:
    """Write text to a file; `directory_fd`: the directory to which `path` is relative."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory_fd)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
