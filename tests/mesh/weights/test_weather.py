"""Weight transfers under faults: corrupt, slow, killed, lost, without disk space, between
trainers.
"""

from __future__ import annotations

import asyncio
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from loadtests.weights import models
from loadtests.weights.contents import identity_of
from loadtests.weights.scene import Member, OrderFailed
from meshrl.common.state import jobs
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from tests.load import scaled
from tests.mesh.weights.weather import ENDLESS, MODEL, POLL_S, WHOLE, WITHIN_S, Weather, until

pytestmark = [pytest.mark.timeout(180), pytest.mark.group("weather")]


INTO_A_CHUNK = 300_000  # bytes


def flip(files: set[Path]) -> Path:
    """Flip a bit in the middle of the largest of these files, and return the file."""
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def chunks(directory: Path) -> set[Path]:
    """Return the files of a chunk store."""
    return set(directory.glob("??/*"))


@pytest.mark.deep
async def test_a_bit_that_is_flipped_on_the_wire(made: Weather) -> None:
    await made.begin()
    await made.publish()
    made.road.corrupt_at = INTO_A_CHUNK  # of each connection: a host that is new has new ones
    engine = await made.new_engine(host=3)
    await until(lambda: made.road.corrupted_count, "a bit is flipped")
    assert await made.serves(engine) in (-1, 1)
    made.road.corrupt_at = -1
    await made.arrives(engine)


@pytest.mark.rotating(3)
async def test_a_bit_that_is_flipped_in_what_a_host_has_kept(made: Weather) -> None:
    await made.begin()
    await made.engine.kill()
    path = flip(chunks(made.scene.root(1) / "chunks"))
    spoiled = path.read_bytes()
    await made.arrives(await made.new_engine())
    assert path.read_bytes() != spoiled


@pytest.mark.rotating(3)
async def test_a_bit_that_is_flipped_in_the_store(made: Weather) -> None:
    await made.begin()
    store = made.scene.root(0) / "store"
    before = chunks(store)
    digest = await made.stage()
    path = flip(chunks(store) - before)
    spoiled = path.read_bytes()
    await made.commit(digest)
    await made.arrives(made.engine)  # once the trainer has written the chunk again
    assert path.read_bytes() != spoiled


SIZE = 8 << 20  # chunks of 1 MiB, whose deltas are in one blob
SHARE = 0.05  # of the elements that change from a version to the next
MOST = SHARE * 2.5 * SIZE  # bytes of a delta with its messages


class Versions:
    """Versions that differ in little from each other, on their way to one receiver."""

    def __init__(self, made: Weather) -> None:
        self.made, self.count = made, 0

    async def begin(self) -> None:
        """Publish the first version to the receiver."""
        made = self.made
        made.store, made.road = await made.on_a_road("weights", 0, "meshrl.services.weights")
        self.publisher = await made.scene.publisher()
        await self.publisher.ask("make", size=SIZE)
        self.receiver = await self.new_receiver(0)
        assert await self.carried(self.receiver, await self.staged(self.publisher)) > SIZE

    async def new_receiver(self, number: int) -> Member:
        receiver = await self.made.scene.receiver(number, host=1)
        await receiver.ask("ready", size=SIZE)
        return receiver

    async def staged(self, publisher: Member) -> str:
        """Stage the next version, of which deltas are being made."""
        await publisher.ask("change", share=SHARE, seed=self.count)
        told: dict[str, Any] = await publisher.ask("stage", version=self.count, deltas=True)
        self.identity = await publisher.ask("identity")
        self.count += 1
        return str(told["digest"])

    async def carried(self, receiver: Member, digest: str) -> int:
        """Return the bytes that arrived for a version, once the receiver has all of it."""
        before = self.made.road.carried_bytes
        await receiver.ask("receive", digest=digest)
        assert await receiver.ask("identity") == self.identity
        return self.made.road.carried_bytes - before

    async def in_the_middle(self, digest: str) -> Any:
        """Return the order to receive a version, once half of its delta has arrived."""
        road = self.made.road
        road.stall_at_bytes = road.carried_bytes + int(SHARE * SIZE)
        order = self.made.scene.tell(self.receiver, "receive", digest=digest)
        await self.made.stands()
        return order


@pytest.fixture
async def versions(made: Weather) -> Versions:
    found = Versions(made)
    await found.begin()
    return found


@pytest.mark.rotating(3)
async def test_who_makes_deltas_is_killed(versions: Versions) -> None:
    digest = await versions.staged(versions.publisher)
    await versions.publisher.kill()
    await versions.carried(versions.receiver, digest)
    again = await versions.made.scene.publisher()
    await again.ask("make", size=SIZE)
    for seed in range(versions.count):
        await again.ask("change", share=SHARE, seed=seed)
    assert await versions.carried(versions.receiver, await versions.staged(again)) < MOST


