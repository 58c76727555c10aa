"""A bit that is flipped, on the wire or on a disk, is found before anything is put in place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mesh.weights.weather import Weather, until

pytestmark = [pytest.mark.timeout(180), pytest.mark.group("weather")]
INTO_A_CHUNK = 300_000  # bytes


def flip(files: set[Path]) -> Path:
    """Changes a bit in the middle of the largest of these files; the file."""
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def chunks(directory: Path) -> set[Path]:
    """The files of a chunk store."""
    return set(directory.glob("??/*"))


@pytest.mark.deep
async def test_a_bit_that_is_flipped_on_the_wire(made: Weather) -> None:
    await made.begin()
    await made.publish()
    made.road.spoils = INTO_A_CHUNK  # of each connection: a host that is new has new ones
    engine = await made.new_engine(host=3)
    await until(lambda: made.road.spoiled, "a bit is flipped")
    assert await made.serves(engine) in (-1, 1)
    made.road.spoils = -1
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
