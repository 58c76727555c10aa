"""Component by which the head scales spot workers: rights, token and connection, and no more."""

from __future__ import annotations

import pytest

from tests.deploy.kubernetes import rendering, schemas
from tests.deploy.kubernetes.policies import End, is_allowed
from tests.deploy.kubernetes.rendering import Object, list_templates, select_kind

LABELS = {"app.kubernetes.io/name": "meshrl"}
pytestmark = pytest.mark.needs("kubectl")


@pytest.fixture(scope="module")
def scaled_mesh(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """Return the objects of an operator's overlay with the component."""
    directory = rendering.copy_overlays(tmp_path_factory.mktemp("scaler") / "kubernetes")
    own = directory / "overlays/own"
    own.mkdir()
    (own / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: meshrl\n"
        "resources: [../prod]\ncomponents: [../../components/scaler]\n"
    )
    return rendering.render(own)


@pytest.mark.needs("kubernetes-validate")
def test_objects_of_the_component_are_valid(scaled_mesh: list[Object]) -> None:
    told = schemas.validate({"scaler": scaled_mesh})
    assert told["invalid"] == 0, told["errors"]


def test_only_the_head_has_a_token_and_may_scale_one_deployment(scaled_mesh: list[Object]) -> None:
    mounted = {
        pod["spec"]["serviceAccountName"]: pod["spec"]["automountServiceAccountToken"]
        for _, pod in list_templates(scaled_mesh)
    }
    assert {name for name, has_token in mounted.items() if has_token} == {"meshrl-head"}
    [binding] = [
        one
        for one in select_kind(scaled_mesh, "RoleBinding")
        if one["metadata"]["name"] == "meshrl-scaler"
    ]
    assert [(one["name"], one["namespace"]) for one in binding["subjects"]] == [
        ("meshrl-head", "meshrl")
    ]
    roles = {one["metadata"]["name"]: one for one in select_kind(scaled_mesh, "Role")}
    role = roles["meshrl-scaler"]
    scale, pods = role["rules"]
    assert (scale["resources"], scale["verbs"]) == (["deployments/scale"], ["patch"])
    [name] = scale["resourceNames"]
    assert name in {one["metadata"]["name"] for one in select_kind(scaled_mesh, "Deployment")}
    assert (pods["resources"], set(pods["verbs"])) == (["pods"], {"list", "patch"})


def test_only_the_head_reaches_the_api(scaled_mesh: list[Object]) -> None:
    policies = select_kind(scaled_mesh, "NetworkPolicy")
    api = End("api", address="172.20.0.1")
    pods = {
        part: End(part, {**LABELS, "app.kubernetes.io/component": part}, "meshrl")
        for part in ("head", "worker", "sandbox")
    }
    reaching = {part for part, pod in pods.items() if is_allowed(policies, pod, api, 6443, "TCP")}
    assert reaching == {"head"}
    assert not is_allowed(policies, pods["head"], api, 22, "TCP")
