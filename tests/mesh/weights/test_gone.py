"""Versions that are gone as somebody pulls them, and a store whose host is lost."""

from __future__ import annotations

import shutil

import pytest

from loadtests.weights import models
from loadtests.weights.contents import identity_of
from loadtests.weights.scene import OrderFailed
from meshrl.common.state import jobs
from meshrl.common.weights.chunks.chunks import ChunkStore
from tests.mesh.weights.weather import MODEL, Weather, until

pytestmark = [pytest.mark.timeout(180), pytest.mark.group("weather")]
SWEEPING = "tests.mesh.weights.sweeping_store"
KEPT = 3  # checkpoints, by `training.keep_checkpoints`


def digests(store: ChunkStore) -> set[str]:
    """Those of all chunks there; others may be on their way."""
    names = {path.name for path in store.directory.glob("??/*")}
    return {name for name in names if not name.startswith(".")}


@pytest.mark.rotating(3)
async def test_a_version_that_is_collected_as_it_is_pulled(made: Weather) -> None:
    await made.begin()
    store = ChunkStore(made.scene.root(0) / "store")
    before = digests(store)
    made.stand(0.4)
    await made.publish()
    await made.stands()
    gone = digests(store) - before
    await made.publish()
    store.delete(store.written(gone))
    assert await made.serves(made.engine) == 0
    made.goes_on()
    await made.arrives(made.engine)


class Swept:
    """A version that the store has let go of, once others have followed it."""

    def __init__(self, made: Weather) -> None:
        self._made, self._store = made, ChunkStore(made.scene.root(0) / "store")
        self._before = self._there()

    def _there(self) -> set[str]:
        return digests(self._store)

    async def staged(self) -> str:
        """The digest of the version."""
        digest = await self._made.stage()
        self._chunks = self._there() - self._before
        assert digest in self._chunks
        return digest

    async def followed(self) -> None:
        """Returns once it is gone."""
        for _ in range(KEPT):
            await self._made.publish()
        await until(lambda: not any(map(self._store.has, self._chunks)), "it is gone")


@pytest.mark.deep
async def test_a_version_that_is_swept_as_an_engine_pulls_it(made: Weather) -> None:
    await made.begin(store=SWEEPING)
    swept = Swept(made)
    made.stand(0.4)
    await made.commit(await swept.staged())
    await made.stands()
    await swept.followed()
    assert await made.serves(made.engine) == 0
    made.goes_on()
    await made.arrives(made.engine)


@pytest.mark.rotating(3)
async def test_who_pulls_a_version_that_is_swept_hears_that_it_is_gone(made: Weather) -> None:
    await made.begin(store=SWEEPING)
    receiver = await made.scene.receiver(9, host=3)
    await receiver.ask("take", model=MODEL)
    swept = Swept(made)
    made.stand(0.4)
    digest = await swept.staged()
    receiving = made.scene.tell(receiver, "receive", digest=digest)
    await made.stands()
    await made.commit(digest)
    await swept.followed()
    made.goes_on()
    refused = await receiving
    assert isinstance(refused, OrderFailed) and refused.code == "not_found", refused
    row = await jobs.job(made.scene.state, "job")
    await receiver.ask("receive", digest=row.manifest)
    newest = models.drawn(MODEL, made.seeds[-1])
    assert await receiver.ask("identity") == identity_of(newest)
    await made.arrives(made.engine)


@pytest.mark.deep
async def test_a_store_whose_host_is_lost(made: Weather) -> None:
    await made.begin()
    await made.publish()
    await made.arrives(made.engine)
    await made.store.kill()
    await made.publisher.kill()
    shutil.rmtree(made.scene.root(0) / "store")
    late = await made.new_engine()  # its host has all chunks, and nobody who says which
    assert await made.serves(made.engine) == 1
    await made.again()
    assert (await made.serves(made.engine), await made.serves(late)) == (1, -1)
    made.publisher = await made.scene.publisher()
    await made.publisher.ask("resume", step=1)
    await made.publish()
    await made.arrives(made.engine)
    await made.arrives(late)
