"""Who reaches whom on which port: what a mesh needs passes, and nothing else does."""

from __future__ import annotations

from itertools import product

import pytest

from tests.deploy.kubernetes.policies import End, passes
from tests.deploy.kubernetes.rendering import Object, of_kind, templates

pytestmark = pytest.mark.needs("kubectl")

SPACE = "meshrl"
PORTS = (22, 53, 80, 443, 6379, 7000, 7099, 7100, 7150, 7198, 7199, 7200, 9090, 9400, 10250, 40000)
MESH = range(7100, 7200)
GATEWAY, HEALTH, NAMES = 7199, 9400, 53
PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}


def ends(objects: list[Object]) -> list[End]:
    """A pod of each workload, and who else may be around."""
    own = [End(name, pod["metadata"]["labels"], SPACE) for name, pod in templates(objects)]
    return [
        *own,
        End("stranger", {"app": "debug"}, SPACE),
        End("neighbour", {"app.kubernetes.io/name": "meshrl"}, "default"),
        End("prometheus", PROMETHEUS, "monitoring"),
        End("grafana", {"app.kubernetes.io/name": "grafana"}, "monitoring"),
        End("dns", {"k8s-app": "kube-dns"}, "kube-system"),
        End("office", address="10.20.3.4"),
        End("internet", address="203.0.113.9"),
    ]


def role(end: End) -> str:
    if end.space == SPACE and end.labels.get("app.kubernetes.io/name") == "meshrl":
        kind = end.labels["app.kubernetes.io/component"]
        return {"worker": "host", "sandbox": "host"}.get(kind, kind)
    return end.name


def needed(source: End, target: End, port: int, protocol: str, office: bool) -> bool:
    """What a mesh needs, in words of its own."""
    who, whom = role(source), role(target)
    if whom == "dns":
        return who in ("head", "host", "client") and port == NAMES
    if protocol != "TCP":
        return False
    if {who, whom} <= {"head", "host"}:
        return port in MESH
    if whom == "head" and port == GATEWAY:
        return who == "client" or (who == "office" and office)
    return who == "prometheus" and whom in ("head", "host") and port == HEALTH


def test_what_passes_is_what_a_mesh_needs(
    overlay: list[Object], request: pytest.FixtureRequest
) -> None:
    policies, around = of_kind(overlay, "NetworkPolicy"), ends(overlay)
    office = "prod" in request.node.callspec.id
    wrong, asked = [], 0
    for source, target in product(around, around):
        if SPACE not in (source.space, target.space) or source == target:
            continue
        for port, protocol in product(PORTS, ("TCP", "UDP")):
            found = passes(policies, source, target, port, protocol)
            if found != needed(source, target, port, protocol, office):
                wrong.append((source.name, target.name, port, protocol, found))
            asked += 1
    assert not wrong
    assert asked > 1000


def test_replicas_of_a_workload_reach_each_other(overlay: list[Object]) -> None:
    policies = of_kind(overlay, "NetworkPolicy")
    for end in ends(overlay):
        if role(end) == "host":
            assert passes(policies, end, end, 7150, "TCP")


def test_a_pod_that_nobody_knows_is_shut_in(overlay: list[Object]) -> None:
    """Whatever is put into the namespace reaches nothing until a policy says so."""
    policies = of_kind(overlay, "NetworkPolicy")
    stranger = End("stranger", {"app": "debug"}, SPACE)
    for end in ends(overlay):
        for port in PORTS:
            assert not passes(policies, stranger, end, port, "TCP")
            assert not passes(policies, end, stranger, port, "TCP")
