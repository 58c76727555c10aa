"""A shelf keeps to its budget, whoever shares it, and loses what its loss costs the least for."""

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


class Wall:
    def __init__(self) -> None:
        self.now_s = 2e9  # files that are written now are old

    def __call__(self) -> float:
        return self.now_s


def shelf(path: Path, chunks: float, wall: Wall | None = None, name: str = "disk") -> KVTier:
    return KVTier(name, path, int(chunks * WHOLE), wall or Wall())


def put(on: KVTier, at: int, seconds: float = 1.0, session: int = 0, domain: str = DOMAIN) -> bool:
    content = np.full(SIZE, at, np.uint8)
    return on.put(domain, NAMES[at], ChunkHeader(128 * at, 128, seconds, session), content)


def there(on: KVTier) -> set[int]:
    return {at for at, name in enumerate(NAMES) if on.files.has(DOMAIN, name)}


# -- what goes -----------------------------------------------------------------------------------


def found(seconds: float, session: int = 0, used_s: float = 0.0, size: int = 100) -> StoredChunk:
    return StoredChunk(Path(f"{seconds}"), size, used_s, ChunkHeader(0, 128, seconds, session))


def test_what_costs_the_least_to_have_again_goes_first() -> None:
    cheap, dear, large = found(1.0), found(9.0), found(5.0, size=1000)
    assert choose_evictions([dear, cheap, large], 150, 1.0, ()) == [large]
    assert choose_evictions([dear, cheap], 150, 1.0, ()) == [cheap, dear]
    assert choose_evictions([dear, cheap], 0, 1.0, ()) == []


def test_what_the_next_tier_keeps_costs_only_its_loading() -> None:
    assert compute_eviction_cost(found(9.0), 0.0, (), reload_s_per_byte=0.01) == pytest.approx(0.01)
    assert compute_eviction_cost(found(9.0), 0.0, (), reload_s_per_byte=0.0) == pytest.approx(0.09)


def test_a_trajectory_that_waits_for_a_tool_stays_and_one_that_has_ended_goes() -> None:
    waits, ended, shared = found(1.0, 7), found(5.0, 8), found(1.0)
    order = choose_evictions([waits, ended, shared], 1000, 4 * HALF_LIFE_S, {7})
    assert order == [ended, shared, waits]


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(0, 2), st.floats(0, 5)), max_size=20))
def test_what_is_being_loaded_or_written_stays(some: list[tuple[float, int, float]]) -> None:
    now_s = 2.0
    chunks = [found(seconds, session, used_s) for seconds, session, used_s in some]
    half = StoredChunk(Path(".half"), 100, 1.0, None)
    gone = choose_evictions([*chunks, half], 10_000, now_s, {1})
    assert half not in gone
    assert gone == [one for one in gone if one.last_used_s <= now_s]
    assert len(gone) == sum(one.last_used_s <= now_s for one in chunks)
    assert choose_evictions([half], 10_000, 100.0, ()) == [half], "whoever wrote it was killed"


# -- the budget ----------------------------------------------------------------------------------


def test_it_never_holds_more_than_its_budget(tmp_path: Path) -> None:
    on = shelf(tmp_path, 10)
    for at in range(40):
        assert put(on, at, seconds=at)
        assert on.used_bytes <= on.budget_bytes
        assert on.used_bytes == sum(one.bytes for one in on.files.scan())
    assert 39 in there(on) and 0 not in there(on)
    assert not put(shelf(tmp_path / "small", 0.5), 0)
    on.close()


def test_two_engines_share_one_budget(tmp_path: Path) -> None:
    one, two = shelf(tmp_path, 10), shelf(tmp_path, 10)
    for at in range(20):
        put((one, two)[at % 2], at)
    assert one.used_bytes == two.used_bytes <= one.budget_bytes
    assert put(one, 19) and one.used_bytes == two.used_bytes, "who finds it there writes nothing"
    one.close()
    assert there(two)
    two.close()
    assert not tmp_path.exists(), "the last one takes it away"


