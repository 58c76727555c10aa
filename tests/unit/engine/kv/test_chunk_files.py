"""A chunk is read as it was written, or it is a miss."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from meshrl.services.engine.kv.chunk_files import (
    HEAD_BYTES,
    ChunkFiles,
    ChunkHead,
    domain_of,
    is_domain,
    names_of,
)

DOMAIN = domain_of("weights", "", "layout", "keep")
NAME, OTHER = names_of(DOMAIN, np.arange(256))
HEAD = ChunkHead(128, 128, 0.25, 7)
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


@pytest.mark.parametrize("bit", [0, 8 * 9, 8 * 40, 8 * (HEAD_BYTES - 1), 8 * HEAD_BYTES, -1])
def test_one_flipped_bit_is_a_miss_and_is_removed(files: ChunkFiles, bit: int) -> None:
    path = files.path(DOMAIN, NAME)
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
    assert files.read(DOMAIN, NAME) is None
    assert not path.exists()


@pytest.mark.parametrize("length", [0, 10, HEAD_BYTES, HEAD_BYTES + 1, -1])
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
    names = names_of(DOMAIN, np.arange(128 * 8))

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
                    files.write(DOMAIN, names[at], ChunkHead(at, 128, 0.1, 0), content)
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
    assert one.head == HEAD and one.bytes == os.path.getsize(one.path) == 20000 + HEAD_BYTES
    one.path.with_name(".half").write_bytes(b"x" * 200)
    assert sorted(found.head is None for found in files.scan()) == [False, True]


def test_names_depend_on_all_that_a_chunk_depends_on() -> None:
    about = ["weights", "adapter", "layout", "keep"]
    domains = {domain_of(*about)}
    for at in range(4):
        domains.add(domain_of(*[text + "x" * (i == at) for i, text in enumerate(about)]))
    domains |= {domain_of("weightsa", "dapter", "layout", "keep")}
    assert len(domains) == 6 and all(map(is_domain, domains))
    assert not is_domain("../" * 10 + "ab") and not is_domain(DOMAIN.upper())
    tokens = np.arange(300)
    names = names_of(DOMAIN, tokens)
    assert len(names) == 2 and len(names_of(DOMAIN, tokens, tail=True)) == 3
    assert names_of(DOMAIN, tokens[:256]) == names
    changed = tokens.copy()
    changed[3] += 1
    assert not set(names_of(DOMAIN, changed)) & set(names), "later chunks depend on earlier tokens"
    changed = tokens.copy()
    changed[200] += 1
    assert names_of(DOMAIN, changed)[0] == names[0]
