"""Asks for the versions of a run, or pins, compares and exports some, by a process of its own: it
reads what the store has, whether or not a mesh runs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshrl.common.base.errors import MeshError, from_wire
from meshrl.common.base.files.at_url import without_secrets
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.starting import Spawning
from meshrl.directory import job_file

POLL_S = 0.01


def command(words: Sequence[str | Path]) -> list[str]:
    """What does so: `words` are the command and its arguments."""
    return [sys.executable, "-m", "meshrl.services.weights.versions", *map(str, words)]


def words(act: str, run: str | Path, version: str = "", note: str = "") -> list[str | Path]:
    """Those of `list`, `pin` and `unpin`; what a person has typed is taken for no option."""
    noted = [f"--note={note}"] if note else []
    return [act, *noted, "--", run, *([version] if act != "list" else [])]


def asked(*words: str | Path) -> dict[str, Any]:
    """The answer to a command; its own error."""
    with TemporaryDirectory(prefix="meshrl-versions-") as scratch:
        said = Path(scratch) / "said"
        tied = threading.current_thread() is threading.main_thread()  # no other thread can tie it
        child = SystemHost().spawn(
            command(words), name="versions", log=said, how=Spawning(die_with_parent=tied)
        )
        try:
            while child.poll() is None:
                time.sleep(POLL_S)
        finally:
            child.kill()
        text = said.read_text(errors="replace")
    said_last = "\n".join(line for line in text.splitlines() if line.startswith("{"))
    return answer(said_last, text)  # whatever else it wrote stands in the same file


async def copied(run: Path, stop: asyncio.Event) -> str:
    """Copies what a run that is over keeps for good to its `weights.copies`; why some of it is not
    there, empty if all is. `stop` ends it.
    """
    place = job_file.read(run / job_file.NAME)["document"].get("weights", {}).get("copies", "")
    if not place:
        return ""
    shown = without_secrets(place)
    print(f"copying versions to {shown}", flush=True)
    copying = asyncio.create_task(ran(command(["copy", f"--to={place}", "--", run])))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([copying, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not copying.done():
            return f"not all versions are at {shown}: it was stopped"
        _, said, complained = copying.result()
        found = answer(said, complained)
        if failed := found["failed"]:
            why = from_wire(failed[0]["error"]["code"], failed[0]["error"]["text"])
            more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
            return f"not all versions are at {shown}: {failed[0]['manifest'][:8]}{more}: {why}"
    except MeshError as error:
        return f"not all versions are at {shown}: {error}"
    finally:
        copying.cancel()
        stopping.cancel()
        await asyncio.gather(copying, stopping, return_exceptions=True)
    return ""


async def ran(words: Sequence[str]) -> tuple[int, str, str]:
    """The exit status of a process, and what it said and complained of."""
    process = await asyncio.create_subprocess_exec(*words, stdout=PIPE, stderr=PIPE)
    try:
        said, complained = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    code = process.returncode or 0
    return code, said.decode(errors="replace"), complained.decode(errors="replace")


def answer(said: str, complained: str) -> dict[str, Any]:
    """What the process said last, or the error that it told of."""
    lines = said.strip().splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        why = complained.strip().splitlines() or ["it said nothing"]
        raise MeshError(
            f"the versions could not be looked at: {why[-1]:.300}",
            fix="It is a fault of MeshRL's; please report it with that line",
        ) from None
    if error := found.get("error"):
        raise from_wire(error["code"], error["text"])
    return found