def test_what_an_engine_is_about_to_load_is_not_lost(tmp_path: Path) -> None:
    wall = Wall()
    on = shelf(tmp_path, 4, wall)
    for at in range(4):
        put(on, at, seconds=0.1)
    assert on.files.reserve(DOMAIN, NAMES[2], wall.now_s + 60)
    for at in range(4, 20):
        put(on, at, seconds=5.0)
    assert 2 in there(on)


def test_what_goes_from_memory_lies_on_the_disk(tmp_path: Path) -> None:
    memory, disk = shelf(tmp_path / "m", 4, name="memory"), shelf(tmp_path / "d", 40)

    def move_to_disk(one: StoredChunk) -> None:
        disk.copy_from(one)

    for at in range(20):
        content = np.full(SIZE, at, np.uint8)
        head = ChunkHeader(128 * at, 128, 1.0, 0)
        memory.put(DOMAIN, NAMES[at], head, content, 0.0, move_to_disk)
    assert there(memory) | there(disk) == set(range(20))
    read = disk.files.read(DOMAIN, NAMES[0])
    assert read is not None and (read[1] == 0).all()


def test_a_full_disk_is_asked_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = Wall()
    on = shelf(tmp_path, 10, wall)
    blocked = on.files.path(DOMAIN, NAMES[0])
    blocked.parent.mkdir(parents=True)
    blocked.parent.rmdir()
    blocked.parent.write_text("no directory")  # as a write that fails
    assert not put(on, 0) and on.last_error and on.used_bytes == 0
    assert not put(on, 1), "it rests"
    wall.now_s += 11
    assert put(on, 1) and not on.last_error


def test_a_count_that_a_killed_engine_left_wrong_mends_itself(tmp_path: Path) -> None:
    on = shelf(tmp_path, 10)
    for at in range(5):
        put(on, at)
    on._add_used(7 * WHOLE)
    assert put(on, 9) and on.used_bytes == 6 * WHOLE


# -- weights and sessions ------------------------------------------------------------------------


def test_chunks_of_weights_that_no_engine_has_go(tmp_path: Path) -> None:
    one, two = shelf(tmp_path, 50), shelf(tmp_path, 50)
    held = [on.lock_domain(DOMAIN) for on in (one, two)]
    put(one, 1)
    os.close(held[0])  # type: ignore[arg-type]
    assert one.remove_unusable() == 0 and there(one) == {1}, "the other one has them"
    os.close(held[1])  # type: ignore[arg-type]
    assert one.remove_unusable() == WHOLE and not there(one) and one.used_bytes == 0


def test_a_session_that_may_go_on_keeps_what_older_weights_computed(tmp_path: Path) -> None:
    on = shelf(tmp_path, 50)
    put(on, 0)  # of a prompt that it shares
    put(on, 1, session=7)
    on.mark_resumable(7)
    assert on.remove_unusable() == 0 and there(on) == {0, 1}
    on.unmark_resumable(7)
    on.remove_session_chunks(DOMAIN, NAMES[:2], 7)
    assert there(on) == {0}, "what others may use stays as long as its weights"
    assert on.remove_unusable() == WHOLE and on.used_bytes == 0


# -- what is left behind -------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from loadtests.measuring.meshed import own_keys, unrenewed
from meshrl.services.engine.kv.cache_factory import open_tiers
from meshrl.services.engine.kv.kv_tier import KVTier
on = KVTier("disk", Path(sys.argv[1]), 1 << 20, lambda: 2e9)
on.lock_domain("0" * 64)
on.mark_resumable(3)
path = on.files.directory / ("0" * 64) / "ab" / ".half"
path.parent.mkdir()
path.write_bytes(b"x")
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(directory: Path) -> None:
    words = [sys.executable, "-c", KILLED, str(directory)]
    assert subprocess.run(words, check=False, timeout=scaled(60)).returncode == -9


def test_what_a_killed_engine_left_is_swept(tmp_path: Path) -> None:
    killed(tmp_path / "j")
    on = shelf(tmp_path / "j", 10)
    assert on.list_resumable() == set() and not list(on.files.scan()) and on.used_bytes == 0
    on.close()


