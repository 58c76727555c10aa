"""Detection of a container, and of the user, rights and files that the kernel leaves this process.

Uses only the standard library, because sandboxes import it too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

MARKER_FILES = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
KUBERNETES_ENV = "KUBERNETES_SERVICE_HOST"  # in the environment of every process of a pod
CLONE_NEWUSER = 0x10000000  # CLONE_NEWUSER of <linux/sched.h>
KERNEL_FILESYSTEMS = {"proc", "sysfs", "cgroup", "cgroup2", "devtmpfs", "devpts", "mqueue"}
SECCOMP_MODES = {"0": "none", "1": "strict", "2": "filtered"}


@dataclass(frozen=True)
class ProcessRights:
    """Rights of this process in the kernel."""

    user_id: int
    capability_count: int  # effective capabilities
    seccomp: str  # none | strict | filtered
    no_new_privileges: bool  # no program raises its rights (no_new_privs)
    has_read_only_root: bool


def detect_container() -> str:
    """Return `docker`, `podman`, `kubernetes` or another container's name; empty outside a
    container.
    """
    if os.environ.get(KUBERNETES_ENV):
        return "kubernetes"
    for mark, name in MARKER_FILES.items():
        if Path(mark).exists():
            return name
    return os.environ.get("container", "")  # noqa: SIM112 - as systemd-nspawn and LXC set it


def read_rights() -> ProcessRights:
    """Read the rights of this process."""
    status = dict(
        line.split(":\t", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":\t" in line
    )
    return ProcessRights(
        user_id=os.geteuid(),
        capability_count=int(status.get("CapEff", "0"), 16).bit_count(),
        seccomp=SECCOMP_MODES.get(status.get("Seccomp", "0").strip(), "none"),
        no_new_privileges=status.get("NoNewPrivs", "0").strip() == "1",
        has_read_only_root=bool(os.statvfs("/").f_flag & os.ST_RDONLY),
    )


def list_writable_mounts() -> list[str]:
    """List the writable mount points, including the root if it is writable."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, system, *_ = line.split(" ")
        place = place.encode().decode("unicode_escape")
        if system in KERNEL_FILESYSTEMS or not os.path.isdir(place):
            continue
        is_eligible = place != "/dev" and not place.startswith(("/proc/", "/sys/"))
        if is_eligible and os.access(place, os.W_OK) and _is_writable(place):
            found.append(place)
    return sorted(set(found))


def is_proc_masked() -> bool:
    """Return True if parts of /proc are covered.

    The kernel then allows no namespace a /proc of its own, which a bubblewrap jail needs.
    """
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return any(line.split(" ")[1].startswith("/proc/") for line in lines)


def explain_user_namespace_rejection() -> str:
    """Explain why a process may create no user namespace here; empty if it may. Tries it in a
    child.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        number = 0 if libc.unshare(CLONE_NEWUSER) == 0 else ctypes.get_errno()
        os.write(writes, bytes([number]))
        os._exit(0)
    os.close(writes)
    reply = os.read(reads, 1)
    os.close(reads)
    os.waitpid(child, 0)
    number = reply[0] if reply else errno.EIO
    if number == 0:
        return ""
    if number == errno.EPERM and read_rights().seccomp == "filtered":
        return "the container's seccomp profile denies user namespaces"
    return f"user namespaces are denied: {os.strerror(number)}"


def _is_writable(place: str) -> bool:
    try:
        with tempfile.TemporaryFile(dir=place):
            return True
    except OSError:
        return False
