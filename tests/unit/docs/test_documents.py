"""Metrics, modules and walks that documents name, and the size of the product."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.job.config import JobConfig
from meshrl.common.job.evaluation_plan import LOSS_METRIC
from meshrl.common.state.jobs import Phase
from meshrl.common.state.steps import decode_step_row
from meshrl.services.trainer.learner.stats import BinStats, build_update_metrics
from meshrl.services.trainer.steps.batch import SOURCE_REWARDS, StepBatch
from meshrl.services.trainer.steps.step_durations import CHECKPOINT_PAUSE, StepDurations
from meshrl.view.history.decisions import DECISION_KINDS
from meshrl.view.history.event_text import ALERT_KINDS, EVENT_TEXTS
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot
from meshrl.view.metrics.mesh_gauges import HeadSnapshot, make_metric_families
from meshrl.view.recording.job_usage import JobUsage
from meshrl.view.recording.run_record import FREQUENT_EVENTS
from meshrl.view.report.report import RunResult, summarize

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
UNITS = {
    *("reward", "reward²", "loss", "norm", "share", "ratio", "nats", "number", "name", "identity"),
    *(
        "groups",
        "trajectories",
        "tokens",
        "versions",
        "steps",
        "bins",
        "currency",
        "hosts",
        "moves",
        "ends",
    ),
    *("s", "CPU s", "s since 1970", "ms since 1970", "yes or no"),
}
# structures whose parts have units of their own
OF_MANY = {"prefixes", "slices", "failures", "health", "early_stop"}
BY_NAME = {"_s": "s", "_ms": "ms since 1970", "_share": "share", "_mean": "tokens"}
ACCOUNT = ("opened", "trained", "filtered", "stale_requeued", "host_lost", "in_flight", "lost")
TWICE = ("trained_twice", "opened_twice", "committed_twice", "typed_drops")
PACKAGES = ("common", "examples", "kernels", "loadtests", "meshrl", "services", "sim", "tests")
_TOP = "|".join(PACKAGES)
_PATH = re.compile(rf"(?<![\w./-])(?:\.\./)*((?:{_TOP})(?:/\w+)+\.py)\b")
_FOLDER = re.compile(rf"`((?:{_TOP})(?:/\w+)+)/?`")
_LINKED = {"common", "kernels", "services", "sim"}  # importable as `meshrl.common` and so on
_DOTTED = re.compile(rf"(?:`|\"|-m )((?:{_TOP})(?:\.(?!(?:json|lock|py)\b)\w+)+)(?=[`\"\s])")
_FIRST = re.compile(r"Open\s+`([\w/]+\.py)`\s+first")
_FILE = re.compile(r"`(\w+\.py)`")
CODE = ("common", "loadtests", "meshrl", "services", "sim")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
OF_OTHERS = {
    "grpo_trainer.py",
    "stream_batch_iter.py",
    "transfer_engine.py",
}  # of TRL, PolyRL
FILES = {path.name for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
WALKS = (DOCS / "develop" / "walks.md").read_text()
FILES_OPENED, RETURNS = 12, 2  # limits of a walk
_CODE = re.compile(r"`([^`]+)`")
PRODUCT = ("common", "kernels", "meshrl", "services", "sim")


def read_tables(document: str, heading: str) -> Iterator[list[str]]:
    """Yield the cells of each row of a section's tables, without headers."""
    lines = (DOCS / document).read_text().split(f"\n{heading}\n")[1].splitlines()
    for line in takewhile(lambda line: not line.startswith("#"), lines):
        if line.startswith("| ") and "`" in line:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def units(document: str, heading: str) -> dict[str, str]:
    """Return the unit of each key of a section's three-column tables; each key appears once."""
    found: dict[str, str] = {}
    for keys, *rest in read_tables(document, heading):
        unit, meaning = rest
        for key in re.findall(r"`([^`]+)`", keys):
            assert key not in found, f"{key} is explained twice"
            assert unit in UNITS or key in OF_MANY, f"{key} has the unit {unit!r}"
            assert meaning, f"{key} has no meaning"
            found[key] = unit
    return found


