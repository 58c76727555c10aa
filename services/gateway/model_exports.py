"""Exported models: each version of a run has its own directory, unchanged while it is read, and
removed when it is unused.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from meshrl.common.api.gateway import (
    PIECE_BYTES,
    ModelFiles,
    ModelRequest,
    ReadModelFile,
    VersionsRequest,
)
from meshrl.common.base.errors import (
    DeadlineExceeded,
    MeshError,
    NotFound,
    Overloaded,
    Refused,
    from_wire,
)
from meshrl.common.job.bundle import bundle_files
from meshrl.common.mesh.process.command_output import run_for_document
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.jobs import JobRow

EXPORTS_DIRECTORY = "exports"  # below a run
EXPORT_TIMEOUT_S = 540.0
IO_TIMEOUT_S = 60.0
UNREAD_TIMEOUT_S = 60.0  # a client requests a piece at least every 30 s
MAX_EXPORTS = 8  # versions of one run at a time: each is as large as the model


class ModelExports:
    """Exports of all runs of the mesh whose files are in `root`."""

    def __init__(self, mesh: Mesh, root: Path) -> None:
        self._mesh, self._root = mesh, root
        self._last_read_s: dict[Path, float] = {}  # by directory: time of the last request
        # Serializes the check, write and removal of exports of one run.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def export_model(self, row: JobRow, request: ModelRequest) -> ModelFiles:
        """Export the version unless it exists; return its files. Raise NotFound if the run does not
        have it, and Overloaded during too many other downloads.
        """
        host, models = self._mesh.host, Path(row.run_dir) / EXPORTS_DIRECTORY
        lock = self._locks.setdefault(row.run_dir, asyncio.Lock())
        async with lock:  # as long as the call may take
            if len(self._list_in_use(models)) >= MAX_EXPORTS:
                raise Overloaded(f"{MAX_EXPORTS} versions of {row.id} are already being fetched")
            out = await self._run_export(row, request, models)
            self._touch(out)
            await host.run_blocking(
                _remove_unused, models, self._list_in_use(models), deadline_s=IO_TIMEOUT_S
            )
            listed = await host.run_blocking(
                bundle_files.list_files, out, deadline_s=EXPORT_TIMEOUT_S
            )
            self._touch(out)
        files = {name: (size, digest) for name, (size, digest) in listed.items()}
        return ModelFiles(out.name, files)

    async def read_piece(self, row: JobRow, request: ReadModelFile) -> bytes:
        """Read bytes of a model file; raise NotFound for any other path."""
        models = (Path(row.run_dir) / EXPORTS_DIRECTORY).resolve()
        path = (models / request.model / request.name).resolve()
        if not path.is_relative_to(models) or not path.is_file():
            raise NotFound(
                f"{request.name!r:.300} is not a file of that model",
                fix="Export the model again: it is removed after some minutes without reads",
            )
        self._touch(Path(row.run_dir) / EXPORTS_DIRECTORY / path.relative_to(models).parts[0])
        read = self._mesh.host.run_blocking
        return await read(_read_piece, path, request.offset, deadline_s=IO_TIMEOUT_S)

    def _touch(self, model: Path) -> None:
        self._last_read_s[model] = self._mesh.clock.monotonic()

    def _list_in_use(self, models: Path) -> set[Path]:
        """Return the directories with recent reads."""
        since = self._mesh.clock.monotonic() - UNREAD_TIMEOUT_S
        self._last_read_s = {path: at for path, at in self._last_read_s.items() if at > since}
        return {path for path in self._last_read_s if path.parent == models}

    async def _run_export(self, row: JobRow, request: ModelRequest, models: Path) -> Path:
        words = [sys.executable, "-m", "meshrl.services.weights.export", "--run", row.run_dir]
        words += ["--below", str(models)]
        words += ["--step", str(request.step)] if request.step >= 0 else []
        words += ["--best"] if request.best else []
        log = self._root / "mesh" / "logs" / f"gateway-export-{row.id}.log"
        log.unlink(missing_ok=True)
        child = self._mesh.host.spawn(words, name=f"export/{row.id}", log=log)
        try:
            code = await child.wait(EXPORT_TIMEOUT_S)
        finally:
            child.kill()
        if code is None:
            raise DeadlineExceeded(f"the model was not written within {EXPORT_TIMEOUT_S:g} s")
        output_lines = log.read_text(errors="replace").strip().splitlines()
        if code != 0:
            why = (
                output_lines[-1].removeprefix("error: ")
                if output_lines
                else "the export printed no error"
            )
            raise NotFound(why.replace(str(self._root), ""))
        return models / Path(output_lines[-1]).name


def _remove_unused(models: Path, in_use: set[Path]) -> None:
    """Remove directories without recent reads, and incomplete ones."""
    for path in models.iterdir():
        if path not in in_use:
            shutil.rmtree(path, ignore_errors=True)


def _read_piece(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, offset))
        return file.read(PIECE_BYTES)


ANSWER_TIMEOUT_S = 50.0  # below the call's deadline
VERSION_ACTIONS = ("list", "pin", "unpin")
MAX_TEXT_CHARS = 1000  # characters of user input


async def run_versions_command(mesh: Mesh, row: JobRow, request: VersionsRequest) -> Any:
    """Run a versions command; return its answer without this host's directories.

    Raise the process's own error, Refused for any action that is not permitted, and
    DeadlineExceeded.
    """
    if (
        request.action not in VERSION_ACTIONS
        or max(len(request.version), len(request.note)) > MAX_TEXT_CHARS
    ):
        raise Refused(
            f"a token may not request the action {request.action!r:.100} of versions",
            fix=f"Use one of {', '.join(VERSION_ACTIONS)}",
        )
    command = [sys.executable, "-m", "meshrl.services.weights.versions", request.action]
    command += [f"--note={request.note}"] if request.note and request.action == "pin" else []
    command += ["--", row.run_dir] + ([request.version] if request.action != "list" else [])
    logs = Path(mesh.settings.run_root) / "mesh" / "logs"
    try:
        found = await run_for_document(
            mesh.host, command, f"versions/{row.id}", logs, ANSWER_TIMEOUT_S
        )
    except DeadlineExceeded:
        raise
    except MeshError as unsaid:  # its text may contain paths of this host
        raise MeshError("the versions could not be read", where=mesh.name) from unsaid
    if error := found.get("error"):
        text = error["text"].replace(row.run_dir, row.id).replace(mesh.settings.run_root, "")
        raise from_wire(error["code"], text)
    found.pop("run", None)
    return found
