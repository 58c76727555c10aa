"""KV tier: budget, eviction order, removal of abandoned chunks and chunk files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.measuring.meshed import own_keys, unrenewed
from meshrl.common.base.errors import ConfigError
from meshrl.common.base.files.file_locks import is_file_at, try_lock_file
from meshrl.common.generation import kv_directories
from meshrl.common.generation.kv_directories import make_private_directory, remove_abandoned
from meshrl.common.job.config import KvConfig, RolloutConfig
from meshrl.services.engine.kv.cache_factory import open_tiers
from meshrl.services.engine.kv.chunk_files import (
    HEADER_BYTES,
    ChunkFiles,
    ChunkHeader,
    StoredChunk,
    compute_chunk_names,
    compute_domain,
    is_domain,
)
from meshrl.services.engine.kv.eviction import HALF_LIFE_S, choose_evictions, compute_eviction_cost
from meshrl.services.engine.kv.kv_tier import KVTier
from meshrl.services.engine.kv.offload_policy import (
    MIN_CHUNKS,
    PROBE_EVERY,
    OffloadPolicy,
    TransferRate,
)
from tests.load import scaled

DOMAIN, LATER = (compute_domain(weights, "", "layout", "keep") for weights in ("one", "two"))
NAMES = compute_chunk_names(DOMAIN, np.arange(128 * 64))
SIZE = 1000
WHOLE = SIZE + HEADER_BYTES


class WallClock:
    def __init__(self) -> None:
        self.now_s = 2e9  # files written now are old by this clock

    def __call__(self) -> float:
        return self.now_s


def create_tier(
    path: Path, chunks: float, wall: WallClock | None = None, name: str = "disk"
) -> KVTier:
    return KVTier(name, path, int(chunks * WHOLE), wall or WallClock())


def put(
    tier: KVTier, at: int, seconds: float = 1.0, session: int = 0, domain: str = DOMAIN
) -> bool:
    content = np.full(SIZE, at, np.uint8)
    return tier.put(domain, NAMES[at], ChunkHeader(128 * at, 128, seconds, session), content)


def list_stored(tier: KVTier) -> set[int]:
    return {at for at, name in enumerate(NAMES) if tier.files.has(DOMAIN, name)}


# -- eviction order ----------------------------------------------------------------------------


def make_chunk(
    seconds: float, session: int = 0, used_s: float = 0.0, size: int = 100
) -> StoredChunk:
    return StoredChunk(Path(f"{seconds}"), size, used_s, ChunkHeader(0, 128, seconds, session))


def test_cheapest_chunks_are_evicted_first() -> None:
    cheap, expensive, large = make_chunk(1.0), make_chunk(9.0), make_chunk(5.0, size=1000)
    assert choose_evictions([expensive, cheap, large], 150, 1.0, ()) == [large]
    assert choose_evictions([expensive, cheap], 150, 1.0, ()) == [cheap, expensive]
    assert choose_evictions([expensive, cheap], 0, 1.0, ()) == []


def test_eviction_cost_of_a_chunk_in_the_next_tier_is_its_reload() -> None:
    assert compute_eviction_cost(make_chunk(9.0), 0.0, (), reload_s_per_byte=0.01) == pytest.approx(
        0.01
    )
    assert compute_eviction_cost(make_chunk(9.0), 0.0, (), reload_s_per_byte=0.0) == pytest.approx(
        0.09
    )


def test_ended_trajectory_is_evicted_before_a_waiting_one() -> None:
    waiting, finished, shared = make_chunk(1.0, 7), make_chunk(5.0, 8), make_chunk(1.0)
    order = choose_evictions([waiting, finished, shared], 1000, 4 * HALF_LIFE_S, {7})
    assert order == [finished, shared, waiting]


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(0, 2), st.floats(0, 5)), max_size=20))
def test_chunks_in_use_are_not_evicted(some: list[tuple[float, int, float]]) -> None:
    now_s = 2.0
    chunks = [make_chunk(seconds, session, used_s) for seconds, session, used_s in some]
    half = StoredChunk(Path(".half"), 100, 1.0, None)
    evicted = choose_evictions([*chunks, half], 10_000, now_s, {1})
    assert half not in evicted
    assert evicted == [one for one in evicted if one.last_used_s <= now_s]
    assert len(evicted) == sum(one.last_used_s <= now_s for one in chunks)
    assert choose_evictions([half], 10_000, 100.0, ()) == [half], "whoever wrote it was killed"


# -- the budget ----------------------------------------------------------------------------------


def test_tier_stays_within_its_budget(tmp_path: Path) -> None:
    tier = create_tier(tmp_path, 10)
    for at in range(40):
        assert put(tier, at, seconds=at)
        assert tier.used_bytes <= tier.budget_bytes
        assert tier.used_bytes == sum(one.bytes for one in tier.files.scan())
    assert 39 in list_stored(tier) and 0 not in list_stored(tier)
    assert not put(create_tier(tmp_path / "small", 0.5), 0)
    tier.close()


def test_two_engines_share_one_budget(tmp_path: Path) -> None:
    one, two = create_tier(tmp_path, 10), create_tier(tmp_path, 10)
    for at in range(20):
        put((one, two)[at % 2], at)
    assert one.used_bytes == two.used_bytes <= one.budget_bytes
    assert put(one, 19) and one.used_bytes == two.used_bytes, "who finds it there writes nothing"
    one.close()
    assert list_stored(two)
    two.close()
    assert not tmp_path.exists(), "the last one takes it away"


def test_reserved_chunk_is_not_evicted(tmp_path: Path) -> None:
    wall = WallClock()
    tier = create_tier(tmp_path, 4, wall)
    for at in range(4):
        put(tier, at, seconds=0.1)
    assert tier.files.reserve(DOMAIN, NAMES[2], wall.now_s + 60)
    for at in range(4, 20):
        put(tier, at, seconds=5.0)
    assert 2 in list_stored(tier)


def test_chunks_evicted_from_memory_move_to_disk(tmp_path: Path) -> None:
    memory, disk = create_tier(tmp_path / "m", 4, name="memory"), create_tier(tmp_path / "d", 40)

    def move_to_disk(one: StoredChunk) -> None:
        disk.copy_from(one)

    for at in range(20):
        content = np.full(SIZE, at, np.uint8)
        head = ChunkHeader(128 * at, 128, 1.0, 0)
        memory.put(DOMAIN, NAMES[at], head, content, 0.0, move_to_disk)
    assert list_stored(memory) | list_stored(disk) == set(range(20))
    read = disk.files.read(DOMAIN, NAMES[0])
    assert read is not None and (read[1] == 0).all()


def test_full_disk_is_retried_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = WallClock()
    tier = create_tier(tmp_path, 10, wall)
    blocked = tier.files.path(DOMAIN, NAMES[0])
    blocked.parent.mkdir(parents=True)
    blocked.parent.rmdir()
    blocked.parent.write_text("no directory")  # any failing write
    assert not put(tier, 0) and tier.last_error and tier.used_bytes == 0
    assert not put(tier, 1), "it rests"
    wall.now_s += 11
    assert put(tier, 1) and not tier.last_error


def test_wrong_usage_of_a_killed_engine_is_corrected(tmp_path: Path) -> None:
    tier = create_tier(tmp_path, 10)
    for at in range(5):
        put(tier, at)
    tier._add_used(7 * WHOLE)
    assert put(tier, 9) and tier.used_bytes == 6 * WHOLE


# -- weights and sessions ------------------------------------------------------------------------


def test_chunks_of_unused_weights_are_removed(tmp_path: Path) -> None:
    one, two = create_tier(tmp_path, 50), create_tier(tmp_path, 50)
    locks = [tier.lock_domain(DOMAIN) for tier in (one, two)]
    put(one, 1)
    os.close(locks[0])  # type: ignore[arg-type]
    assert one.remove_unusable() == 0 and list_stored(one) == {1}, "the other one has them"
    os.close(locks[1])  # type: ignore[arg-type]
    assert one.remove_unusable() == WHOLE and not list_stored(one) and one.used_bytes == 0


def test_resumable_session_retains_chunks_of_older_weights(tmp_path: Path) -> None:
    tier = create_tier(tmp_path, 50)
    put(tier, 0)  # of a shared prompt
    put(tier, 1, session=7)
    tier.mark_resumable(7)
    assert tier.remove_unusable() == 0 and list_stored(tier) == {0, 1}
    tier.unmark_resumable(7)
    tier.remove_session_chunks(DOMAIN, NAMES[:2], 7)
    assert list_stored(tier) == {0}, "what others may use stays as long as its weights"
    assert tier.remove_unusable() == WHOLE and tier.used_bytes == 0


# -- abandoned chunks ----------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from meshrl.services.engine.kv.kv_tier import KVTier
on = KVTier("disk", Path(sys.argv[1]), 1 << 20, lambda: 2e9)
on.lock_domain("0" * 64)
on.mark_resumable(3)
path = on.files.directory / ("0" * 64) / "ab" / ".half"
path.parent.mkdir()
path.write_bytes(b"x")
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_killed_engine(directory: Path) -> None:
    words = [sys.executable, "-c", KILLED, str(directory)]
    assert subprocess.run(words, check=False, timeout=scaled(60)).returncode == -9


def test_chunks_of_a_killed_engine_are_removed(tmp_path: Path) -> None:
    run_killed_engine(tmp_path / "j")
    tier = create_tier(tmp_path / "j", 10)
    assert tier.list_resumable() == set() and not list(tier.files.scan()) and tier.used_bytes == 0
    tier.close()


def test_host_removes_unused_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_directories, "SHARED_MEMORY", tmp_path / "shm")
    root = kv_directories.get_memory_root(str(tmp_path))
    run_killed_engine(root / "dead")
    alive = create_tier(root / "alive", 10)
    put(alive, 1)
    remove_abandoned(str(tmp_path))
    assert not (root / "dead").exists() and list_stored(alive) == {1}
    alive.close()
    assert not root.exists()


def test_host_removes_memory_of_a_dead_mesh_with_another_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_directories, "SHARED_MEMORY", tmp_path / "shm")
    evicted, other = (
        kv_directories.get_memory_root(str(tmp_path / name)) for name in ("gone", "other")
    )
    run_killed_engine(evicted / "j")
    alive = create_tier(other / "j", 10)
    put(alive, 1)
    (tmp_path / "shm" / "somebody").mkdir()
    remove_abandoned(str(tmp_path))
    assert (
        not evicted.exists()
        and list_stored(alive) == {1}
        and (tmp_path / "shm" / "somebody").exists()
    )
    alive.close()


def occupy_name(place: Path, way: int) -> None:
    """Occupy a name as another user would: a file, a link, or a directory that others can read."""
    place.parent.mkdir(exist_ok=True)
    if way % 3 == 0:
        place.touch()
    elif way % 3 == 1:
        place.symlink_to("/nonexistent")
    else:
        place.mkdir()
        place.chmod(0o755)


async def test_occupied_shared_memory_names_disable_only_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_directories, "SHARED_MEMORY", tmp_path / "shm")
    mesh = unrenewed("engine/one", own_keys())
    limits = RolloutConfig(kv=KvConfig(memory=1e-3))
    occupied = []
    for way in range(kv_directories.MAX_MEMORY_DIRECTORIES - 1):
        occupied.append(kv_directories.get_memory_root(mesh.settings.run_root))
        occupy_name(occupied[-1], way)
    [tier] = await open_tiers(mesh, "j", limits)
    put(tier, 1)
    occupied[0].unlink()  # a name that is free again does not separate the engines of a host
    [too] = await open_tiers(mesh, "j", limits)
    assert list_stored(too) == {1} and too.files.directory == tier.files.directory
    tier.close()
    too.close()
    occupy_name(occupied[0], 0)
    occupy_name(kv_directories.get_memory_root(mesh.settings.run_root), 2)
    assert await open_tiers(mesh, "j", limits) == []
    assert mesh.telemetry.counters["kv_not_kept"] == 1
    await mesh.leave()


def test_lock_of_a_replaced_file_is_invalid(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    descriptor = os.open(mark, os.O_RDWR)
    mark.unlink()
    assert not is_file_at(descriptor, mark)
    mark.touch()
    assert not is_file_at(descriptor, mark)
    os.close(descriptor)
    with try_lock_file(mark) as lock, try_lock_file(mark) as again:
        assert lock and not again
    with try_lock_file(tmp_path / "none") as lock:
        assert not lock


def test_directory_open_to_others_is_rejected(tmp_path: Path) -> None:
    assert make_private_directory(tmp_path / "a" / "b").stat().st_mode & 0o77 == 0
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    for name in ("open", "link"):
        with pytest.raises(ConfigError, match="other users can read"):
            make_private_directory(tmp_path / name)


# -- measurements ---------------------------------------------------------------------------------


def test_transfer_rate_follows_recent_measurements() -> None:
    rate = TransferRate()
    assert rate.s_per_byte == 0.0
    for _ in range(30):
        rate.add(1000, 1.0)
    assert rate.s_per_byte == pytest.approx(0.001)
    for _ in range(30):
        rate.add(1000, 3.0)
    assert rate.s_per_byte == pytest.approx(0.003, rel=0.01)


def test_unused_chunks_are_rarely_offloaded_until_reuse() -> None:
    policy = OffloadPolicy()
    first_answers = [policy.is_worthwhile(1.0, 0.01) for _ in range(MIN_CHUNKS)]
    assert all(first_answers), "nobody knows yet"
    for _ in range(MIN_CHUNKS):
        policy.count_offload()
    later_answers = [policy.is_worthwhile(1.0, 0.01) for _ in range(160)]
    assert sum(later_answers) == 160 // PROBE_EVERY
    for _ in range(MIN_CHUNKS // 2):
        policy.count_reuse()
    assert policy.reuse_probability == 0.5
    assert policy.is_worthwhile(1.0, 0.49) and not all(
        policy.is_worthwhile(1.0, 0.51) for _ in range(3)
    )


NAME, OTHER = compute_chunk_names(DOMAIN, np.arange(256))
HEAD = ChunkHeader(128, 128, 0.25, 7)
CONTENT = np.arange(5000, dtype=np.uint32).view(np.uint8)


@pytest.fixture
def files(tmp_path: Path) -> ChunkFiles:
    made = ChunkFiles(tmp_path)
    made.write(DOMAIN, NAME, HEAD, CONTENT)
    return made


def test_written_chunk_is_read(files: ChunkFiles) -> None:
    make_chunk = files.read(DOMAIN, NAME)
    assert make_chunk is not None
    head, content = make_chunk
    assert head == HEAD and (content == CONTENT).all()
    assert files.read(DOMAIN, OTHER) is None and files.read("other", NAME) is None


@pytest.mark.parametrize("bit", [0, 8 * 9, 8 * 40, 8 * (HEADER_BYTES - 1), 8 * HEADER_BYTES, -1])
def test_chunk_with_a_flipped_bit_is_a_miss_and_is_removed(files: ChunkFiles, bit: int) -> None:
    path = files.path(DOMAIN, NAME)
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
    assert files.read(DOMAIN, NAME) is None
    assert not path.exists()


@pytest.mark.parametrize("length", [0, 10, HEADER_BYTES, HEADER_BYTES + 1, -1])
def test_truncated_file_is_a_miss(files: ChunkFiles, length: int) -> None:
    path = files.path(DOMAIN, NAME)
    path.write_bytes(path.read_bytes()[:length])
    assert files.read(DOMAIN, NAME) is None


def test_longer_file_and_misnamed_chunk_are_misses(files: ChunkFiles) -> None:
    path = files.path(DOMAIN, NAME)
    whole = path.read_bytes()
    path.write_bytes(whole + b"x")
    assert files.read(DOMAIN, NAME) is None
    files.path(DOMAIN, OTHER).parent.mkdir(exist_ok=True)
    files.path(DOMAIN, OTHER).write_bytes(whole)
    assert files.read(DOMAIN, OTHER) is None


def test_chunk_being_read_is_not_removed(
    files: ChunkFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lock the file as `read` does, and try to remove it."""
    path = files.path(DOMAIN, NAME)
    import fcntl

    with path.open("rb") as reader:
        fcntl.flock(reader.fileno(), fcntl.LOCK_SH)
        assert not files.remove(path) and path.exists()
    assert files.remove(path) and not path.exists()
    assert not files.remove(path), "it is gone already"


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    files = ChunkFiles(tmp_path / "on" / "none")
    files.write(DOMAIN, NAME, HEAD, CONTENT)
    folder = files.path(DOMAIN, OTHER).parent
    folder.mkdir(exist_ok=True)
    blocked = files.path(DOMAIN, OTHER)
    blocked.mkdir()  # a rename over a directory fails at the very end
    with pytest.raises(OSError) as raised:
        files.write(DOMAIN, OTHER, HEAD, CONTENT)
    assert raised.value.errno in (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST)
    assert [path for path in folder.iterdir() if path.name.startswith(".")] == []