def test_a_host_sweeps_what_nobody_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_directories, "SHARED_MEMORY", tmp_path / "shm")
    root = kv_directories.get_memory_root(str(tmp_path))
    killed(root / "dead")
    alive = shelf(root / "alive", 10)
    put(alive, 1)
    remove_abandoned(str(tmp_path))
    assert not (root / "dead").exists() and there(alive) == {1}
    alive.close()
    assert not root.exists()


def test_a_host_sweeps_the_memory_that_a_whole_mesh_of_another_root_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_directories, "SHARED_MEMORY", tmp_path / "shm")
    gone, other = (
        kv_directories.get_memory_root(str(tmp_path / name)) for name in ("gone", "other")
    )
    killed(gone / "j")
    alive = shelf(other / "j", 10)
    put(alive, 1)
    (tmp_path / "shm" / "somebody").mkdir()
    remove_abandoned(str(tmp_path))
    assert not gone.exists() and there(alive) == {1} and (tmp_path / "shm" / "somebody").exists()
    alive.close()


def squat(place: Path, way: int) -> None:
    """Take a name as another user would: a file, a link, or a directory that others can read."""
    place.parent.mkdir(exist_ok=True)
    if way % 3 == 0:
        place.touch()
    elif way % 3 == 1:
        place.symlink_to("/nonexistent")
    else:
        place.mkdir()
        place.chmod(0o755)


async def test_names_in_shared_memory_that_others_take_cost_a_cache_and_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_directories, "SHARED_MEMORY", tmp_path / "shm")
    mesh = unrenewed("engine/one", own_keys())
    limits = RolloutConfig(kv=KvConfig(memory=1e-3))
    taken = []
    for way in range(kv_directories.MAX_MEMORY_DIRECTORIES - 1):
        taken.append(kv_directories.get_memory_root(mesh.settings.run_root))
        squat(taken[-1], way)
    [on] = await open_tiers(mesh, "j", limits)
    put(on, 1)
    taken[0].unlink()  # a name that is free again does not divide the engines of a host
    [too] = await open_tiers(mesh, "j", limits)
    assert there(too) == {1} and too.files.directory == on.files.directory
    on.close()
    too.close()
    squat(taken[0], 0)
    squat(kv_directories.get_memory_root(mesh.settings.run_root), 2)
    assert await open_tiers(mesh, "j", limits) == []
    assert mesh.telemetry.counters["kv_not_kept"] == 1
    await mesh.leave()