def test_index_and_site_list_every_page() -> None:
    pages = sorted(str(path.relative_to(DOCS)) for path in DOCS.glob("*/*.md"))
    index = (DOCS / "README.md").read_text()
    assert sorted(re.findall(r"\]\((\w+/[\w-]+\.md)\) \|", index)) == pages
    site = (ROOT / "mkdocs.yml").read_text()
    assert sorted(re.findall(r"^ +- (\w+/[\w-]+\.md)$", site, re.MULTILINE)) == pages


def row() -> dict[str, Any]:
    """Make a step's row with every possible key."""
    ones = BinStats(**{field.name: 1 for field in fields(BinStats)})
    trained = StepBatch(0, JobConfig()).build_metrics() | build_update_metrics(1, 1.0, ones, 1.0)
    assert not trained.keys() & {field.name for field in fields(StepDurations)}
    own = dict.fromkeys(
        (
            *trained,
            *(field.name for field in fields(StepDurations)),
            CHECKPOINT_PAUSE,
            LOSS_METRIC,
            SOURCE_REWARDS,
        )
    )
    hashed = dict.fromkeys(("lineage", "committed_ms", "trained", "filtered", "step"), "1")
    names = dict.fromkeys(("manifest", "checkpoint", "image", "masters"), "name")
    found = decode_step_row({"metrics": "{}", **hashed, **names})
    assert own.keys() & found.keys() == {"step"}, "a key with two meanings"
    return own | found


def test_step_row_keys_are_documented_with_their_units() -> None:
    documented = units("use/algorithms.md", "## Health of a step")
    assert documented.keys() == row().keys()
    board = (ROOT / "compose/monitoring/grafana/dashboards/meshrl-job.json").read_text()
    shown = set(re.findall(r'meshrl_job_last_step\{[^}]*of=\\"(\w+)\\"', board))
    assert len(shown) > 5 and shown <= documented.keys()
    for key, unit in documented.items():
        for ending, expected in BY_NAME.items():
            if key.endswith(ending) and key != "logprob_gap_mean":
                assert unit == expected, key


def test_summary_keys_are_documented_with_their_units() -> None:
    account = dict.fromkeys((*ACCOUNT, *TWICE), 0)
    found = summarize(RunResult("j", Phase.TRAINING, 0, 1.0, account), [], [], [], JobUsage())
    assert units("operate/runs.md", "## Accounting").keys() == found.keys()


def test_mesh_gauges_are_documented() -> None:
    section = list(read_tables("operate/monitoring.md", "### Metrics of a host"))
    documented = {key for keys, *_ in section for key in re.findall(r"`(meshrl_\w+)`", keys)}
    page = (ROOT / "meshrl/launch/monitoring/health_endpoint.py").read_text()
    of_host = {f"meshrl_{name}" for name in re.findall(r'_make_gauge\(\s*"(\w+)"', page)}
    assert documented == of_host | {
        family.name for family in make_metric_families(HeadSnapshot(MeshSnapshot()))
    }


def test_documented_measurements_appear_in_the_code() -> None:
    files = [*(ROOT / "services").rglob("*.py"), *(ROOT / "common").rglob("*.py")]
    code = "".join(file.read_text() for file in files)
    section = read_tables("operate/monitoring.md", "### Measurements of processes")
    keys = [key for _, named, *_ in section for key in re.findall(r"`(\w+)`", named)]
    assert len(keys) > 15
    typed = set(re.findall(r"(\w+): (?:int|float|dict|Mapping)", code))
    assert [key for key in keys if f'"{key}"' not in code and key not in typed] == []


def test_kinds_of_events_are_documented() -> None:
    section = list(read_tables("operate/monitoring.md", "## Events"))
    documented = {kind for _, cell in section for kind in re.findall(r"`(\w+)`", cell)}
    scripts = (ROOT / "common/state/redis/scripts").rglob("*.lua")
    published = {
        kind
        for script in scripts
        for kind in re.findall(r"append_event\('(\w+)'", script.read_text())
    }
    assert len(published) > 20
    shown = {*EVENT_TEXTS, *ALERT_KINDS, *DECISION_KINDS, *FREQUENT_EVENTS}
    assert (published | shown) - documented == set()


def is_importable(dotted: str) -> bool:
    """Return True if the dotted name is a module, a package or a name within a module."""
    if dotted.partition(".")[0] in _LINKED:
        return False
    place = ROOT / dotted.replace(".", "/")
    if place.is_dir() or place.with_suffix(".py").is_file():
        return True
    module = place.parent.with_suffix(".py")
    module = module if module.is_file() else place.parent / "__init__.py"
    return module.is_file() and re.search(rf"\b{place.name}\b", module.read_text()) is not None


