"""`meshrl profiles` of a mesh that is down."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.commands.profiles import describe_key, print_profiles
from meshrl.common.base.errors import NotFound
from meshrl.common.base.files import documents
from meshrl.common.base.files.sealed_documents import encode_sealed
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.state.pool.demand.profiles import encode_profile
from meshrl.directory.directory_paths import MeshPaths
from tests.profiles import KEY, make_profile

TRAINER = replace(KEY, role="trainer", dataset="", ranks=2)


@pytest.fixture
def mesh(tmp_path: Path) -> MeshPaths:
    paths = MeshPaths(tmp_path)
    paths.directory.mkdir()
    MeshSettings(redis_url="unix:///none", run_root=str(tmp_path)).to_file(paths.settings)
    return paths


def save_profiles(mesh: MeshPaths) -> None:
    functions = make_profile(0.25, 0.25, 4.0, kv_cache=9)
    functions["generate"].repeats = 1.5
    profile = encode_profile(functions)
    rows = {
        key.encode(): json.dumps({"revision": 1, "written_ms": 5, "profile": profile})
        for key in (KEY, TRAINER)
    }
    documents.write_bytes(mesh.profiles, encode_sealed({"profiles": rows}))


def test_table_has_a_row_for_each_function(
    mesh: MeshPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profiles(mesh)
    print_profiles(mesh.root, None, "", as_json=False)
    header, first, second = capsys.readouterr().out.splitlines()
    assert " ".join(header.split()) == "kind function pieces median p90 longest gap repeats bytes"
    assert describe_key(KEY) in first and "250 ms" in first and "4 s" in first
    assert "50 %" in first
    assert "no rows" in second and "2 ranks" in second and "9 bytes" in second


def test_json_has_the_statistics_of_the_selected_kinds(
    mesh: MeshPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profiles(mesh)
    print_profiles(mesh.root, None, "Trainer", as_json=True)
    [found] = json.loads(capsys.readouterr().out)
    assert found["kind"]["role"] == "trainer"
    assert found["functions"]["generate"]["duration"] == {
        "count": 3.0,
        "mean_s": 1.5,
        "p50_s": 0.25,
        "p90_s": 4.0,
        "max_s": 4.0,
    }
    assert found["functions"]["generate"]["repeats"] == 1.5
    assert found["functions"]["generate"]["bytes_by_kind"] == {"kv_cache": 9}


def test_missing_profiles_name_the_next_step(mesh: MeshPaths) -> None:
    with pytest.raises(NotFound, match="no profiles yet") as empty:
        print_profiles(mesh.root, None, "", as_json=True)
    assert "Run a job" in str(empty.value)
    save_profiles(mesh)
    with pytest.raises(NotFound, match="no profile matches 'hybrid'") as unknown:
        print_profiles(mesh.root, None, "hybrid", as_json=True)
    assert describe_key(KEY) in str(unknown.value)
