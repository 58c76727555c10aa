"""The table of who may call what covers every method of every interface, and every call site."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import meshrl.common.api
from meshrl.common.api.calls.call_permissions import CALL_PERMISSIONS, CLIENT, JOINER, ROLES
from meshrl.common.api.calls.interface import Interface
from meshrl.common.api.transfer.bulk_permissions import BULK_PERMISSIONS, GET

ROOT = Path(__file__).parents[4]
CALL_SITE = re.compile(
    r"\b(Engine|Node|Ranks|Resting|Sandbox|Scoring|Trainer|Weights|Worker)\.([a-z_]+)\b"
)
LOADERS = {"engine", "hybrid", "scoring", "trainer"}  # of weights
# What runs in processes of several roles, or is not in the package of its role.
ALSO = {
    # whoever has files of a job to read
    "common/records/line_files.py": {"engine", "rollout", "trainer"},
    "common/weights/store/job_files.py": LOADERS | {"node", "rank", "rollout"},
    "common/weights/pull": LOADERS | {"rank"},
    "common/weights/staging.py": {"trainer"},
    "common/weights/receiver.py": LOADERS,
    "common/weights/transports/collective.py": {"engine", "hybrid"},
    "common/weights/delta/receiver.py": LOADERS,
    "common/weights/delta/sender.py": {"trainer"},
    "common/weights/store/weight_store_client.py": LOADERS,
    "services/node": {"worker"},
    "services/trainer/hybrids/hybrid.py": {"hybrid"},
}


def methods() -> set[str]:
    """The label of every method of every interface of common/api."""
    found = set()
    for module in pkgutil.walk_packages(meshrl.common.api.__path__, "meshrl.common.api."):
        imported = importlib.import_module(module.name)
        for thing in vars(imported).values():
            if isinstance(thing, type) and issubclass(thing, Interface):
                found |= {method.label for method in thing.methods.values()}
    return found


def test_every_method_is_in_the_table_and_nothing_else() -> None:
    assert methods() == CALL_PERMISSIONS.keys()
    assert frozenset().union(*CALL_PERMISSIONS.values()) <= ROLES | {CLIENT, JOINER}


def test_every_role_is_a_kind_of_process_that_there_is() -> None:
    trainers = {"trainer", "rank", "hybrid"}  # meshrl.services.trainer
    programs = {path.parent.name for path in (ROOT / "services").glob("*/__main__.py")}
    people = {"person"}  # commands
    # an environment has no mesh
    assert programs - {"environment"} | trainers | {"worker"} | people == ROLES


def call_sites() -> list[tuple[str, str]]:
    """(file, method) wherever a service names a method that it does not itself answer."""
    found = []
    for source in [*(ROOT / "services").rglob("*.py"), *(ROOT / "common").rglob("*.py")]:
        place = source.relative_to(ROOT).parts[:3]
        if place[:2] == ("common", "api") or place in (
            ("common", "mesh", "runtime"),
            ("common", "mesh", "instances"),
        ):  # they declare, and explain
            continue
        for line in source.read_text().splitlines():
            if line.lstrip().startswith("@") or '"' in line:  # answered, or spoken of
                continue
            for owner, name in CALL_SITE.findall(line):
                if f"{owner}.{name}" in CALL_PERMISSIONS:
                    found.append((str(source.relative_to(ROOT)), f"{owner}.{name}"))
    return sorted(set(found))


@pytest.mark.parametrize(("file", "method"), call_sites())
def test_who_calls_may_call(file: str, method: str) -> None:
    also = [roles for place, roles in ALSO.items() if file.startswith(place)]
    roles = max(also, key=len) if also else {file.split("/")[1]}
    allowed = CALL_PERMISSIONS[method]
    assert allowed & roles, f"{file} calls {method}, which only {sorted(allowed)} may call"


def test_calls_that_belong_together_are_open_to_the_same_roles() -> None:
    assert CALL_PERMISSIONS["Weights.fetch_manifest"] == LOADERS | {
        "rank"
    }  # its rows, when it is restored
    assert CALL_PERMISSIONS["Weights.verify_chunk"] == BULK_PERMISSIONS["weights", GET] >= LOADERS
    for method in ("Sandbox.load_job", "Sandbox.run_tools", "Sandbox.score_trajectories"):
        assert CALL_PERMISSIONS[method] == {"rollout"}
