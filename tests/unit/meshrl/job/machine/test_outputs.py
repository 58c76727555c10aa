"""A URL that a job names for what it makes is tried before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.common.base.errors import MeshError, Refused
from meshrl.common.base.files.at_url import AtUrl
from meshrl.common.job.config import JobConfig
from meshrl.directory.claims import claimed
from meshrl.job.checks.machine import all_checks
from tests.unit.meshrl.job.machine.conftest import read


def test_a_url_that_cannot_be_written_is_refused_before_anything_starts(
    place: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    for url, why in (
        (f"file://{tmp_path}/file/out", "NotADirectoryError|FileExistsError"),
        ("nosuch://bucket/out", "nosuch"),
        (f"file://me:secret@{tmp_path}/out", "a user, a password or a query"),
        (f"file://{tmp_path}/out?sig=secret", "a query"),
        (f"simplecache::file://me:secret@{tmp_path}/out", "a chain of URLs"),
    ):
        with pytest.raises(MeshError, match=why) as caught:
            all_checks.writable(read(place, f'out="{url}"'))
        assert "secret" not in str(caught.value)
    url = f"file://{tmp_path}/new/out"
    all_checks.writable(read(place, f'out="{url}"'))
    assert list((tmp_path / "new/out").iterdir()) == []


def test_a_url_where_a_run_lies_is_no_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = JobConfig(out=f"file://{tmp_path}/out")
    with claimed(config, False) as claim:  # nothing is there yet
        assert claim.directory == tmp_path / "runs/job"
    AtUrl(config.out, "out", "it").place_content("job.json", b"a run")
    with pytest.raises(Refused, match="a run lies at"), claimed(config, False):
        pass
    with claimed(config, True) as claim:
        assert claim.directory == tmp_path / "runs/job"
