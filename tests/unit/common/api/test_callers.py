"""Call permissions cover every interface method and every call site."""

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
    r"\b(Engine|Node|Ranks|RoleControl|Sandbox|Scoring|Trainer|Weights|Worker)\.([a-z_]+)\b"
)
LOADERS = {"engine", "hybrid", "scoring", "trainer"}  # processes that load weights
# Modules that run in processes of several roles, or outside the package of their role.
ROLES_BY_MODULE = {
    # every role that reads files of a job
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


def list_methods() -> set[str]:
    """Return the label of every method of every interface of common/api."""
    found = set()
    for module in pkgutil.walk_packages(meshrl.common.api.__path__, "meshrl.common.api."):
        imported = importlib.import_module(module.name)
        for member in vars(imported).values():
            if isinstance(member, type) and issubclass(member, Interface):
                found |= {method.label for method in member.methods.values()}
    return found


def test_permission_table_has_exactly_the_interface_methods() -> None:
    assert list_methods() == CALL_PERMISSIONS.keys()
    assert frozenset().union(*CALL_PERMISSIONS.values()) <= ROLES | {CLIENT, JOINER}


def test_every_role_matches_an_existing_program() -> None:
    trainers = {"trainer", "rank", "hybrid"}  # meshrl.services.trainer
    programs = {path.parent.name for path in (ROOT / "services").glob("*/__main__.py")}
    people = {"person"}  # commands
    # an environment has no mesh
    assert programs - {"environment"} | trainers | {"worker"} | people == ROLES


def list_call_sites() -> list[tuple[str, str]]:
    """Return (file, method) for each use of a method outside the module that implements it."""
    found = []
    for source in [*(ROOT / "services").rglob("*.py"), *(ROOT / "common").rglob("*.py")]:
        module_path = source.relative_to(ROOT).parts[:3]
        # These declare or explain methods.
        if module_path[:2] == ("common", "api") or module_path in (
            ("common", "mesh", "runtime"),
            ("common", "mesh", "instances"),
        ):
            continue
        for line in source.read_text().splitlines():
            if line.lstrip().startswith("@") or '"' in line:  # implementations and texts
                continue
            for owner, name in CALL_SITE.findall(line):
                if f"{owner}.{name}" in CALL_PERMISSIONS:
                    found.append((str(source.relative_to(ROOT)), f"{owner}.{name}"))
    return sorted(set(found))


@pytest.mark.parametrize(("file", "method"), list_call_sites())
def test_caller_has_permission_for_its_calls(file: str, method: str) -> None:
    matching_roles = [
        roles for module_path, roles in ROLES_BY_MODULE.items() if file.startswith(module_path)
    ]
    roles = max(matching_roles, key=len) if matching_roles else {file.split("/")[1]}
    allowed = CALL_PERMISSIONS[method]
    assert allowed & roles, f"{file} calls {method}, which only {sorted(allowed)} may call"


def test_related_calls_are_permitted_to_the_same_roles() -> None:
    # A rank fetches its rows when it is restored.
    assert CALL_PERMISSIONS["Weights.fetch_manifest"] == LOADERS | {"rank"}
    assert CALL_PERMISSIONS["Weights.verify_chunk"] == BULK_PERMISSIONS["weights", GET] >= LOADERS
    for method in ("Sandbox.load_job", "Sandbox.run_tools", "Sandbox.score_trajectories"):
        assert CALL_PERMISSIONS[method] == {"rollout"}
