"""Objects of an overlay, as `kubectl apply -k` sends them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.load import scaled

SOURCE = Path(__file__).parents[3] / "compose/kubernetes"
OVERLAYS = ("cpu", "gpu-a100", "gpu-h100", "prod")
SECRETS = ("head.json", "join.token", "submit.token")
RENDER_S = 60.0

Object = dict[str, Any]


def copy_overlays(to: Path) -> Path:
    """Copy all overlays, with stub files in place of the output of `meshrl secrets`; return the
    copy.
    """
    shutil.copytree(SOURCE, to, ignore=shutil.ignore_patterns("files"))
    files = to / "secrets/files"
    files.mkdir()
    for name in SECRETS:
        (files / name).write_text(f"{name} of a test\n")
    return to


def render(directory: Path) -> list[Object]:
    """Return the objects of a directory with a kustomization."""
    command = ("kubectl", "kustomize", str(directory))
    found = subprocess.run(command, capture_output=True, text=True, timeout=scaled(RENDER_S))
    if found.returncode:
        raise ValueError(f"{' '.join(command)}: {found.stderr}")
    return [part for part in yaml.load_all(found.stdout, Loader=yaml.CSafeLoader) if part]


def render_all(directory: Path) -> dict[str, list[Object]]:
    """Return the objects of each overlay, and of the Job that submits a job."""
    places = {name: directory / "overlays" / name for name in OVERLAYS}
    places["submit"] = directory / "submit"
    return {name: render(place) for name, place in places.items()}


def list_templates(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Yield the name and the pod template of each workload."""
    for found in objects:
        if found["kind"] in ("StatefulSet", "Deployment", "Job"):
            yield found["metadata"]["name"], found["spec"]["template"]


def select_kind(objects: list[Object], kind: str) -> list[Object]:
    """Return the objects of one kind."""
    return [found for found in objects if found["kind"] == kind]


def expand_arguments(container: Object, given: dict[str, str] | None = None) -> list[str]:
    """Return a container's arguments with variables expanded as the kubelet does.

    `given` has the values that come from the pod, such as its address.
    """
    values = {one["name"]: one["value"] for one in container.get("env", ()) if "value" in one}
    values |= given or {"POD_IP": "10.0.0.9"}
    words: list[str] = list(container["args"])
    for name, value in values.items():
        words = [word.replace(f"$({name})", value) for word in words]
    left = [word for word in words if "$(" in word]
    if left:
        raise ValueError(f"no variable for {left}")
    return words
