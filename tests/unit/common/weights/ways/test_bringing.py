"""What a host lacks comes by the way that is chosen, and what is left by the plainest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshrl.common.base.errors import NotFound, PeerLost
from meshrl.common.state import events
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.common.weights.store.host_chunks import WantedVersion
from meshrl.common.weights.ways import bringing as module
from meshrl.common.weights.ways.bringing import EVENT, Bringing
from tests.load import scaled
from tests.unit.common.weights.ways.bench import Bench, benched


class FromFolder:
    """A way: copies files of a folder, at a pace; it can be made to break off."""

    def __init__(self, name: str, source: ChunkStore, s_per_chunk: float = 0.0) -> None:
        self.name, self._source, self.s_per_chunk = name, source, s_per_chunk
        self.breaks_after, self.received = -1, 0

    async def publish(self, manifest: str) -> None:
        """The folder is there."""

    async def receive(self, version: WantedVersion, into: ChunkStore) -> None:
        self.received += 1
        for number, digest in enumerate(version.lacking):
            if number == self.breaks_after:
                raise PeerLost("a member was lost")
            await asyncio.sleep(self.s_per_chunk)
            into.write(self._source.read(digest))


def brought(bench: Bench, how: str = "auto") -> tuple[Bringing, FromFolder, FromFolder]:
    plain, other = FromFolder("pull", bench.chunks), FromFolder("collective", bench.chunks)
    return Bringing(bench.mesh, [plain, other], how), plain, other


@pytest.mark.parametrize("how", ["pull", "collective"])
async def test_the_way_that_the_job_names_is_taken(tmp_path: Path, how: str) -> None:
    async with benched(tmp_path) as bench:
        bringing, plain, other = brought(bench, how)
        for number in range(4):
            into = ChunkStore(tmp_path / f"into{number}")
            await bringing.bring(bench.version, into)
            assert bench.whole(into)
        assert (plain.received, other.received) == ((4, 0) if how == "pull" else (0, 4))
        assert (bringing.last or {})["way"] == how


async def test_what_a_way_does_not_bring_comes_by_the_plainest(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        bringing, plain, other = brought(bench, "collective")
        other.breaks_after = 2
        into = ChunkStore(tmp_path / "into")
        await bringing.bring(bench.version, into)
        assert bench.whole(into) and (plain.received, other.received) == (1, 1)
        told = bringing.last or {}
        assert "a member was lost" in told["verdict"] and told["way"] == "collective"
        (event,) = [e for e in await events.read_all(bench.state) if e.kind == EVENT]
        assert event.fields["verdict"] == told["verdict"] and event.fields["host"] == "one"


async def test_a_slow_network_keeps_to_pulling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAST", 1e12)
    async with benched(tmp_path) as bench:
        bringing, _, other = brought(bench)
        for number in range(5):
            await bringing.bring(bench.version, ChunkStore(tmp_path / f"into{number}"))
        assert other.received == 0


async def test_a_faster_way_is_found_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAST", 1.0)
    async with benched(tmp_path) as bench:
        bringing, plain, other = brought(bench)
        plain.s_per_chunk = scaled(0.2)  # of five chunks; the other copies them within milliseconds
        for number in range(5):
            into = ChunkStore(tmp_path / f"into{number}")
            await bringing.bring(bench.version, into)
            assert bench.whole(into)
        assert (plain.received, other.received) == (2, 3)
        assert (bringing.last or {})["verdict"].startswith("it took")
        ways = [e.fields["way"] for e in await events.read_all(bench.state) if e.kind == EVENT]
        assert ways == ["pull", "collective"]


async def test_what_the_store_lacks_is_said_as_it_is(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        bringing, _, _ = brought(bench)
        bench.chunks.path(next(iter(bench.version.lacking))).unlink()
        with pytest.raises(NotFound):
            await bringing.bring(bench.version, ChunkStore(tmp_path / "into"))
