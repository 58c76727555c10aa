"""Each key of a metric that is written down has a unit and a meaning in the documents, and each key
that the documents explain is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import Any

from meshrl.common.job.config import JobConfig
from meshrl.common.state.jobs import Phase
from meshrl.common.state.steps import step_row
from meshrl.services.trainer.arithmetic.stats import BinStats, update_metrics
from meshrl.services.trainer.steps.batch import Batch
from meshrl.services.trainer.steps.step_parts import PAUSE, StepTook
from meshrl.view.mesh.snapshot import MeshSnapshot
from meshrl.view.metrics.mesh_gauges import HeadSnapshot, families
from meshrl.view.recording.usage import Tally
from meshrl.view.report.report import RunEnd, summarize

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
UNITS = {
    *("reward", "reward²", "loss", "norm", "share", "ratio", "nats", "number", "name", "identity"),
    *("groups", "trajectories", "tokens", "versions", "steps", "bins", "hosts", "moves", "ends"),
    *("s", "CPU s", "s since 1970", "ms since 1970", "yes or no"),
}
OF_MANY = {"prefixes", "failures"}  # structures, whose parts have units of their own
BY_NAME = {"_s": "s", "_ms": "ms since 1970", "_share": "share", "_mean": "tokens"}
ACCOUNT = ("opened", "trained", "filtered", "stale_requeued", "host_lost", "in_flight", "lost")
TWICE = ("trained_twice", "opened_twice", "committed_twice", "typed_drops")


def tables(document: str, heading: str) -> Iterator[list[str]]:
    """The cells of each row of the tables of a section, headers left out."""
    lines = (DOCS / document).read_text().split(f"\n{heading}\n")[1].splitlines()
    for line in takewhile(lambda line: not line.startswith("#"), lines):
        if line.startswith("| ") and "`" in line:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def units(document: str, heading: str) -> dict[str, str]:
    """The unit of each key of the tables with three columns; each key is there once."""
    found: dict[str, str] = {}
    for keys, *rest in tables(document, heading):
        unit, meaning = rest
        for key in re.findall(r"`([^`]+)`", keys):
            assert key not in found, f"{key} is explained twice"
            assert unit in UNITS or key in OF_MANY, f"{key} has the unit {unit!r}"
            assert meaning, f"{key} has no meaning"
            found[key] = unit
    return found


def row() -> dict[str, Any]:
    """A step's row with all that it may have."""
    ones = BinStats(**{field.name: 1 for field in fields(BinStats)})
    trained = Batch(0, JobConfig()).metrics() | update_metrics(1, 1.0, ones, 1.0)
    assert not trained.keys() & {field.name for field in fields(StepTook)}
    own = dict.fromkeys((*trained, *(field.name for field in fields(StepTook)), PAUSE))
    hashed = dict.fromkeys(("lineage", "committed_ms", "trained", "filtered", "step"), "1")
    names = dict.fromkeys(("manifest", "checkpoint", "image", "masters"), "name")
    found = step_row({"metrics": "{}", **hashed, **names})
    assert own.keys() & found.keys() == {"step"}, "a key with two meanings"
    return own | found


def test_each_key_of_a_steps_row_has_one_unit_and_one_meaning() -> None:
    documented = units("algorithms.md", "## Health of a step")
    assert documented.keys() == row().keys()
    board = (ROOT / "compose/monitoring/grafana/dashboards/meshrl-job.json").read_text()
    shown = set(re.findall(r'meshrl_job_last_step\{[^}]*of=\\"(\w+)\\"', board))
    assert len(shown) > 5 and shown <= documented.keys()
    for key, unit in documented.items():
        for ending, expected in BY_NAME.items():
            if key.endswith(ending) and key != "logprob_gap_mean":
                assert unit == expected, key


def test_each_key_of_a_summary_has_a_unit_and_a_meaning() -> None:
    account = dict.fromkeys((*ACCOUNT, *TWICE), 0)
    found = summarize(RunEnd("j", Phase.TRAINING, 0, 1.0, account), [], [], [], Tally())
    assert units("operations.md", "## Accounting").keys() == found.keys()


def test_each_gauge_of_a_mesh_is_documented() -> None:
    section = list(tables("operations.md", "### Of a host as a whole"))
    documented = {key for keys, *_ in section for key in re.findall(r"`(meshrl_\w+)`", keys)}
    page = (ROOT / "meshrl/launch/outward/outward.py").read_text()
    of_host = {f"meshrl_{name}" for name in re.findall(r'_family\(\s*"(\w+)"', page)}
    assert documented == of_host | {
        family.name for family in families(HeadSnapshot(MeshSnapshot()))
    }


def test_measurements_of_processes_have_the_documented_keys() -> None:
    files = [*(ROOT / "services").rglob("*.py"), *(ROOT / "common").rglob("*.py")]
    code = "".join(file.read_text() for file in files)
    section = tables("operations.md", "### What processes measure of their work")
    keys = [key for _, named, *_ in section for key in re.findall(r"`(\w+)`", named)]
    assert len(keys) > 15
    assert [
        key for key in keys if not re.search(rf'"{key}"|\b{key}: (?:int|float|dict|Mapping)', code)
    ] == []