def test_threads_write_and_read_the_same_chunks(tmp_path: Path) -> None:
    wrong: list[object] = []
    names = compute_chunk_names(DOMAIN, np.arange(128 * 8))

    def work(seed: int) -> None:
        try:
            use(seed)
        except BaseException as error:
            wrong.append(error)

    def use(seed: int) -> None:
        files, random = ChunkFiles(tmp_path), np.random.default_rng(seed)
        for _ in range(60):
            at = int(random.integers(len(names)))
            content = np.full(3000, at, np.uint8)
            match int(random.integers(3)):
                case 0:
                    files.write(DOMAIN, names[at], ChunkHeader(at, 128, 0.1, 0), content)
                case 1:
                    files.remove(files.path(DOMAIN, names[at]))
                case _:
                    make_chunk = files.read(DOMAIN, names[at])
                    if make_chunk is not None and not (make_chunk[1] == at).all():
                        wrong.append(at)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not list(tmp_path.glob("*/??/.*"))


def test_directory_removed_during_a_write_is_created_again(
    files: ChunkFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remove the directory between `mkdir` and pathlib's check that it is a directory."""
    folder, calls = files.path(DOMAIN, OTHER).parent, [0]
    folder.mkdir(exist_ok=True)
    is_dir = Path.is_dir

    def evicted(path: Path) -> bool:
        if path == folder and not calls[0]:
            calls[0] += 1
            folder.rmdir()
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", evicted)
    files.write(DOMAIN, OTHER, HEAD, CONTENT)
    assert calls == [1] and files.read(DOMAIN, OTHER) is not None


def test_scan_lists_all_files(files: ChunkFiles) -> None:
    (one,) = files.scan()
    assert one.header == HEAD and one.bytes == os.path.getsize(one.path) == 20000 + HEADER_BYTES
    one.path.with_name(".half").write_bytes(b"x" * 200)
    assert sorted(make_chunk.header is None for make_chunk in files.scan()) == [False, True]


def test_chunk_names_depend_on_all_inputs() -> None:
    fields = ["weights", "adapter", "layout", "keep"]
    domains = {compute_domain(*fields)}
    for at in range(4):
        domains.add(compute_domain(*[text + "x" * (i == at) for i, text in enumerate(fields)]))
    domains |= {compute_domain("weightsa", "dapter", "layout", "keep")}
    assert len(domains) == 6 and all(map(is_domain, domains))
    assert not is_domain("../" * 10 + "ab") and not is_domain(DOMAIN.upper())
    tokens = np.arange(300)
    names = compute_chunk_names(DOMAIN, tokens)
    assert len(names) == 2 and len(compute_chunk_names(DOMAIN, tokens, include_partial=True)) == 3
    assert compute_chunk_names(DOMAIN, tokens[:256]) == names
    changed = tokens.copy()
    changed[3] += 1
    assert not set(compute_chunk_names(DOMAIN, changed)) & set(names), (
        "later chunks depend on earlier tokens"
    )
    changed = tokens.copy()
    changed[200] += 1
    assert compute_chunk_names(DOMAIN, changed)[0] == names[0]
