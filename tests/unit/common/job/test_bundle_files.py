"""Who reads a file of a bundle finds out that it is not what was packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.common.base.errors import Damaged
from meshrl.common.job.bundle import bundle_files
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig


def job_in(directory: Path) -> JobData:
    for name, content in {
        "data/train.jsonl": '{"prompt": "1"}\n',
        "modules/rewards.py": "x = 1\n",
        "tokenizer/tokenizer.json": "{}",
    }.items():
        (directory / name).parent.mkdir(parents=True)
        (directory / name).write_text(content)
    document = JobConfig(name="sum").document()
    document["dataset"]["train"] = "data/train.jsonl"
    document["model"]["tokenizer"] = "tokenizer/tokenizer.json"
    document["bundle"] = {"dir": str(directory), "files": bundle_files.listed(directory)}
    return JobData.of("sum", document, str(directory))


@pytest.mark.parametrize(
    "name", ["data/train.jsonl", "modules/rewards.py", "tokenizer/tokenizer.json"]
)
@pytest.mark.parametrize("harm", ["flipped", "empty", "deleted"])
def test_a_file_that_is_not_what_was_packed_is_named(tmp_path: Path, name: str, harm: str) -> None:
    job = job_in(tmp_path)

    def read() -> None:
        assert job.rows("train") == [{"prompt": "1"}]
        assert job.modules.is_dir() and job.tokenizer.is_file()

    read()
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    if harm == "deleted":
        path.unlink()
    else:
        path.write_bytes(content if harm == "flipped" else b"")
    with pytest.raises(Damaged, match=str(path)) as said:
        read()
    assert "copy of the run" in said.value.fix