def test_a_holder_of_the_mark_of_a_directory_made_anew_takes_nothing_away(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    descriptor = os.open(mark, os.O_RDWR)
    mark.unlink()
    assert not is_file_at(descriptor, mark)
    mark.touch()
    assert not is_file_at(descriptor, mark)
    os.close(descriptor)
    with try_lock_file(mark) as nobody, try_lock_file(mark) as again:
        assert nobody and not again
    with try_lock_file(tmp_path / "none") as nobody:
        assert not nobody


def test_a_directory_of_others_is_refused(tmp_path: Path) -> None:
    assert make_private_directory(tmp_path / "a" / "b").stat().st_mode & 0o77 == 0
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    for name in ("open", "link"):
        with pytest.raises(ConfigError, match="others can read"):
            make_private_directory(tmp_path / name)


# -- what is measured ----------------------------------------------------------------------------


def test_a_pace_follows_what_was_measured_lately() -> None:
    pace = TransferRate()
    assert pace.s_per_byte == 0.0
    for _ in range(30):
        pace.add(1000, 1.0)
    assert pace.s_per_byte == pytest.approx(0.001)
    for _ in range(30):
        pace.add(1000, 3.0)
    assert pace.s_per_byte == pytest.approx(0.003, rel=0.01)


def test_what_never_comes_back_is_kept_seldom_and_what_does_is_kept() -> None:
    worth = OffloadPolicy()
    kept = [worth.is_worthwhile(1.0, 0.01) for _ in range(MIN_CHUNKS)]
    assert all(kept), "nobody knows yet"
    for _ in range(MIN_CHUNKS):
        worth.count_offload()
    rarely = [worth.is_worthwhile(1.0, 0.01) for _ in range(160)]
    assert sum(rarely) == 160 // PROBE_EVERY
    for _ in range(MIN_CHUNKS // 2):
        worth.count_reuse()
    assert worth.reuse_probability == 0.5
    assert worth.is_worthwhile(1.0, 0.49) and not all(
        worth.is_worthwhile(1.0, 0.51) for _ in range(3)
    )


NAME, OTHER = compute_chunk_names(DOMAIN, np.arange(256))
HEAD = ChunkHeader(128, 128, 0.25, 7)
CONTENT = np.arange(5000, dtype=np.uint32).view(np.uint8)


@pytest.fixture
def files(tmp_path: Path) -> ChunkFiles:
    made = ChunkFiles(tmp_path)
    made.write(DOMAIN, NAME, HEAD, CONTENT)
    return made


def test_what_was_written_is_read(files: ChunkFiles) -> None:
    found = files.read(DOMAIN, NAME)
    assert found is not None
    head, content = found
    assert head == HEAD and (content == CONTENT).all()
    assert files.read(DOMAIN, OTHER) is None and files.read("other", NAME) is None


@pytest.mark.parametrize("bit", [0, 8 * 9, 8 * 40, 8 * (HEADER_BYTES - 1), 8 * HEADER_BYTES, -1])
def test_one_flipped_bit_is_a_miss_and_is_removed(files: ChunkFiles, bit: int) -> None:
    path = files.path(DOMAIN, NAME)
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
    assert files.read(DOMAIN, NAME) is None
    assert not path.exists()


@pytest.mark.parametrize("length", [0, 10, HEADER_BYTES, HEADER_BYTES + 1, -1])
def test_a_torn_file_is_a_miss(files: ChunkFiles, length: int) -> None:
    path = files.path(DOMAIN, NAME)
    path.write_bytes(path.read_bytes()[:length])
    assert files.read(DOMAIN, NAME) is None


def test_a_longer_file_and_another_chunk_under_its_name_are_misses(files: ChunkFiles) -> None:
    path = files.path(DOMAIN, NAME)
    whole = path.read_bytes()
    path.write_bytes(whole + b"x")
    assert files.read(DOMAIN, NAME) is None
    files.path(DOMAIN, OTHER).parent.mkdir(exist_ok=True)
    files.path(DOMAIN, OTHER).write_bytes(whole)
    assert files.read(DOMAIN, OTHER) is None


def test_what_is_read_is_not_removed(files: ChunkFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held open by a reader, as `read` holds it."""
    path = files.path(DOMAIN, NAME)
    import fcntl

    with path.open("rb") as reader:
        fcntl.flock(reader.fileno(), fcntl.LOCK_SH)
        assert not files.remove(path) and path.exists()
    assert files.remove(path) and not path.exists()
    assert not files.remove(path), "it is gone already"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
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


def test_many_threads_write_and_read_the_same_chunks(tmp_path: Path) -> None:
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
                    found = files.read(DOMAIN, names[at])
                    if found is not None and not (found[1] == at).all():
                        wrong.append(at)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not list(tmp_path.glob("*/??/.*"))


def test_a_directory_that_goes_while_it_is_looked_at_is_made_again(
    files: ChunkFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mkdir` found it, and pathlib then asks whether it is a directory."""
    folder, looks = files.path(DOMAIN, OTHER).parent, [0]
    folder.mkdir(exist_ok=True)
    is_dir = Path.is_dir

    def gone(path: Path) -> bool:
        if path == folder and not looks[0]:
            looks[0] += 1
            folder.rmdir()
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", gone)
    files.write(DOMAIN, OTHER, HEAD, CONTENT)
    assert looks == [1] and files.read(DOMAIN, OTHER) is not None


def test_a_scan_tells_what_is_there(files: ChunkFiles) -> None:
    (one,) = files.scan()
    assert one.header == HEAD and one.bytes == os.path.getsize(one.path) == 20000 + HEADER_BYTES
    one.path.with_name(".half").write_bytes(b"x" * 200)
    assert sorted(found.header is None for found in files.scan()) == [False, True]


def test_names_depend_on_all_that_a_chunk_depends_on() -> None:
    about = ["weights", "adapter", "layout", "keep"]
    domains = {compute_domain(*about)}
    for at in range(4):
        domains.add(compute_domain(*[text + "x" * (i == at) for i, text in enumerate(about)]))
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