def list_missing_modules(text: str) -> list[str]:
    """List the names of our modules in a text that do not exist."""
    paths = [path for path in _PATH.findall(text) if not (ROOT / path).is_file()]
    folders = [
        path
        for path in _FOLDER.findall(text)
        if not (ROOT / path).exists() and not (ROOT / f"{path}.py").is_file()
    ]
    return paths + folders + [name for name in _DOTTED.findall(text) if not is_importable(name)]


def list_code_files() -> list[Path]:
    return [path for package in CODE for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_modules_named_in_documents_exist(document: Path) -> None:
    text = document.read_text()
    assert list_missing_modules(text) == []
    assert set(_FILE.findall(text)) <= FILES | OF_OTHERS


def test_modules_named_in_comments_and_docstrings_exist() -> None:
    missing = {str(path): list_missing_modules(path.read_text()) for path in list_code_files()}
    assert {path: names for path, names in missing.items() if names} == {}


def test_first_file_of_a_package_is_in_its_folder() -> None:
    rooms = [path for path in list_code_files() if path.name == "__init__.py"]
    first = {path: _FIRST.findall(path.read_text()) for path in rooms}
    assert sum(map(len, first.values())) > len(rooms) / 2
    assert [
        path for path in first for name in first[path] if not (path.parent / name).is_file()
    ] == []


@pytest.mark.parametrize(
    "words",
    [
        "`common/mesh/runtime/gone.py`",
        "see common/mesh/runtime/gone.py:",
        "[here](../common/mesh/runtime/gone.py)",
        "`services/planner/gone`",
        "`meshrl.common.mesh.runtime.gone`",
        "`common.mesh.runtime.mesh`",
        "`meshrl.common.mesh.runtime.mesh.Gone`",
        "`python -m meshrl.services.planner.gone <look.json`",
        '[sys.executable, "-m", "meshrl.services.planner.gone"]',
    ],
)
def test_missing_module_is_detected(words: str) -> None:
    assert len(list_missing_modules(words)) == 1
    assert (
        list_missing_modules(
            "`common/base/clock.py` `meshrl.common.mesh.runtime.mesh.Mesh` `services/planner`"
        )
        == []
    )


def read_walks() -> dict[str, list[str]]:
    """Return the text of each step by the walk's title."""
    found: dict[str, list[str]] = {}
    for section in WALKS.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        found[title] = [" ".join(step.split()) for step in re.split(r"\n\d+\. ", text)[1:]]
    return found


def list_names(path: Path) -> set[str]:
    """Return the functions and classes of a module, methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in inner}
    return found


@pytest.mark.parametrize("title", read_walks())
def test_walk_is_short_and_names_existing_code(title: str) -> None:
    steps = read_walks()[title]
    opened = [word for step in steps for word in _CODE.findall(step) if word.endswith(".py")]
    assert 5 <= len(set(opened)) <= FILES_OPENED
    assert sum(a != b for a, b in pairwise(opened)) + 1 - len(set(opened)) <= RETURNS
    for number, step in enumerate(steps, 1):
        words = _CODE.findall(step)
        files = [ROOT / word for word in words if word.endswith(".py")]
        assert files and not [f for f in files if not f.is_file()], f"{title}, step {number}"
        known = set().union(*map(list_names, files))
        code = {w for w in words if not w.endswith(".py") and re.fullmatch(r"[\w.]+", w)}
        missing = code - known - {"ready"}
        assert not missing, f"{title}, step {number}: {missing}"
        assert code & known, f"{title}, step {number} names nothing to read"


def test_missing_name_is_detected() -> None:
    assert "Assignment.generate" in list_names(ROOT / "services/rollout/routing/assignment.py")
    assert "Assignment.gone" not in list_names(ROOT / "services/rollout/routing/assignment.py")


def test_product_stays_within_its_line_limit() -> None:
    files = [path for top in PRODUCT for path in (ROOT / top).rglob("*.py")]
    lines = sum(len(path.read_bytes().splitlines()) for path in files)
    limit = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["meshrl"]["product_lines"]
    assert len(files) > len(PRODUCT)
    assert lines <= limit, f"{lines} lines of Python; the limit in pyproject.toml is {limit}"
