"""Which keys of a job may change: every key has an answer, and the document gives the same one."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from pathlib import Path

import pytest

from meshrl.common.job.changing import (
    NOT_ACROSS_ZERO,
    RULES,
    as_it_was,
    changed,
    differences,
    in_force,
    refusal,
    rule_of,
)
from meshrl.common.job.config import JobConfig
from meshrl.common.job.schema import JOB

KEYS = [key for key, kind in JOB.kinds.items() if not is_dataclass(kind)]
TABLES = [key for key, kind in JOB.kinds.items() if is_dataclass(kind)]


@pytest.mark.parametrize("key", KEYS)
def test_every_key_may_change_or_says_why_not(key: str) -> None:
    rule = rule_of(key)
    assert not (rule.fixed and rule.recorded)
    assert rule.fixed == "" or rule.fixed[0].islower()


def test_every_rule_is_of_a_key_or_table_that_there_is() -> None:
    assert set(RULES) <= {*KEYS, *TABLES} and set(NOT_ACROSS_ZERO) <= set(KEYS)


def test_what_may_change_is_recorded_where_a_replay_computes_with_it() -> None:
    recorded = {key for key in KEYS if rule_of(key).recorded}
    assert {key for key in KEYS if key.startswith("optimizer.")} <= recorded
    assert {"budget.steps", "training.bin_tokens", "algorithm.mask_truncated"} <= recorded
    assert set(in_force(JobConfig())) == recorded


def test_a_job_is_made_again_as_it_was() -> None:
    was = JobConfig()
    document = changed(was.document(), {"optimizer.adamw_lr": 0.5, "budget.steps": 9})
    now = JobConfig.from_document(document)
    assert as_it_was(now, in_force(was)) == was
    assert as_it_was(now, {}) is now, "a record from before settings stood in records"
    assert differences(was.document(), document) == {
        "optimizer.adamw_lr": (0.001, 0.5),
        "budget.steps": (48, 9),
    }


def test_some_values_may_change_but_not_from_or_to_zero() -> None:
    assert refusal("optimizer.muon_lr", 0.003, 0.001) == ""
    assert "AdamW" in refusal("optimizer.muon_lr", 0.003, 0.0)
    assert "reference" in refusal("algorithm.kl_coefficient", 0.0, 0.1)
    assert refusal("seed", 0, 1) and not refusal("training.checkpoint_every", 8, 2)


def test_the_document_has_the_same_table() -> None:
    text = (Path(__file__).parents[4] / "docs/operations.md").read_text()
    [section] = re.findall(r"## Changing a run\n(.*?)\n## ", text, re.DOTALL)
    said: dict[str, str] = {}
    for line in section.splitlines():
        if cells := re.match(r"\| (`.*`) \| (.*) \|$", line):
            said |= dict.fromkeys(re.findall(r"`([a-z_.]+)`", cells[1]), cells[2])
    assert set(said) == set(RULES)
    for key, rule in RULES.items():
        expected = rule.fixed or ("at once" if not rule.recorded else "from the next step on")
        assert said[key].startswith(("no: " if rule.fixed else "yes, ") + expected), key
