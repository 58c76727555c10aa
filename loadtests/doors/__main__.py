"""Security test that tries every endpoint of a running mesh as another user.

Usage:

    python -m loadtests.doors tests/mesh/jobs/digits.toml --set budget.steps=60

Needs root, which alone can act as another user. While the job trains, a process of the least
privileged user tries every listening port and unix socket of every process of the mesh, every
method of every interface, the bulk port's verbs, Redis' commands, metrics, the files of the run and
the processes themselves. `answered` counts attempts that returned data or had an effect; metrics,
which are open on purpose, are counted separately. Then the job has to finish undisturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loadtests.doors.endpoint_inventory import plan_of
from loadtests.doors.plan import ANSWERED, GREETED, METRICS, REFUSED, Plan, Tried
from loadtests.measuring.entry import options, report
from loadtests.measuring.meshed import opened
from meshrl.common.base.errors import MeshError
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.entry.child import PRIVATE_UMASK
from meshrl.common.state import jobs
from meshrl.directory.directory_paths import MeshPaths, read_json_or_empty

UP_S = 240.0  # until the job trains
TRY_S = 300.0
RUN_S = 400.0  # for the rest of the run
SHOWN = 40  # answers that are reported in full


async def until_training(place: MeshPaths, run: asyncio.subprocess.Process) -> None:
    """Wait until the first step is done; SystemExit if the run ends before."""
    async with asyncio.timeout(UP_S):
        while True:
            if run.returncode is not None:
                sys.exit(f"the run ended before it trained, with status {run.returncode}")
            if place.settings.exists():
                with contextlib.suppress(MeshError):  # Redis is not up yet
                    url = MeshSettings.from_file(place.settings).redis_url
                    async with opened(url, connect_s=2.0) as state:
                        phases = [row.phase for row in await jobs.read_jobs(state)]
                    if jobs.Phase.TRAINING in phases:
                        return
            await asyncio.sleep(0.5)


def spilled(plan: Plan, tried: list[Tried], secrets: list[str], root: Path) -> list[str]:
    """Return the places but settings and Redis where a secret of the mesh shows."""
    found = [one.what for one in tried if any(secret in one.told for secret in secrets)]
    for pid in plan.pids:
        with contextlib.suppress(OSError):
            for name in ("cmdline", "environ"):
                shown = Path(f"/proc/{pid}/{name}").read_bytes()
                if any(secret.encode() in shown for secret in secrets):
                    found.append(f"/proc/{pid}/{name}")
    for path in root.rglob("*"):
        kept = path.name == "settings.json" or (root / "mesh" / "redis") in path.parents
        if path.is_file() and not path.is_symlink() and not kept:
            with contextlib.suppress(FileNotFoundError):
                content = path.read_bytes()
                if any(secret.encode() in content for secret in secrets):
                    found.append(str(path))
    return found


def open_folder(deep: bool) -> Path:
    """Make a world-readable directory; `deep`: its path is too long for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="meshrl-doors-"))
    folder.chmod(0o755)
    if deep:
        folder /= "deep" * 25
        folder.mkdir()
        folder.chmod(0o755)
    return folder


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    folder = open_folder(arguments.deep)
    place = MeshPaths(folder / "run")
    words = ["run", str(arguments.job), "--set", f"out={place.root}"]
    for change in arguments.set or []:
        words += ["--set", change]
    log = (folder / "log").open("wb")
    mesh = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "meshrl"), *words, stdout=log, stderr=log
    )
    try:
        await until_training(place, mesh)
        settings = MeshSettings.from_file(place.settings)
        plan = await plan_of(place, settings)
        stranger = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loadtests.doors.stranger"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(TRY_S):
            told, _ = await stranger.communicate(json.dumps(asdict(plan)).encode())
        if stranger.returncode != 0:
            sys.exit(f"the stranger ended with status {stranger.returncode}")
        tried = [Tried(**one) for one in json.loads(told)]
        secrets = list(filter(None, (settings.secret, urlsplit(settings.redis_url).password)))
        spills = spilled(plan, tried, secrets, place.root)
        status = await await_exit(mesh)
    finally:
        if mesh.returncode is None:
            mesh.send_signal(signal.SIGINT)
            await mesh.wait()
        log.close()
    spills += [path for path in spilled(plan, [], secrets, place.root) if path not in spills]
    return verdict(place, plan, tried, spills, status)


async def await_exit(run: asyncio.subprocess.Process) -> int:
    """Return the exit status of the run; -1 if an attempt has stopped it permanently."""
    try:
        async with asyncio.timeout(RUN_S):
            return await run.wait()
    except TimeoutError:
        return -1


def verdict(
    place: MeshPaths, plan: Plan, tried: list[Tried], spills: list[str], status: int
) -> dict[str, Any]:
    summary = read_json_or_empty(place.root / "summary.json")
    count = Counter(one.outcome for one in tried)
    books = {key: summary.get(key) for key in ("lost", "trained_twice")}
    right = status == 0 and summary.get("phase") == jobs.Phase.FINISHED
    answer = {
        "tried": len(tried),
        "ports": len(plan.ports),
        "processes": len(plan.pids),
        "sockets": len(plan.sockets),
        "files": len(plan.files),
        "answered": count[ANSWERED],
        "metrics": count[METRICS],
        "greeted": count[GREETED],
        "refused": count[REFUSED],
        "spilled": len(spills),
        "crashed": int(not right or set(books.values()) != {0}),
        **books,
        "run": str(place.root),
    }
    answer["ok"] = int((answer["answered"], answer["spilled"], answer["crashed"]) == (0, 0, 0))
    for one in [one for one in tried if one.outcome == ANSWERED][:SHOWN]:
        print(f"answered: {one.what}: {one.told[:200]!r}", file=sys.stderr)
    for path in spills[:SHOWN]:
        print(f"a secret shows in {path}", file=sys.stderr)
    return answer


def main() -> None:
    parser = options(__doc__, deep=(False, "with Redis at a port"))
    parser.add_argument("job", type=Path)
    parser.add_argument("--set", action="append", help="KEY=VALUE of the job")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("loadtests.doors needs root: only root can act as another user")
    os.umask(PRIVATE_UMASK)
    answer = asyncio.run(run(arguments))
    report(answer)
    sys.exit(0 if answer["ok"] else 1)


if __name__ == "__main__":
    main()
