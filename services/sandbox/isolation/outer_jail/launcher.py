"""Launcher of the outer jail, in which a zygote forks jails.

`python -m meshrl.services.sandbox.isolation.outer_jail.launcher TIER CONTROL INTERPRETER`. The
order matters. Steps that need root come first, if we are root: paths that a plain user cannot reach
are bound into a mount namespace of our own. Then the process switches to a plain user, who owns no
files and to whom the limit on processes applies. Then bubblewrap makes the namespaces.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import py_compile
import resource
import sys
from pathlib import Path

from meshrl.services.sandbox.isolation.outer_jail.interpreters import (
    JAIL_PACKAGE,
    MOUNT_POINT,
    PACKAGES_MOUNT_POINT,
    Interpreter,
    list_root_content,
)
from meshrl.services.sandbox.isolation.resources import users
from meshrl.services.sandbox.jail.confinement import syscalls

BIND_BASES = ("/mnt", "/media", "/srv", "/tmp")  # where binds are made; the first that exists
DEVICES = ("null", "zero", "full", "random", "urandom")
ZYGOTE_CODE = (
    "import sys; sys.version_info >= (3, 8) or sys.exit('meshrl: jails need Python 3.8 or newer, "
    "this is ' + sys.version); sys.path.insert(0, {!r}); import jail.zygote; sys.path.pop(0); "
    "jail.zygote.main()"
)
UNSHARED = [f"--unshare-{kind}" for kind in ("ipc", "pid", "net", "uts", "cgroup-try")]
OUT_OF_MEMORY_SCORE = "500"
MAX_PROCESSES = 8192  # most in all jails together


def build_command(
    tier: str, control: int, interpreter: Interpreter, bound_paths: dict[str, str], userns_fd: int
) -> list[str]:
    """Return the command to execute.

    Args:
        control: Socket of the zygote.
        bound_paths: Other paths under which to reach some paths.
        userns_fd: User namespace to enter, or -1.
    """
    package = MOUNT_POINT if tier == "bwrap" else os.path.dirname(JAIL_PACKAGE)
    zygote = interpreter.build_command(ZYGOTE_CODE.format(package))
    packages = [
        PACKAGES_MOUNT_POINT if tier == "bwrap" else os.path.dirname(p)
        for p in interpreter.packages
    ]
    searched_last = next(iter(packages), "")
    zygote += [str(control), tier, json.dumps(interpreter.preloaded_modules), searched_last]
    if tier != "bwrap":
        return zygote
    argv = ["bwrap", *UNSHARED, "--die-with-parent", "--new-session"]
    argv += ["--unshare-user"] if userns_fd < 0 else ["--userns", str(userns_fd)]
    # Each fork would otherwise resolve late symbols again, in pages of its own.
    argv += ["--clearenv", "--setenv", "LD_BIND_NOW", "1", "--hostname", "jail"]
    content = list_root_content(interpreter, bound_paths.get(interpreter.root, interpreter.root))
    for inside, text in content.links.items():
        argv += ["--symlink", text, inside]
    for inside, place in content.binds.items():
        for parent in reversed(Path(inside).parents[:-1]):
            argv += ["--dir", str(parent)]  # else bubblewrap bars others from what bars us
        argv += ["--ro-bind", bound_paths.get(place, place), inside]
    argv += ["--proc", "/proc", "--tmpfs", "/dev", "--dir", "/tmp"]
    for device in DEVICES:
        argv += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        argv += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    argv += ["--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/tmp", "/dev/shm"]
    # The zygote makes namespaces and mounts inside of its own; jails drop all of these rights.
    argv += ["--cap-add", "ALL", "--remount-ro", "/dev", "--remount-ro", "/"]
    return [*argv, *zygote]


def bind_paths(paths: list[str]) -> dict[str, str]:
    """Bind paths in a mount namespace that ends with this process, and return where they are.

    A plain user can reach them there.
    """
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    base = next(place for place in BIND_BASES if os.path.isdir(place))
    syscalls.mount(
        "tmpfs", base, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=64k,mode=755"
    )
    found = {}
    for number, place in enumerate(paths):
        target = f"{base}/{number}"
        if os.path.isdir(place):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
        syscalls.mount(place, target, "", syscalls.MS_BIND | syscalls.MS_REC)
        found[place] = target
    return found


def write_bytecode(package: Path) -> None:
    """Write the missing bytecode of a package for this interpreter, if we may.

    A zygote cannot: it would compile the package at each start.
    """
    for source in package.rglob("*.py"):
        cached = importlib.util.cache_from_source(str(source))
        if not os.path.exists(cached) or os.path.getmtime(cached) < source.stat().st_mtime:
            with contextlib.suppress(OSError):
                py_compile.compile(str(source), cached, quiet=2)


def main() -> None:
    tier, control, interpreter = sys.argv[1], int(sys.argv[2]), Interpreter.decode(sys.argv[3])
    parent = os.getppid()
    os.umask(0o022)  # files that a program makes in a jail have their usual modes
    gathered: dict[str, str] = {}
    own_users = -1
    if interpreter.isolated:
        write_bytecode(Path(JAIL_PACKAGE))
    if os.getuid() == 0:
        # Written by root it is also the minimum that a jail can set: jails are killed first.
        Path("/proc/self/oom_score_adj").write_text(OUT_OF_MEMORY_SCORE)
        if tier == "bwrap":
            places = [
                *interpreter.directories,
                *interpreter.packages,
                JAIL_PACKAGE,
                interpreter.root,
            ]
            gathered = bind_paths(list(filter(None, places)))
            own_users = users.create_user_namespace(users.PLAIN_ID)
            syscalls.switch_user(users.PLAIN_ID)
        else:
            users.switch_user_keep_setuid(users.PLAIN_ID)
    os.chdir("/")
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = MAX_PROCESSES if hard == resource.RLIM_INFINITY else min(MAX_PROCESSES, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    # The change of user has cleared the parent death signal.
    if not syscalls.set_parent_death_signal(parent, 9):
        sys.exit("the sandbox has exited")
    if own_users >= 0:
        os.set_inheritable(own_users, True)
    argv = build_command(tier, control, interpreter, gathered, own_users)
    os.execvpe(argv[0], argv, {"PATH": os.environ.get("PATH", "/usr/bin:/bin")})


if __name__ == "__main__":
    main()
