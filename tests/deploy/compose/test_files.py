"""Guarantees of compose.yaml for every container, read from the file without an engine."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from meshrl.commands.engines import ENGINE_VERSIONS
from meshrl.services.sandbox.jail.confinement.syscall_policy import ALLOWED_CALLS
from tests.deploy.compose.images.building import CODE
from tests.deploy.compose.project import FOLDER


class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML is not typed
    """YAML loader that accepts the tags by which an overlay replaces values of its base."""


def _replaces(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> list[Any]:
    items: list[Any] = loader.construct_sequence(node, deep=True)
    return items


Loader.add_constructor("!override", _replaces)


def read(name: str) -> dict[str, Any]:
    """Return a file of compose/ with merged keys resolved."""
    found: dict[str, Any] = yaml.load((FOLDER / name).read_text(), Loader)
    return found


SERVICES: dict[str, dict[str, Any]] = read("compose.yaml")["services"]
ENDS = {"secrets", "demo"}  # services that exit and have no health check


@pytest.mark.parametrize("name", SERVICES)
def test_service_has_minimal_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert any(place.startswith("/tmp:") for place in service["tmpfs"])
    assert service["mem_limit"] and service["restart"]
    assert "privileged" not in service and "cap_add" not in service
    own = "meshrl:cpu" in service["image"]  # whose image sets its user
    assert own or service["user"].split(":")[0] not in ("0", "root")
    if name not in ENDS:
        grace_s = int(service["stop_grace_period"].removesuffix("s"))
        drains_s = [
            int(word[10:]) for word in service.get("command", ()) if word.startswith("--drain-s=")
        ]
        assert grace_s >= sum(drains_s) + 30  # and it exits in order
        assert bool(drains_s) == (f"--grace-s={grace_s}" in service.get("command", ()))
        assert own or service["healthcheck"]["test"]


def test_only_the_sandbox_may_create_namespaces() -> None:
    loose = {
        name
        for name, service in SERVICES.items()
        for option in service["security_opt"]
        if "seccomp" in option or "unconfined" in option
    }
    assert loose == {"sandbox"}
    assert SERVICES["sandbox"]["networks"] == ["mesh"]
    assert read("compose.yaml")["networks"]["mesh"] == {"internal": True}


def test_only_user_interfaces_are_published_and_only_on_loopback() -> None:
    published = {name: s["ports"] for name, s in SERVICES.items() if "ports" in s}
    assert set(published) == {"head", "grafana", "prometheus"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_each_service_mounts_only_its_own_secrets() -> None:
    seen = {
        name: {
            volume.split(":")[0] for volume in service.get("volumes", []) if "secrets-" in volume
        }
        for name, service in SERVICES.items()
        if name != "secrets"  # which generates them
    }
    assert {name: places for name, places in seen.items() if places} == {
        "redis": {"secrets-redis"},
        "head": {"secrets-head"},
        "workers": {"secrets-join"},
        "sandbox": {"secrets-join"},
        "demo": {"secrets-submit"},
    }


def test_overlays_change_only_existing_services() -> None:
    for name in ("gpu.yaml", "prod.yaml"):
        assert set(read(name)["services"]) <= set(SERVICES)
    [asked] = read("gpu.yaml")["services"]["workers"]["deploy"]["resources"]["reservations"][
        "devices"
    ]
    assert asked["driver"] == "nvidia" and asked["capabilities"] == ["gpu"]


@pytest.mark.parametrize(
    ("file", "service", "target"),
    [("compose.yaml", "secrets", "cpu"), ("gpu.yaml", "workers", "cuda")],
)
def test_compose_builds_each_image_from_the_clone(file: str, service: str, target: str) -> None:
    services = read(file)["services"]
    [built] = [name for name, found in services.items() if "build" in found]
    build = services[built]["build"]
    assert (built, build["target"]) == (service, target)
    recipe = FOLDER / build["context"] / build["dockerfile"]
    assert f"\nFROM runtime AS {target}\n" in recipe.read_text()
    known = set(re.findall(r"^ARG (\w+)", recipe.read_text(), re.MULTILINE))
    assert set(build["args"]) <= known
    [image] = {
        image
        for found in services.values()
        if f"meshrl:{target}" in (image := found.get("image", ""))
    }
    assert services[service]["image"] == image  # which the others use
    for name in build["secrets"]:  # empty unless the environment names another
        default = read("compose.yaml")["secrets"][name]["file"].split(":-")[1].rstrip("}")
        lines = (FOLDER / default).read_text().splitlines()
        assert all(line.startswith("#") for line in lines)


def test_every_base_image_has_an_exact_tag() -> None:
    files = [(FOLDER / name).read_text() for name in ("compose.yaml", "images/Dockerfile")]
    images = re.findall(r"docker\.io/\S+?(?=[}\s])", "\n".join(files))
    assert len(images) == 4
    assert all(re.search(r":v?\d+\.\d+\.\d+[\w.-]*$", image) for image in images), images


def test_image_has_the_tested_version_of_sglang() -> None:
    recipe = (FOLDER / "images/Dockerfile").read_text()
    assert f"ARG SGLANG={ENGINE_VERSIONS['sglang']}\n" in recipe
    engines = re.search(r"MESHRL_ENGINES=(\S+)", recipe)
    assert engines and f"python3 -m venv {engines[1]}/sglang" in recipe


def test_demo_on_gpus_alone_gets_a_network_for_the_hub() -> None:
    services = read("gpu.yaml")["services"]
    assert {name for name, found in services.items() if "networks" in found} == {"demo"}
    job = services["demo"]["environment"]["JOB"].split(":-")[1].rstrip("}")
    assert (CODE / job.removeprefix("/usr/share/meshrl/")).is_file()


def test_production_generates_no_secrets_and_runs_no_demo() -> None:
    services = read("prod.yaml")["services"]
    assert services["demo"]["profiles"] == ["demo"]
    for name in ("secrets", "redis", "head", "workers", "sandbox", "demo"):
        assert not any("secrets-" in volume for volume in services[name]["volumes"])


def test_seccomp_profile_blocks_no_call_that_a_jail_needs() -> None:
    profile = json.loads((FOLDER / "seccomp.json").read_text())
    refused = {name for rule in profile["syscalls"] for name in rule["names"]}
    assert not refused & set(ALLOWED_CALLS.split())
    assert not refused & {"clone", "unshare", "mount", "umount2", "pivot_root", "setns"}
    assert {"bpf", "kexec_load", "ptrace", "init_module", "io_uring_setup"} <= refused
