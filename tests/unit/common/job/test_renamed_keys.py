"""Old names of renamed keys in job files, in mesh.toml, and in stored documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import JobConfig
from meshrl.common.job.renamed_keys import (
    RENAMED_JOB_KEYS,
    RENAMED_POOL_KEYS,
    describe_old_keys,
    replace_old_keys,
)
from meshrl.common.job.schema import JOB_SCHEMA
from meshrl.launch.up_down import read_mesh_file


def make_document(key: str, value: Any) -> dict[str, Any]:
    """Return a document with one dotted key."""
    *tables, name = key.split(".")
    document: dict[str, Any] = {name: value}
    for table in reversed(tables):
        document = {table: document}
    return document


def read_key(document: Any, key: str) -> Any:
    for part in key.split("."):
        document = document[part]
    return document


@pytest.mark.parametrize(("old", "new"), RENAMED_JOB_KEYS.items())
def test_old_job_key_sets_the_new_one_in_files_and_stored_documents(old: str, new: str) -> None:
    value = read_key(JobConfig().to_document(), new)
    assert JOB_SCHEMA.describe_old_keys(make_document(old, value)) == [
        f"{old} is deprecated: write {new}"
    ]
    assert new in JOB_SCHEMA.types_by_key and old not in JOB_SCHEMA.types_by_key
    assert JobConfig.from_document(make_document(old, value)) == JobConfig.from_document({})


@pytest.mark.parametrize(("old", "new"), RENAMED_POOL_KEYS.items())
def test_old_pool_key_is_accepted_with_a_notice(
    old: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = {"time_slicing": "false", "gang_scope": '"network"'}.get(new.partition(".")[2], "7.5")
    file = tmp_path / "mesh.toml"
    file.write_text(f"[pool]\n{old.partition('.')[2]} = {value}\n")
    expected = {"false": False, '"network"': "network", "7.5": 7.5}[value]
    assert getattr(read_mesh_file(file).pool, new.partition(".")[2]) == expected
    assert capsys.readouterr().err == f"{file}: {old} is deprecated: write {new}\n"


def test_key_under_both_names_is_rejected() -> None:
    document = {"rollout": {"path": "eager", "backend": "native"}}
    with pytest.raises(ConfigError, match=r"rollout\.path is an old name of rollout\.backend"):
        replace_old_keys(document, RENAMED_JOB_KEYS)


def test_error_of_a_renamed_key_has_the_line_of_its_old_name() -> None:
    def make_error(key: str, message: str, fix: str) -> ConfigError:
        return ConfigError(message, where=key, fix=fix)

    with pytest.raises(ConfigError, match=r"rollout\.forced_lengths\[1\]") as caught:
        JOB_SCHEMA.validate({"rollout": {"lengths": [3, 0]}}, make_error)
    assert caught.value.where == "rollout.lengths[1]"


def test_keys_in_lists_of_tables_are_renamed() -> None:
    document = {"jobs": [{"pace": "a"}, {"name": "b"}, "no table"]}
    found = replace_old_keys(document, {"jobs[].pace": "jobs[].emulate"})
    assert document == {"jobs": [{"emulate": "a"}, {"name": "b"}, "no table"]}
    assert describe_old_keys(found) == ["jobs[].pace is deprecated: write jobs[].emulate"]
