"""Attempts of every role to replace the code of jobs where it is fetched from."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.doors.planting import Planting, plant
from meshrl.common.api.calls.call_permissions import ROLES
from meshrl.common.api.transfer.bulk_permissions import (
    BULK_PERMISSIONS,
    PUBLISHED,
    SPACES,
    put_right,
)
from meshrl.common.base.digest import compute_digest
from meshrl.common.state.registry import RegistryEntry
from tests.unit.common.weights.bulk.keyed_port import Port

CODE = b"def reward(row, turns):\n    return 1.0\n"


def run_planting(port: Port) -> Planting:
    entry = RegistryEntry("weights", "test", bulk=port.server.address, address=port.address)
    keys = {role: port.make_authenticator(role)._keys.bulk_private_key for role in ROLES}
    return plant(keys, entry, {compute_digest(CODE): len(CODE)})


def test_no_role_can_plant_code(tmp_path: Path) -> None:
    port = Port(tmp_path / "store")
    (published := tmp_path / "mine.py").write_bytes(CODE)
    port.chunks.open_space(PUBLISHED).import_file(published, compute_digest(CODE))
    found = run_planting(port)
    assert found.tried == len(ROLES) * (len(SPACES) + 1) and not found.planted
    assert port.chunks.open_space(PUBLISHED).read(compute_digest(CODE)) == CODE
    port.server.close()


def test_role_with_publish_permission_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = "weights", put_right(PUBLISHED)
    monkeypatch.setitem(BULK_PERMISSIONS, right, frozenset({"worker"}))
    port = Port(tmp_path / "store")
    assert [what.partition(":")[0] for what in run_planting(port).planted] == ["worker"]
    port.server.close()
