"""`mesh.toml` is checked as job files are, and a mesh keeps what it was told."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.directory.places import MeshPlace, write_json
from meshrl.launch.head.shape import POOL, pool_of
from meshrl.launch.up_down import MeshFile, read


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mesh.toml"


def test_what_it_does_not_say_is_by_default(file: Path) -> None:
    file.write_text("[pool]\nkeep_days = 2.5\nturns = false\n")
    assert read(file) == MeshFile(PoolSettings(keep_days=2.5, turns=False))


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (
            "[pool]\nkeep_day = 3.0",
            "line 2: unknown key pool.keep_day. Did you mean pool.keep_days?",
        ),
        ("[poll]\nturns = true", "line 1: unknown key poll. Did you mean pool?"),
        ("[pool]\nturns = 1", "line 2: pool.turns must be true or false, not 1"),
        ("[pool]\nmove_s = 0", "line 2: pool.move_s = 0 must be above 0"),
        ("[zebra]\nx = 1", "unknown key zebra.x. docs/operations.md lists"),
        ("[pool]\nturns = yes", "line 2, column 9: Invalid value: turns = yes. Text takes quotes"),
    ],
)
def test_mistakes_are_told_with_their_line(file: Path, written: str, says: str) -> None:
    file.write_text(written)
    with pytest.raises(ConfigError) as told:
        read(file)
    assert says in str(told.value)


def test_a_file_that_is_not_there_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the file of the mesh .*: No such"):
        read(file)


def test_a_mesh_that_starts_again_has_the_settings_that_it_had(tmp_path: Path) -> None:
    place, told = MeshPlace(tmp_path), PoolSettings(keep_days=2.5)
    assert pool_of(place) == PoolSettings()
    place.directory.mkdir()
    write_json(place.directory / POOL, asdict(told))
    assert pool_of(place) == told
    (place.directory / POOL).write_text('{"keep_days": 2')
    with pytest.raises(ConfigError, match="damaged"):
        pool_of(place)
