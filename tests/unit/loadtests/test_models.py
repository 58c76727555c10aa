"""A dozen random checkpoints of all kinds, compared with transformers."""

from __future__ import annotations

import pytest

from loadtests.models.comparing import SHORT, TOLERANCE, run
from loadtests.models.drawn import CLASSES

pytestmark = [pytest.mark.group("transformers"), pytest.mark.needs("compiler")]


@pytest.mark.deep
def test_random_checkpoints_match_and_changed_ones_are_detected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configs = 12
    assert configs >= len(CLASSES)  # each kind at least once
    found = run(configs, seed=11, longest=SHORT)
    output = capsys.readouterr().out
    assert (found["unequal"], found["silent"]) == (0, 0), output
    assert found["worst"] <= TOLERANCE
    assert found["refused"] + found["equal_changed"] == configs and found["refused"] > 0
