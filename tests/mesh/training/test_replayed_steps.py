"""A trainer that dies in any phase of a step leaves the weights of a run that nothing disturbed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loadtests.replay.runs import DEATHS, JOB, one_run

pytestmark = [pytest.mark.timeout(300), pytest.mark.group("replayed steps")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return one_run(JOB, tmp_path_factory.mktemp("undisturbed") / "one")


@pytest.mark.rotating(len(DEATHS))
@pytest.mark.parametrize("deaths", DEATHS, ids=" ".join)
def test_steps_are_replayed_bit_by_bit_wherever_the_trainer_died(
    deaths: Sequence[str], undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    run = one_run(JOB, tmp_path / "one", deaths)
    assert run["deaths"] == sorted(deaths)
    assert run["manifests"] == undisturbed["manifests"]
    assert run["lineages"] == [0]
    assert (run["lost"], run["trained_twice"]) == (0, 0)
