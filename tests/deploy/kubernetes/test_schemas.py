"""Validity of every object of every overlay in each supported version of Kubernetes."""

from __future__ import annotations

import copy

import pytest

from tests.deploy.kubernetes import rendering, schemas
from tests.deploy.kubernetes.rendering import Object

pytestmark = [pytest.mark.needs("kubectl"), pytest.mark.needs("kubernetes-validate")]


def test_objects_are_valid_in_every_version(objects: dict[str, list[Object]]) -> None:
    told = schemas.validate(objects)
    assert told["invalid"] == 0, told["errors"]
    assert told["validated"] == told["objects"] * len(schemas.VERSIONS) > 150
    assert set(told["overlays"]) == {*rendering.OVERLAYS, "submit"}


def test_invalid_objects_are_detected(objects: dict[str, list[Object]]) -> None:
    """Check that misspelled fields, wrong types and missing fields are invalid."""
    [sound] = rendering.select_kind(objects["cpu"], "StatefulSet")
    misspelled, mistyped, missing = (copy.deepcopy(sound) for _ in range(3))
    misspelled["spec"]["template"]["spec"]["terminationGracePeriod"] = 60
    mistyped["spec"]["replicas"] = "one"
    del missing["spec"]["selector"]
    told = schemas.validate({"broken": [misspelled, mistyped, missing]})
    assert told["invalid"] == 3 * len(schemas.VERSIONS), told["errors"]
