"""Every object of every overlay is one that each version of Kubernetes takes."""

from __future__ import annotations

import copy

import pytest

from tests.deploy.kubernetes import rendering, schemas
from tests.deploy.kubernetes.rendering import Object

pytestmark = [pytest.mark.needs("kubectl"), pytest.mark.needs("kubernetes-validate")]


def test_no_object_is_invalid_in_any_version(objects: dict[str, list[Object]]) -> None:
    told = schemas.validated(objects)
    assert told["invalid"] == 0, told["errors"]
    assert told["validated"] == told["objects"] * len(schemas.VERSIONS) > 150
    assert set(told["overlays"]) == {*rendering.OVERLAYS, "submit"}


def test_what_no_version_has_is_found(objects: dict[str, list[Object]]) -> None:
    """Check that misspelled fields, wrong types and missing fields are invalid."""
    [sound] = rendering.of_kind(objects["cpu"], "StatefulSet")
    misspelled, mistyped, missing = (copy.deepcopy(sound) for _ in range(3))
    misspelled["spec"]["template"]["spec"]["terminationGracePeriod"] = 60
    mistyped["spec"]["replicas"] = "one"
    del missing["spec"]["selector"]
    told = schemas.validated({"broken": [misspelled, mistyped, missing]})
    assert told["invalid"] == 3 * len(schemas.VERSIONS), told["errors"]
