"""The OCI bundle of a jail: a root of our own making, read-only, with an interpreter and nothing of
this host that bubblewrap would not show.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from services.sandbox.isolation.outer_jail.interpreters import RootContent
from services.sandbox.isolation.resources.limits import JailLimits

# The keeper is root inside, which is not root here, and needs no more: the guest gets a user of its
# own, and is ended from there.
CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")
READ_ONLY = ("bind", "ro", "nosuid", "nodev")
OPEN_FILES = 1024  # of the relay and the keeper; the guest has a limit of its own


def lay_out(root: Path, shown: RootContent) -> None:
    """Makes the root: the places on which the rest is bound, and the links."""
    for inside, place in shown.binds.items():
        target = root / inside.lstrip("/")
        if os.path.isdir(place):
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
    for name in ("proc", "dev", "tmp", "etc"):
        (root / name).mkdir(exist_ok=True)
    for inside, text in shown.links.items():
        (root / inside.lstrip("/")).symlink_to(text)
    for made in (root, *(each for each in root.rglob("*") if not each.is_symlink())):
        made.chmod(0o755)


def configuration(
    root: Path, shown: RootContent, arguments: list[str], limits: JailLimits
) -> dict[str, Any]:
    """`config.json` of the OCI runtime specification, 1.0."""
    scratch = ["nosuid", "nodev", "mode=1777", f"size={limits.scratch_bytes}"]
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": scratch},
    ]
    mounts += [
        {"destination": inside, "type": "bind", "source": place, "options": list(READ_ONLY)}
        for inside, place in shown.binds.items()
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
