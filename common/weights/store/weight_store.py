"""A client of the weight store's bulk port: writes and reads finished groups, chunks of weights and
files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from meshrl.common.api.transfer.bulk import GROUPS, PUBLISHED, WEIGHTS
from meshrl.common.api.weights import STORE, Examine, LayOut, Publish, Weights
from meshrl.common.base.errors import Damaged, PeerLost
from meshrl.common.base.files import damage
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import NotThere, patiently
from meshrl.common.records.checkpoints import check_paths
from meshrl.common.state import events, registry
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.chunks.chunks import DamageEvent
from meshrl.common.weights.chunks.partial import Partial
from meshrl.common.weights.store import host_chunks

STALL_S = 2.0  # without a byte: what can be done without is


async def store_entry(mesh: Mesh) -> registry.Entry:
    """The weight store's entry; NotThere while it has no live lease."""
    entry = await registry.lookup(mesh.state, STORE)
    if entry is None or not entry.alive:
        raise NotThere("the weight store has no live lease", fix="it is being restarted")
    return entry


async def put(
    mesh: Mesh,
    bulk: BulkClient,
    content: bytes | memoryview,
    what: str,
    *,
    space: str = WEIGHTS,
) -> str:
    """Writes bytes durably, waiting for the store if need be; their digest."""

    return await _written(mesh, bulk, what, lambda entry: bulk.put(entry, content, space=space))


async def tell(mesh: Mesh, untold: deque[DamageEvent]) -> None:
    """Tells of chunks that a writer has found damaged, and written again."""
    while untold:
        await patiently(mesh.clock, partial(events.append, mesh.state, damage.EVENT, *untold[0]))
        untold.popleft()


async def get(
    mesh: Mesh,
    bulk: BulkClient,
    digest: str,
    what: str,
    *,
    job: str = "",
    space: str = WEIGHTS,
    needed: Collection[str] | None = None,
    within_s: float | None = None,
) -> bytes:
    """The bytes of a digest, once the store is there; NotFound when it does not hold them, Damaged
    when they are not what was written. The store has set them aside then, and told of it as of a
    file of the job. `needed`: other processes of this host need them, too, and may have fetched
    them; the store is not asked then, and these chunks do not go to make room for them.
    `within_s`: of something that is done without as well, which is tried once, for so long;
    DeadlineExceeded, also when nothing moves for `STALL_S`.
    """
    bounds = {} if within_s is None else {"deadline_s": within_s, "stall_s": STALL_S}

    async def once() -> bytes:
        entry = await store_entry(mesh)

        def fetch() -> Awaitable[bytes]:
            return bulk.get(entry, digest, space=space, **bounds)

        try:
            if needed is not None and entry.host != mesh.settings.host:
                return await host_chunks.through(mesh, digest, fetch, needed)
            return await fetch()
        except Damaged:
            kind = "group" if space == GROUPS else "weights"
            await _blame(mesh, digest, kind, job, space)
            raise

    with mesh.wait(what, on=STORE):
        if within_s is None:
            return await patiently(mesh.clock, once)
        async with mesh.clock.timeout(within_s, what):
            return await once()


async def put_file(mesh: Mesh, bulk: BulkClient, path: Path, what: str) -> str:
    """Writes what a file holds durably, as `put`; it may be more than memory holds."""

    return await _written(mesh, bulk, what, lambda entry: bulk.put_file(entry, path))


async def _written(
    mesh: Mesh, bulk: BulkClient, what: str, once: Callable[[registry.Entry], Awaitable[str]]
) -> str:
    async def tried() -> str:
        return await once(await store_entry(mesh))

    with mesh.wait(what, on=STORE):
        digest = await patiently(mesh.clock, tried)
        await tell(mesh, bulk.untold)
    return digest


async def fetch_file(
    mesh: Mesh,
    bulk: BulkClient,
    digest: str,
    path: Path,
    what: str,
    *,
    job: str = "",
    kind: str = "weights",
    space: str = WEIGHTS,
) -> None:
    """Puts the bytes of a digest into a file, as `get`: whole, durable and with mode 0600, or not
    at all. What has arrived when the store goes away is kept until it is back.
    """

    async def once() -> None:
        try:
            await bulk.receive(await store_entry(mesh), arriving, space=space)
        except Damaged:
            await _blame(mesh, digest, kind, job, space)
            raise

    with mesh.wait(what, on=STORE), Partial.of_file(path, digest) as arriving:
        await patiently(mesh.clock, once)


async def published(mesh: Mesh, asked: Publish) -> dict[str, str]:
    """The digests by path of files at a run's home, once they are chunks of the store; it takes as
    long as it takes to copy them, where they are not on its disk. NotFound, Damaged.
    """
    store = mesh.ref(STORE)
    with mesh.wait(f"files of {asked.job} to be published", on=STORE):
        while True:
            answer = await patiently(mesh.clock, lambda: store.call(Weights.publish, asked))
            if answer.whole:
                return answer.files


async def lay_out(mesh: Mesh, asked: LayOut) -> None:
    """Returns once the store has made a checkpoint's directory at the run's home of its chunks."""
    store = mesh.ref(STORE)
    with mesh.wait(f"checkpoint {asked.name} to be laid out", on=STORE):
        while not await patiently(mesh.clock, lambda: store.call(Weights.lay_out, asked)):
            pass


async def _blame(mesh: Mesh, digest: str, kind: str, job: str, space: str) -> None:
    """PeerLost when it was not the store that changed the bytes, but the way. `kind`: of
    `meshrl.common.base.files.damage`.
    """
    if await mesh.ref(STORE).call(Weights.examine, Examine(digest, kind, job, space)):
        raise PeerLost(f"chunk {digest} arrived changed", where=STORE) from None


async def fetch_checkpoint(
    mesh: Mesh, bulk: BulkClient, job: str, name: str, below: Sequence[str], directory: Path
) -> None:
    """Makes `directory` of a checkpoint's files, those that `below` names or that lie below its
    folders, from wherever the run is at home; NotFound or Damaged when one is not what was written.
    """
    files = await published(mesh, Publish(job, name, list(below)))
    check_paths(files)
    for path, digest in files.items():
        place, said = directory / path, f"{path} of checkpoint {name}"
        about = mesh, bulk, digest, place, said
        await fetch_file(*about, job=job, kind="checkpoint", space=PUBLISHED)
