"""Provider of spot hosts on this machine, called as `scale HOSTS`: each host is `meshrl join`.

Usage:

    python local_provider.py DIRECTORY TOKEN scale HOSTS

`DIRECTORY/host-N` is the directory of a host, `DIRECTORY/starts` has a line for each one started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def list_running(directory: Path) -> dict[Path, int]:
    """Return the directories of the hosts whose root process runs, with its pid."""
    found = {}
    for note in sorted(directory.glob("host-*/pid")):
        pid = int(note.read_text())
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(note.parent).encode() in command:
            found[note.parent] = pid
    return found


def read_name(host: Path) -> str:
    """Return the name of a host in its mesh; empty before it has one."""
    try:
        return str(json.loads((host / "mesh/settings.json").read_text())["host"])
    except FileNotFoundError:
        return ""


def start_host(directory: Path, token: str, number: int) -> None:
    host = directory / f"host-{number}"
    host.mkdir()
    join = ("join", token, "--root", str(host), "--foreground", "--ephemeral", "--no-standby")
    with (host / "output").open("w") as output:
        program = subprocess.Popen(
            [sys.executable, "-m", "meshrl", *join, "--market", "spot", "--workers", "1"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "MESHRL_HOME": str(host / "home")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    (host / "pid").write_text(str(program.pid))
    with (directory / "starts").open("a") as starts:
        print(host.name, file=starts)


def scale(directory: Path, token: str, hosts: int) -> None:
    """End the released hosts, and start those that are missing."""
    released = os.environ["MESHRL_RELEASE_HOSTS"].split()
    running = list_running(directory)
    for host, pid in list(running.items()):
        if read_name(host) in released:
            os.kill(pid, signal.SIGTERM)
            del running[host]
    started = len(list(directory.glob("host-*")))
    for number in range(started, started + hosts - len(running)):
        start_host(directory, token, number)


if __name__ == "__main__":
    place, token_file, verb, count = sys.argv[1:]
    assert verb == "scale", verb
    scale(Path(place), token_file, int(count))
