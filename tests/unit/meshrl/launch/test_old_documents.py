"""Documents of a mesh's directory that earlier versions wrote with other names of keys."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshrl.common.base.files import documents
from meshrl.common.base.files.sealed_documents import encode_sealed
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.directory.directory_paths import MeshPaths, write_json
from meshrl.directory.joined_hosts import JoinedHosts
from meshrl.launch.head.mesh_shape import MeshShape, read_pool_settings, read_shape
from meshrl.launch.hosts.host_launcher import HostShape
from meshrl.launch.hosts.membership import Membership, read_membership
from meshrl.launch.redis.aof import Extent
from meshrl.launch.redis.redis_note import read_note


def rename(document: Any, **old_names: str) -> dict[str, Any]:
    """Return a dataclass as an earlier version wrote it, with the old names of some fields."""
    return {old_names.get(key, key): value for key, value in asdict(document).items()}


def test_shapes_and_pool_settings_are_read_with_old_keys(tmp_path: Path) -> None:
    paths = MeshPaths(tmp_path)
    paths.directory.mkdir()
    shape = MeshShape(workers=2, encrypt_bulk=True, upload_bytes_per_s=5, accepted_services=[])
    names = {"encrypt_bulk": "encrypt", "accepted_services": "takes"}
    rates = {"upload_bytes_per_s": "rate_up", "download_bytes_per_s": "rate_down"}
    write_json(paths.shape, rename(shape, **names, **rates))
    assert read_shape(paths) == shape
    host = HostShape(worker_prefix="x", planner_name="planner/2", accepted_services=["shards"])
    options = {"worker_prefix": "prefix", "planner_name": "planner"}
    write_json(paths.shape, rename(host, **options, join_requested_s="asked_s"))
    assert HostShape.read(paths) == host
    write_json(paths.directory / "pool.json", {"turns": False, "short_s": 3.0})
    assert read_pool_settings(paths) == PoolSettings(time_slicing=False, shortage_grace_s=3.0)


def test_joined_hosts_are_read_with_old_keys(tmp_path: Path) -> None:
    paths = MeshPaths(tmp_path)
    paths.directory.mkdir()
    host = {"host": "b", "address": "10.0.0.2", "workers": 1, "joined_s": 5.0, "key": "k"}
    row = host | {"prefix": "b-", "planner": ""}
    write_json(paths.joined_hosts, {"count": 3, "hosts": {"b": row}, "left": ["c"]})
    found = JoinedHosts.read(paths)
    assert (found.joined_count, found.departed_hosts) == (3, ("c",))
    assert (found.hosts["b"].worker_prefix, found.hosts["b"].key_digest) == ("b-", "k")


def test_membership_is_read_with_old_keys(tmp_path: Path) -> None:
    paths = MeshPaths(tmp_path)
    paths.directory.mkdir()
    known = Membership("b", "tcp://10.0.0.1:7", "gateway's key", "own", "invitation")
    names = {"gateway_key": "gateway", "invitation_secret": "invitation"}
    documents.write(paths.membership, rename(known, **names))
    assert read_membership(paths) == known


def test_redis_note_is_read_with_old_keys(tmp_path: Path) -> None:
    path = tmp_path / "redis-note.json"
    mark = {"event": "5-0", "token": 7, "jobs": {}, "deleted": {}}
    files = {"a.aof": {"length": 9, "checksum": "c"}}
    row = {"mark": mark, "files": files, "floor": 8, "gone": ["j"], "returning": False}
    documents.write_bytes(path, encode_sealed(row))
    found = read_note(path)
    assert (found.watermark.event, found.token_floor, found.lost_jobs) == ("5-0", 8, ("j",))
    assert found.file_extents == {"a.aof": Extent(9, "c")} and not found.is_restoring
