"""Evaluation of a namespace's network policies by the documented rules of Kubernetes.

A direction of a pod is closed as soon as a policy of that direction selects the pod, except for the
connections that any such policy allows.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from tests.deploy.kubernetes.rendering import Object


@dataclass(frozen=True)
class End:
    """One end of a connection: a pod, by its labels and those of its namespace; or an address."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    space: str = ""
    address: str = ""


def is_allowed(policies: list[Object], source: End, target: End, port: int, protocol: str) -> bool:
    """Return True if `source` may connect to `target`."""
    return _is_direction_open(
        policies, source, target, "egress", port, protocol
    ) and _is_direction_open(policies, target, source, "ingress", port, protocol)


def _is_direction_open(
    policies: list[Object], own: End, other: End, way: str, port: int, protocol: str
) -> bool:
    closing = [
        policy
        for policy in policies
        if policy["metadata"]["namespace"] == own.space
        and way.capitalize() in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], own.labels)
    ]
    if not closing:
        return True
    rules = [rule for policy in closing for rule in policy["spec"].get(way, ())]
    peers = "to" if way == "egress" else "from"
    return any(
        any(_matches_peer(peer, other, own.space) for peer in rule[peers])
        and any(_matches_port(allowed, port, protocol) for allowed in rule["ports"])
        for rule in rules
    )


def _matches_peer(peer: Object, end: End, space: str) -> bool:
    if "ipBlock" in peer:
        block = ipaddress.ip_network(peer["ipBlock"]["cidr"])
        return bool(end.address) and ipaddress.ip_address(end.address) in block
    if end.address:
        return False
    named = {"kubernetes.io/metadata.name": end.space}
    where = (
        _selects(peer["namespaceSelector"], named)
        if "namespaceSelector" in peer
        else end.space == space
    )
    return where and _selects(peer.get("podSelector", {}), end.labels)


def _selects(selector: Object, labels: dict[str, str]) -> bool:
    for rule in selector.get("matchExpressions", ()):
        if rule["operator"] != "In":
            raise ValueError(f"{rule['operator']} is not known here")
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    matched = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in matched.items())


def _matches_port(allowed: Object, port: int, protocol: str) -> bool:
    last: int = allowed["endPort"] if "endPort" in allowed else allowed["port"]
    return bool(allowed["protocol"] == protocol and allowed["port"] <= port <= last)