@pytest.mark.rotating(3)
async def test_who_receives_is_killed(versions: Versions) -> None:
    digest = await versions.staged(versions.publisher)
    order = await versions.in_the_middle(digest)
    await versions.receiver.kill()
    versions.made.goes_on()
    assert isinstance(await order, RuntimeError)
    receiver = await versions.new_receiver(1)
    assert await versions.carried(receiver, digest) < MOST
    digest = await versions.staged(versions.publisher)
    assert await versions.carried(receiver, digest) < MOST


@pytest.mark.deep
async def test_the_store_is_killed(versions: Versions) -> None:
    digest = await versions.staged(versions.publisher)
    order = await versions.in_the_middle(digest)
    await versions.made.store.kill()
    versions.made.goes_on()
    await versions.made.again()
    assert not isinstance(await order, OrderFailed | RuntimeError)
    assert await versions.receiver.ask("identity") == versions.identity
    await versions.carried(versions.receiver, await versions.staged(versions.publisher))
    after = await versions.staged(versions.publisher)
    await versions.receiver.ask("receive", digest=after)
    assert await versions.receiver.ask("identity") == versions.identity


NO_CHUNK = 100_000  # bytes, below those of a chunk: no file of this process gets larger
UNLIMITED = resource.RLIM_INFINITY


def full(member: Member, size: int) -> None:
    """Limit each file that the process writes to so many bytes, as a full disk would."""
    resource.prlimit(member.pid, resource.RLIMIT_FSIZE, (size, UNLIMITED))


@pytest.mark.rotating(3)
async def test_a_trainer_whose_disk_is_full_waits_and_nobody_sees_what_it_began(
    made: Weather,
) -> None:
    await made.begin()
    await made.publisher.ask("model", name="little", seed=1)
    full(made.publisher, NO_CHUNK)
    staging = made.scene.tell(made.publisher, "stage", version=1)
    await made.waits(made.publisher, on="disk")
    assert await made.serves(made.engine) == 0
    full(made.publisher, UNLIMITED)
    staged = await staging
    await made.commit(staged["digest"])
    await made.arrives(made.engine)


@pytest.mark.rotating(3)
async def test_an_engine_whose_disk_is_full_has_the_version_in_memory(made: Weather) -> None:
    await made.begin()
    full(made.engine, NO_CHUNK)
    await made.publish()
    await made.arrives(made.engine)
    full(made.engine, UNLIMITED)
    await made.publish()
    await made.arrives(made.engine)


SWEEPING = "tests.mesh.weights.sweeping_store"
KEPT = 3  # checkpoints, by `training.keep_checkpoints`


def digests(store: ChunkStore) -> set[str]:
    """Return the digests of all chunks there; others may be under way."""
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
    store.delete_unchanged(store.read_write_times(gone))
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
        """Return the digest of the version."""
        digest = await self._made.stage()
        self._chunks = self._there() - self._before
        assert digest in self._chunks
        return digest

    async def followed(self) -> None:
        """Publish enough versions for this one to be collected, and wait until it is deleted."""
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
    row = await jobs.read_job(made.scene.state, "job")
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
    late = await made.new_engine()  # its host has all chunks, and no process lists them
    assert await made.serves(made.engine) == 1
    await made.again()
    assert (await made.serves(made.engine), await made.serves(late)) == (1, -1)
    made.publisher = await made.scene.publisher()
    await made.publisher.ask("resume", step=1)
    await made.publish()
    await made.arrives(made.engine)
    await made.arrives(late)


ANYWHERE = pytest.mark.parametrize("share", [0.01, 0.5, 0.95])


@pytest.mark.rotating(3)
@ANYWHERE
async def test_a_store_that_is_killed_as_it_sends(made: Weather, share: float) -> None:
    await made.begin()
    made.stand(share)
    await made.publish()
    await made.stands()
    assert await made.serves(made.engine) == 0
    await made.store.kill()
    made.goes_on()  # so that the kernel's word that it is gone comes through
    assert await made.serves(made.engine) == 0
    await made.again()
    await made.arrives(made.engine)


@pytest.mark.rotating(3)
@ANYWHERE
async def test_an_engine_that_is_killed_as_it_receives(made: Weather, share: float) -> None:
    await made.begin()
    made.stand(share)
    await made.publish()
    await made.stands()
    await made.engine.kill()
    made.goes_on()
    await made.arrives(await made.new_engine())


