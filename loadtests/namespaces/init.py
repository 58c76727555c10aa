"""Init process of a host, which sets up a file tree of its own and then waits for its end.

It starts in new namespaces with a `Tree` as JSON for its argument, and prints "ready" once the tree
exists. It reaps its exited children. It exits when its standard input ends, because the host was
closed or its owner has exited; the kernel then ends all other processes of the host.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HOME = "/host"  # working directory of commands, and $HOME
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "opt")
WRITABLE = ("tmp", "var", "run", "root", "host")  # directories of the host's own, on the disk
SHARED_MEMORY = "size=50%"
SPACES = ("--net", "--pid", "--fork", "--mount", "--uts", "--ipc")


def are_permitted() -> bool:
    """Return whether this process may make the namespaces that hosts are, and their tunnel."""
    if os.geteuid() != 0 or not os.path.exists("/dev/net/tun") or not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", *SPACES, "true"], capture_output=True).returncode == 0


@dataclass(frozen=True)
class Tree:
    """Parts of a host's file tree."""

    name: str
    root: str  # an empty directory, where its root is put together
    files: str  # what it writes goes there, on this machine's disk
    shown: tuple[str, ...]  # directories of this machine that it sees, and cannot write to
    names: dict[str, str]  # addresses of all hosts, by name
    groups: tuple[str, ...] = ()  # files of control groups to enter
    shared: tuple[str, ...] = ()  # a directory of this machine, and where all hosts write to it


def mounted(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def grow(tree: Tree) -> None:
    """Make the tree the root of this process's mount namespace."""
    root, files = Path(tree.root), Path(tree.files)
    mounted("--make-rprivate", "/")
    mounted("-t", "tmpfs", "-o", "mode=755,size=1m", "root", tree.root)
    for name in SYSTEM:
        outside = Path("/") / name
        if outside.is_symlink():
            (root / name).symlink_to(os.readlink(outside))
        elif outside.is_dir():
            _bind_read_only(outside, root)
    for place in tree.shown:
        _bind_read_only(Path(place), root)
    for name in WRITABLE:
        (root / name).mkdir(exist_ok=True)
        (files / name).mkdir(exist_ok=True)
        mounted("--bind", str(files / name), str(root / name))
    (root / "tmp").chmod(0o1777)
    (root / "var" / "tmp").mkdir(exist_ok=True)
    (root / "var" / "tmp").chmod(0o1777)
    if tree.shared:
        one, seen = tree.shared[0], root / tree.shared[1].lstrip("/")
        seen.mkdir(parents=True, exist_ok=True)
        mounted("--bind", one, str(seen))
    for place in [place for place in tree.shown if Path(place).parts[1] in WRITABLE]:
        _bind_read_only(Path(place), root)
    for name in ("proc", "sys", "dev"):
        (root / name).mkdir()
    mounted("-t", "proc", "proc", str(root / "proc"))
    mounted("--rbind", "/sys", str(root / "sys"))
    mounted("--rbind", "/dev", str(root / "dev"))
    mounted("-t", "tmpfs", "-o", f"mode=1777,{SHARED_MEMORY}", "shm", str(root / "dev" / "shm"))
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in tree.names.items())]
    (files / "hosts").write_text("\n".join([*lines, ""]))
    if (root / "etc" / "hosts").exists():
        mounted("--bind", str(files / "hosts"), str(root / "etc" / "hosts"))
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "."], check=True)
    subprocess.run(["umount", "--lazy", "."], check=True)
    os.chdir(HOME)


def _bind_read_only(outside: Path, root: Path) -> None:
    inside = root / outside.relative_to("/")
    inside.mkdir(parents=True, exist_ok=True)
    mounted("-o", "bind,ro", str(outside), str(inside))


def reap(*_: object) -> None:
    """Reap exited processes that have no other parent."""
    while True:
        try:
            pid, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def main() -> None:
    document = json.loads(sys.argv[1])
    tree = Tree(**document | {key: tuple(document[key]) for key in ("shown", "groups", "shared")})
    for group in tree.groups:
        Path(group).write_text("0")
    Path("/proc/sys/kernel/hostname").write_text(tree.name)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    grow(tree)
    signal.signal(signal.SIGCHLD, reap)
    print("ready", flush=True)
    while os.read(0, 1):
        pass


if __name__ == "__main__":
    main()
