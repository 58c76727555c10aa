"""What cannot be of a job file is refused with its line or setting, and what would be right.

`refusals.jsonl` has one mistake a line: the job that it is made in, a fixture; `set`, further
settings; `replace`, a text of the file and another one; `append`, text at its end; `files`, others
beside it, of which those that are no UTF-8 stand under the key latin-1; the `line` that is named;
`check`, of those that look at this host too; `says`, texts of the error. Those that take longer
are tried by turns: `rotating`.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.unit.meshrl.job.conftest import Given

MACHINE = "meshrl.job.checks.machine"
CASES = [json.loads(line) for line in Path(__file__).with_name("refusals.jsonl").open("rb")]


def param(case: dict[str, Any]) -> Any:
    marks = [pytest.mark.rotating(case["rotating"])] if "rotating" in case else []
    return pytest.param(case, id="; ".join(case["says"])[:100], marks=marks)


@pytest.mark.parametrize("case", map(param, CASES))
def test_a_mistake_is_refused_where_it_stands(
    case: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    job: Given = request.getfixturevalue(case["job"])
    for name, content in case.get("files", {}).items():
        encoding, text = (
            next(iter(content.items())) if isinstance(content, dict) else (None, content)
        )
        (job.path.parent / name).write_bytes(text.encode(encoding or "utf-8"))
    if "replace" in case:
        assert case["replace"][0] in job.path.read_text()
        job.path.write_text(job.path.read_text().replace(*case["replace"]))
    if "append" in case:
        job.path.write_text(f"{job.path.read_text()}\n{case['append']}\n")
    module, _, check = case.get("check", "").rpartition(".")
    looks = getattr(import_module(f"{MACHINE}.{module}"), check) if check else None
    said = job.refusal(*case.get("set", ()), check=looks)
    assert all(text in said for text in case["says"]), said
    assert "meshrl-trial" not in said  # the author's own files are named, not their copies
    if "line" in case:
        assert said.startswith(f"{job.path}, line {case['line']}")