@pytest.mark.rotating(3)
@ANYWHERE
async def test_a_trainer_that_is_killed_as_it_stages(made: Weather, share: float) -> None:
    await made.begin(far=True)
    made.stand(share)
    await made.publisher.ask("model", name=MODEL, seed=1)
    staging = made.scene.tell(made.publisher, "stage", version=1)
    await made.stands()
    await made.publisher.kill()
    await staging
    made.goes_on()
    assert await made.serves(made.engine) == 0
    made.publisher = await made.scene.publisher(host=2)
    await made.publisher.ask("resume", step=0)
    await made.publish()
    await made.arrives(made.engine)


@pytest.mark.rotating(3)
async def test_a_host_that_is_killed_as_it_serves_is_left_for_another(made: Weather) -> None:
    await made.begin()
    first, road = await made.agent_on_a_road(1)
    _, other = await made.agent_on_a_road(2)
    beside = await made.new_engine(host=2)
    await made.publish()
    for engine in (made.engine, beside):
        await made.arrives(engine)
    made.stand(0.0)  # the store gives nothing any more
    made.stand(0.0, other)
    made.stand(0.5, road)
    engine = await made.new_engine(host=3)
    await made.stands(road)
    await first.kill()
    assert await made.serves(engine) == -1
    road.stall_at_bytes = other.stall_at_bytes = ENDLESS
    given, before = other.carried_bytes, made.road.carried_bytes
    await made.arrives(engine)
    assert other.carried_bytes - given > 0.3 * WHOLE > made.road.carried_bytes - before


OTHERS_BYTES_S = 20 << 20
SLOW_BYTES_S = OTHERS_BYTES_S // 100


@pytest.mark.deep
async def test_a_host_that_stalls_as_it_serves_is_left_for_another(made: Weather) -> None:
    await made.begin()
    agent = await made.scene.agent(1)
    await made.publish()
    await made.arrives(made.engine)
    agent.signal(signal.SIGSTOP)  # its kernel accepts connections, and the process does not answer
    try:
        engine = await made.new_engine(host=3)
        await made.arrives(engine)
    finally:
        agent.signal(signal.SIGCONT)


@pytest.mark.rotating(3)
async def test_a_store_that_stalls_in_the_middle_is_left_for_a_host_that_has_it(
    made: Weather,
) -> None:
    await made.begin()
    await made.scene.agent(1)
    await made.publish()
    await made.arrives(made.engine)
    made.stand(0.0)  # the store's bulk port carries nothing more; its other one does
    engine = await made.new_engine(host=3)
    await made.arrives(engine)


@pytest.mark.deep
async def test_a_receiver_at_a_hundredth_of_the_others_pace_holds_nobody_up(made: Weather) -> None:
    await made.begin()
    made.scene.settings(3, rate_down=int(SLOW_BYTES_S / scaled(1.0)))  # of what others do here
    slow = await made.new_engine(host=3)
    made.scene.settings(4, rate_down=OTHERS_BYTES_S)
    other = await made.new_engine(host=4)
    await made.arrives(other)
    await made.publish()
    await asyncio.gather(*(until_served(made, engine) for engine in (made.engine, other)))
    assert await made.serves(slow) == -1  # a version takes it most of a minute
    chunks = made.scene.root(3) / "chunks"

    def has_some() -> bool:
        return any(part.is_file() and part.stat().st_size for part in chunks.rglob("*"))

    await until(has_some, "the slow one has a part")


async def until_served(made: Weather, engine: Member) -> None:
    """Wait until the engine has the newest version, whatever it answers before."""
    async with asyncio.timeout(scaled(WITHIN_S)):
        while (await engine.ask("serves"))["version"] < len(made.seeds) - 1:
            await asyncio.sleep(POLL_S)


OTHER = 70  # seed of what the successor publishes


@pytest.mark.rotating(3)
async def test_a_trainer_that_was_replaced_commits_nothing(made: Weather) -> None:
    await made.begin()
    first = made.publisher
    await first.ask("model", name=MODEL, seed=1)
    staged = (await first.ask("stage", version=1))["digest"]
    first.signal(signal.SIGSTOP)
    second = await made.scene.publisher()
    await second.ask("resume", step=0)
    digest = await made.stage(OTHER, second)
    await made.commit(digest, OTHER, second)
    first.signal(signal.SIGCONT)
    late = await made.scene.tell(first, "commit", digest=staged)
    assert isinstance(late, Exception), late  # refused, or it has ended as it woke
    assert getattr(late, "code", "lost") in ("fenced", "lost", "refused"), late
    await made.arrives(made.engine)
    made.publisher = second
    await made.publish()
    await made.arrives(made.engine)
