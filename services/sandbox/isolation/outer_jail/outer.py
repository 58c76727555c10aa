"""Becomes the outer jail, in which a zygote forks jails:
`python -m services.sandbox.isolation.outer_jail.outer JSON`.

The order matters. What needs root comes first, if we are root: places that a plain user cannot
reach are bound into a mount namespace of our own. Then we become a plain user, for whom the limit
on processes counts and whose files are nobody's. Then bubblewrap makes the namespaces.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from services.sandbox.isolation.resources import users
from services.sandbox.jail.confinement import kernel

GATHERED = ("/mnt", "/media", "/srv", "/tmp")  # where binds are gathered; the first that exists
INSIDE = "/run/meshrl"  # where this package's jail folder lies in a jail
PACKAGES = f"{INSIDE}/packages"  # and packages that its interpreter lacks
SYSTEM = ("/usr",)
LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
OPTIONAL = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
OURS = ("dev", "proc", "run", "sys", "tmp")  # of an image they are not shown: a jail has its own
DEVICES = ("null", "zero", "full", "random", "urandom")
START = (
    "import sys; sys.version_info >= (3, 8) or sys.exit('meshrl: jails take Python 3.8 or newer, "
    "this is ' + sys.version); sys.path.insert(0, {!r}); import jail.zygote; sys.path.pop(0); "
    "jail.zygote.main()"
)
UNSHARED = [f"--unshare-{kind}" for kind in ("ipc", "pid", "net", "uts", "cgroup-try")]
OUT_OF_MEMORY_SCORE = "500"
MOST_PROCESSES = 8192  # most in all jails together


@dataclass(frozen=True)
class Outer:
    """What an outer jail is made of."""

    tier: str  # bwrap | landlock
    control: int  # descriptor of the zygote's socket
    python: str  # the interpreter that jailed code gets
    isolated: bool  # without its site-packages
    places: tuple[str, ...] = ()  # directories to show, read-only, beside the system's
    warm: tuple[str, ...] = field(default=())  # modules that jailed code finds imported
    packages: tuple[str, ...] = ()  # of one directory: for those that the interpreter lacks
    root: str = ""  # a directory that is shown as the file system, in place of the host's

    def argument(self) -> str:
        return json.dumps(asdict(self))


def command(outer: Outer, gathered: dict[str, str], own_users: int) -> list[str]:
    """What to execute; `gathered` says where else a place can be reached, `own_users` is a
    user namespace to enter, or -1.
    """
    flags = ["-I", "-S"] if outer.isolated else ["-I"]
    package = INSIDE if outer.tier == "bwrap" else str(Path(__file__).parents[2])
    zygote = [outer.python, *flags, "-c", START.format(package)]
    zygote += [str(outer.control), outer.tier, json.dumps(outer.warm), _searched_last(outer)]
    if outer.tier != "bwrap":
        return zygote
    argv = ["bwrap", *UNSHARED, "--die-with-parent", "--new-session"]
    argv += ["--unshare-user"] if own_users < 0 else ["--userns", str(own_users)]
    # What the loader looks up late, each fork would look up for itself, in pages of its own.
    argv += ["--clearenv", "--setenv", "LD_BIND_NOW", "1", "--hostname", "jail"]
    argv += shown(gathered.get(outer.root, outer.root)) if outer.root else host()
    for place in outer.places:
        argv += _parents(place)  # bubblewrap would keep from all others what is kept from us
        argv += ["--ro-bind", gathered.get(place, place), place]
    argv += _parents(f"{PACKAGES}/all")
    for place in outer.packages:
        argv += ["--ro-bind", gathered.get(place, place), f"{PACKAGES}/{os.path.basename(place)}"]
    jail = str(Path(__file__).parents[2] / "jail")
    argv += ["--ro-bind", gathered.get(jail, jail), f"{INSIDE}/jail"]
    argv += ["--proc", "/proc", "--tmpfs", "/dev", "--dir", "/tmp"]
    for device in DEVICES:
        argv += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        argv += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    argv += ["--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/tmp", "/dev/shm"]
    # The zygote makes namespaces and mounts inside of its own; jails close all this behind them.
    argv += ["--cap-add", "ALL", "--remount-ro", "/dev", "--remount-ro", "/"]
    return [*argv, *zygote]


def host() -> list[str]:
    """Shows the host's programs and libraries."""
    argv = []
    for place in SYSTEM:
        argv += ["--ro-bind", place, place]
    for link in LINKS:
        if os.path.islink(link):
            argv += ["--symlink", os.readlink(link), link]
        elif os.path.isdir(link):
            argv += ["--ro-bind", link, link]
    for place in OPTIONAL:
        argv += _parents(place)
        argv += ["--ro-bind-try", place, place]
    return argv


def shown(root: str) -> list[str]:
    """Shows an image: each thing at its top, as a link there may lead nowhere but inside."""
    argv = []
    for name in sorted(os.listdir(root)):
        place = os.path.join(root, name)
        if name in OURS:
            continue
        if os.path.islink(place):
            argv += ["--symlink", os.readlink(place), f"/{name}"]
        else:
            argv += ["--ro-bind", place, f"/{name}"]
    return argv


def _parents(place: str) -> list[str]:
    """Makes the directories above a place, for every user to enter."""
    above = [str(parent) for parent in reversed(Path(place).parents)]
    return [word for parent in above[1:] for word in ("--dir", parent)]


def _searched_last(outer: Outer) -> str:
    """Where a zygote finds the packages; empty: there are none."""
    if not outer.packages:
        return ""
    return PACKAGES if outer.tier == "bwrap" else os.path.dirname(outer.packages[0])


def gather(places: list[str]) -> dict[str, str]:
    """Where a plain user finds each place, in a mount namespace that ends with this process."""
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    base = next(place for place in GATHERED if os.path.isdir(place))
    kernel.mount("tmpfs", base, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=64k,mode=755")
    found = {}
    for number, place in enumerate(places):
        target = f"{base}/{number}"
        if os.path.isdir(place):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
        kernel.mount(place, target, "", kernel.MS_BIND | kernel.MS_REC)
        found[place] = target
    return found


def main() -> None:
    values = json.loads(sys.argv[1])
    values |= {name: tuple(values[name]) for name in ("places", "warm", "packages")}
    outer = Outer(**values)
    parent = os.getppid()
    os.umask(0o022)  # what a program makes in a jail has the modes that it would have elsewhere
    gathered: dict[str, str] = {}
    own_users = -1
    if os.getuid() == 0:
        # Written by root it is also the least that a jail can set: they go before anything else.
        Path("/proc/self/oom_score_adj").write_text(OUT_OF_MEMORY_SCORE)
        jail = str(Path(__file__).parents[2] / "jail")
        if outer.tier == "bwrap":
            image = [outer.root] if outer.root else []
            gathered = gather([*outer.places, *outer.packages, jail, *image])
            own_users = users.namespace(users.PLAIN_ID)
            kernel.become(users.PLAIN_ID)
        else:
            users.become_able_to_change(users.PLAIN_ID)
    os.chdir("/")
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = MOST_PROCESSES if hard == resource.RLIM_INFINITY else min(MOST_PROCESSES, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    # A change of user has made the kernel forget it.
    kernel.prctl(kernel.PR_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        sys.exit("the sandbox has ended")
    if own_users >= 0:
        os.set_inheritable(own_users, True)
    argv = command(outer, gathered, own_users)
    os.execvpe(argv[0], argv, {"PATH": os.environ.get("PATH", "/usr/bin:/bin")})


if __name__ == "__main__":
    main()
