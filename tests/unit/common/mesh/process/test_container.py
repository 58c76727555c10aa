"""What a container leaves to a process, as the kernel says it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshrl.common.mesh.process import container


def test_orchestrators_are_known_by_what_they_put_into_a_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (container.KUBERNETES, "container"):
        monkeypatch.delenv(name, raising=False)
    mark = tmp_path / "mark"
    monkeypatch.setattr(container, "MARKS", {str(mark): "podman"})
    assert container.kind() == ""
    mark.touch()
    assert container.kind() == "podman"
    monkeypatch.setenv(container.KUBERNETES, "10.0.0.1")
    assert container.kind() == "kubernetes"


def test_rights_are_those_of_this_process() -> None:
    found = container.rights()
    assert found.user == os.geteuid()
    assert found.seccomp in ("none", "strict", "filtered")
    assert 0 <= found.capabilities <= 64 and isinstance(found.read_only_root, bool)


def test_writable_places_take_files() -> None:
    found = container.writable()
    assert found and not [place for place in found if place.startswith(("/proc", "/sys"))]
    assert all(os.access(place, os.W_OK) for place in found)


def test_whether_user_namespaces_may_be_made_is_tried() -> None:
    refused = container.user_namespaces_refused()
    assert refused == "" or "user namespaces" in refused
    assert os.readlink("/proc/self/ns/user") == os.readlink(f"/proc/{os.getpid()}/ns/user")
