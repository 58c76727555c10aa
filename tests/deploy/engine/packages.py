"""Packages of the engine from Debian's archive: a daemon, and plugins of a later release.

Debian 12 has no compose v2 and no buildx; those of the next release are unpacked beside the
engine's state, and nothing of that release is installed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.load import scaled

DAEMON = ("docker.io", "iptables", "debootstrap", "slirp4netns", "iproute2")
PROGRAMS = ("dockerd", "docker", "iptables", "debootstrap", "slirp4netns", "ip", "nsenter")
PLUGINS = {"docker-compose": "docker-compose", "docker-buildx": "docker-buildx"}  # program: package
LATER = "trixie"
MIRROR = "http://deb.debian.org/debian"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
LOCK_S = 300  # another installation may be running
INSTALL_S = 900.0


class EngineError(Exception):
    """Failed step, with the output of its program."""


def run(*command: str, timeout: float = INSTALL_S) -> str:
    """Return the program's output; EngineError with the end of it if the program fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(timeout))
    except FileNotFoundError as error:
        raise EngineError(f"there is no program {command[0]}: install it") from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{' '.join(command)} did not end within {timeout:.0f} s") from error
    if done.returncode:
        output = (done.stderr or done.stdout).strip()[-1500:]
        raise EngineError(f"{' '.join(command)} ended with {done.returncode}: {output}")
    return done.stdout


def install() -> None:
    """Install the missing programs of the daemon."""
    if all(map(shutil.which, PROGRAMS)):
        return
    lock = ("-o", f"DPkg::Lock::Timeout={LOCK_S}")
    run("apt-get", *lock, "update")
    run("apt-get", *lock, "install", "-y", "--no-install-recommends", *DAEMON)


def add_plugins(config: Path, scratch: Path) -> None:
    """Unpack compose and buildx of the next Debian release into `config/cli-plugins`."""
    wanted = [name for name in PLUGINS if not (config / "cli-plugins" / name).exists()]
    if not wanted:
        return
    lists, archives = scratch / "apt/lists/partial", scratch / "apt/archives/partial"
    for folder in (lists, archives, config / "cli-plugins"):
        folder.mkdir(parents=True, exist_ok=True)
    source = scratch / "apt/sources.list"
    source.write_text(f"deb [signed-by={KEYRING}] {MIRROR} {LATER} main\n")
    places = (
        *("-o", f"Dir::Etc::sourcelist={source}"),
        *("-o", "Dir::Etc::sourceparts=/dev/null"),
        *("-o", f"Dir::State::lists={lists.parent}"),
        *("-o", f"Dir::Cache={scratch / 'apt'}"),
        *("-o", "APT::Sandbox::User=root"),
    )
    run("apt-get", *places, "update")
    for name in wanted:
        run("sh", "-c", 'cd "$1" && shift && exec apt-get "$@"', "sh", str(archives.parent),
            *places, "download", PLUGINS[name])  # fmt: skip
        [package] = archives.parent.glob(f"{PLUGINS[name]}_*.deb")
        run("dpkg-deb", "-x", str(package), str(scratch / "plugins"))
        [program] = (scratch / "plugins").rglob(f"cli-plugins/{name}")
        (config / "cli-plugins" / name).symlink_to(program)
