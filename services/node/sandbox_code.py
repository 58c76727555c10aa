"""Before a sandbox begins: finds out what it may be told to load, and brings the author's code to a
host that does not see where its job is at home. Sandboxes, which run what the model wrote, may ask
the weight store for nothing, and see no row of a job.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from pathlib import Path

from meshrl.common.api.weights import STORE
from meshrl.common.base.errors import MeshError, NotFound, StateUnavailable
from meshrl.common.job.bundle import loading
from meshrl.common.job.bundle.job_data import MODULES, JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.state import jobs
from meshrl.common.state.pool.workers import names
from meshrl.common.weights.store.local_files import at_home, fetched, is_home, release

AGAIN_S = 5.0  # after an error
SOON_S = 0.5  # after Redis did not answer
CHANGED_S = 15.0  # between two looks for documents that have changed
NOTHING = "none"  # no digest: what a sandbox may load whose job there is no more


class SandboxCode:
    """`news` is called when some code has come."""

    def __init__(self, mesh: Mesh, news: Callable[[], None]) -> None:
        self._mesh, self._news = mesh, news
        self._bringing: dict[str, asyncio.Task[None]] = {}
        self._there: dict[str, Path | None] = {}  # by sandbox; None: where the run is at home
        self._loads: dict[str, str] = {}  # by sandbox: digest of what it may be told to load
        self._looked = float("-inf")  # for documents that have changed

    def there(self, name: str) -> bool:
        """Whether a service has its code here; a shard looks for that itself."""
        if names.service(name)[0] != "sandbox" or name in self._there:
            return True
        if name not in self._bringing:
            self._bringing[name] = asyncio.create_task(self._bring(name), name=f"code of {name}")
        return False

    def options(self, name: str) -> list[str]:
        """What is told a service that begins: a joined host can have any shard's key, so a sandbox
        takes the word of none for what it is to import and run.
        """
        if names.service(name)[0] != "sandbox":
            return []
        return ["--load", self._loads.get(name, NOTHING)]

    async def adopted(self, name: str) -> None:
        """Finds out what a sandbox that runs already may load when it is started again."""
        if names.service(name)[0] == "sandbox":
            job = names.service(name)[1]
            with contextlib.suppress(NotFound):  # nor is it wanted any more
                row = await patiently(self._mesh.clock, lambda: jobs.job(self._mesh.state, job))
                self._loads[name] = _digest(row)

    async def changed(self, running: Collection[str]) -> list[str]:
        """The sandboxes that run of jobs which have another document by now, and load by that when
        they are started again. It is looked for now and then: a job has it from a resume.
        """
        now = self._mesh.clock.monotonic()
        if now < self._looked + CHANGED_S:
            return []
        found = {}
        for name in sorted(running):
            if names.service(name)[0] == "sandbox":
                with contextlib.suppress(NotFound):  # nor is it wanted any more
                    found[name] = _digest(await jobs.job(self._mesh.state, names.service(name)[1]))
        changed = [name for name, digest in found.items() if self._loads.get(name) != digest]
        self._looked = now
        self._loads.update(found)
        return changed

    def keep(self, wanted: Collection[str]) -> None:
        """Lets go of the code of sandboxes that are not wanted any more."""
        for name in self._bringing.keys() - set(wanted):
            self._bringing.pop(name).cancel()
        for name in self._loads.keys() - set(wanted):
            del self._loads[name]
        for name in self._there.keys() - set(wanted):
            if (directory := self._there.pop(name)) is not None:
                release(directory)

    def stop(self) -> None:
        self.keep(())

    async def _bring(self, name: str) -> None:
        mesh = self._mesh
        with mesh.wait(f"to bring the code of {name} to this host", on=STORE):
            while True:
                try:
                    await self._find(name)
                    break
                except StateUnavailable:
                    await mesh.clock.sleep(SOON_S)
                except (MeshError, OSError) as error:
                    mesh.telemetry.log.warning("code", name=name, error=str(error))
                    await mesh.clock.sleep(AGAIN_S)
        self._bringing.pop(name, None)
        self._news()

    async def _find(self, name: str) -> None:
        mesh, directory = self._mesh, None
        try:
            row = await jobs.job(mesh.state, names.service(name)[1])
        except NotFound:  # nor is it wanted for long
            self._there[name] = None
            return
        if not (await is_home(mesh) or await at_home(mesh, Path(row.run_dir))):
            directory = await fetched(mesh, row, [MODULES])
        self._loads[name], self._there[name] = _digest(row), directory


def _digest(row: jobs.JobRow) -> str:
    return loading.digest_of(loading.load_request(JobData.of(row.id, row.document, row.run_dir)))
