"""File in a mesh's directory with its profiles, which survive a loss of Redis."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import (
    CorruptData,
    DeadlineExceeded,
    NotFound,
    StateUnavailable,
    StorageFull,
)
from meshrl.common.base.files import corruption, documents
from meshrl.common.base.files.sealed_documents import encode_sealed, read_sealed
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import Host
from meshrl.common.state import events
from meshrl.common.state.pool.store.profile_rows import dump_profiles, restore_profiles
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.directory_paths import MeshPaths

SAVE_INTERVAL_S = 60.0  # processes write their samples twice as often
SAVE_TIMEOUT_S = 4.0
READ_TIMEOUT_S = 60.0


class ProfileFile:
    """Copy of a mesh's profiles on disk."""

    def __init__(self, mesh_paths: MeshPaths, clock: Clock, host: Host) -> None:
        self._path: Path = mesh_paths.profiles
        self._root, self._clock, self._host = mesh_paths.root, clock, host
        self._random = Random.from_os_entropy()
        self._saved: dict[str, str] = {}  # content of the file
        self._error = ""  # last printed one

    async def restore(self, state: StateClient) -> None:
        """Write profiles that Redis lacks; a corrupt file is quarantined, and its loss recorded.

        Raises StateUnavailable.
        """
        try:
            document = await self._host.run_blocking(
                read_sealed, self._path, deadline_s=READ_TIMEOUT_S
            )
            self._saved = document["profiles"]
        except NotFound:
            return
        except CorruptData as error:
            moved = corruption.quarantine(self._path, self._root)
            recovery = corruption.RECOVERY_BY_KIND["profiles"]
            fields = corruption.make_event_fields(
                "profiles", self._path, error.message, recovery, quarantined_path=moved
            )
            print(corruption.describe_event(fields), file=sys.stderr, flush=True)
            await events.append(state, corruption.CORRUPTION_EVENT, fields)
            return
        await restore_profiles(state, self._saved, self._random.hex_token)

    async def save(self, state: StateClient) -> None:
        """Write the file if the profiles have changed. Raises StateUnavailable, StorageFull."""
        found = await dump_profiles(state)
        if found and found != self._saved:
            content = encode_sealed({"profiles": found})
            await self._host.run_blocking(
                documents.write_bytes, self._path, content, deadline_s=SAVE_TIMEOUT_S
            )
            self._saved = found

    async def save_forever(self, state: StateClient) -> None:
        """Write the file periodically until cancelled, and then once more."""
        try:
            while True:
                await self._clock.sleep(SAVE_INTERVAL_S)
                await self._try_to_save(state)
        finally:
            await self._try_to_save(state)

    async def _try_to_save(self, state: StateClient) -> None:
        """Write the file; print why the disk rejects it. A later call retries."""
        with contextlib.suppress(StateUnavailable, DeadlineExceeded):
            try:
                async with self._clock.timeout(SAVE_TIMEOUT_S, "saving the profiles"):
                    await self.save(state)
                self._error = ""
            except (StorageFull, OSError) as error:
                if str(error) != self._error:
                    print(f"the profiles are not saved: {error}", file=sys.stderr, flush=True)
                self._error = str(error)
