"""Checks beyond schemas: objects fit the product, and policies allow the right connections."""

from __future__ import annotations

from itertools import product
from typing import cast

import pytest
import typer
from typer.core import TyperGroup

from meshrl.cli import app
from tests.deploy.kubernetes import rendering
from tests.deploy.kubernetes.policies import End, is_allowed
from tests.deploy.kubernetes.rendering import Object, expand_arguments, list_templates, select_kind

pytestmark = pytest.mark.needs("kubectl")


END_S = 60  # maximum duration of `meshrl down` and of a host's exit
USER = 10001
RANGE = (7100, 7199)
HEALTH = 9400
WORKER = "meshrl-worker"
# Secrets that the operator makes where an overlay has none.
OPERATORS = {"meshrl-head", "meshrl-join", "meshrl-submit"}


def containers(template: Object) -> list[Object]:
    spec = template["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def parse_options(words: list[str]) -> dict[str, str]:
    return dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)


def matches_selector(selector: Object, labels: dict[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def list_hosts(objects: list[Object]) -> list[tuple[str, Object, Object]]:
    """Return the workloads whose pods are hosts of the mesh: name, pod, container."""
    found = [(name, pod, containers(pod)) for name, pod in list_templates(objects)]
    return [(name, pod, all_of[0]) for name, pod, all_of in found if len(all_of) == 1]


@pytest.mark.rotating(3)
def test_overlay_has_all_parts_of_a_mesh(overlay: list[Object]) -> None:
    kinds = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]
        for _, pod, _ in list_hosts(overlay)
    }
    assert kinds == {"head", "worker", "sandbox"}
    names = [(found["kind"], found["metadata"]["name"]) for found in overlay]
    assert len(names) == len(set(names))
    [space] = select_kind(overlay, "Namespace")
    for found in overlay:
        if found["kind"] != "Namespace":
            assert found["metadata"]["namespace"] == space["metadata"]["name"], found["metadata"]


@pytest.mark.rotating(3)
def test_commands_are_valid_in_this_version(overlay: list[Object]) -> None:
    """Parse each container's arguments, expanded as the kubelet does, with the product's parser."""
    commands = cast(TyperGroup, typer.main.get_command(app)).commands
    for _, pod in list_templates(overlay):
        for container in containers(pod):
            command, *words = expand_arguments(container)
            commands[command].make_context(command, words)


def test_unknown_option_is_detected() -> None:
    with pytest.raises(Exception, match="No such option"):
        cast(TyperGroup, typer.main.get_command(app)).commands["join"].make_context(
            "join", ["--drain=9"]
        )


def test_services_select_pods_with_their_ports(overlay: list[Object]) -> None:
    for service in select_kind(overlay, "Service"):
        chosen = [
            pod
            for _, pod in list_templates(overlay)
            if matches_selector(service["spec"]["selector"], pod["metadata"]["labels"])
        ]
        assert len(chosen) == 1, service["metadata"]["name"]
        ports = {
            one["name"]: one["containerPort"] for one in chosen[0]["spec"]["containers"][0]["ports"]
        }
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    [head] = select_kind(overlay, "StatefulSet")
    [named] = [
        one for one in select_kind(overlay, "Service") if one["spec"].get("clusterIP") == "None"
    ]
    assert head["spec"]["serviceName"] == named["metadata"]["name"]
    assert named["spec"]["publishNotReadyAddresses"] is True
    told = parse_options(expand_arguments(head["spec"]["template"]["spec"]["containers"][0]))
    assert told["advertise"] == named["metadata"]["name"]


@pytest.mark.rotating(3)
def test_every_mount_has_its_volume_and_every_file_its_secret(overlay: list[Object]) -> None:
    made = {
        found["metadata"]["name"]: set(found["data"]) for found in select_kind(overlay, "Secret")
    }
    maps = {found["metadata"]["name"] for found in select_kind(overlay, "ConfigMap")}
    claims = {
        found["metadata"]["name"]: {
            claim["metadata"]["name"]: {"claim": claim}
            for claim in found["spec"].get("volumeClaimTemplates", ())
        }
        for found in select_kind(overlay, "StatefulSet")
    }
    for name, pod in list_templates(overlay):
        volumes = {one["name"]: one for one in pod["spec"]["volumes"]} | claims.get(name, {})
        used = set()
        for container in containers(pod):
            places = {}
            for mount in container["volumeMounts"]:
                places[mount["mountPath"]] = volumes[mount["name"]]
                used.add(mount["name"])
            assert len(places) == len(container["volumeMounts"])
            assert "/tmp" in places
            said = [
                *expand_arguments(container),
                *(one.get("value", "") for one in container.get("env", ())),
            ]
            files = [word.rpartition("=")[2] for word in said if "/run/secrets/" in word]
            for file in files:
                directory, _, key = file.rpartition("/")
                secret = places[directory]["secret"]
                assert secret["secretName"] in OPERATORS
                assert secret["defaultMode"] == 0o440  # owned by root and the group of the pod
                assert not made or key in made[secret["secretName"]]
        assert used == set(volumes), name
        for volume in pod["spec"]["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps


def test_probes_and_prometheus_use_the_health_port(overlay: list[Object]) -> None:
    for name, pod, container in list_hosts(overlay):
        told, notes = parse_options(expand_arguments(container)), pod["metadata"]["annotations"]
        assert told["health"] == f"0.0.0.0:{HEALTH}", (
            name
        )  # the kubelet connects to the pod's address
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        for probe, path in (
            ("startupProbe", "/livez"),
            ("livenessProbe", "/livez"),
            ("readinessProbe", "/readyz"),
        ):
            asked = container[probe]["httpGet"]
            assert (asked["path"], ports[asked["port"]]) == (path, HEALTH)
        assert notes["prometheus.io/scrape"] == "true"
        assert (notes["prometheus.io/port"], notes["prometheus.io/path"]) == ("9400", "/metrics")


def test_grace_period_covers_the_drain_time(overlay: list[Object]) -> None:
    for name, pod, container in list_hosts(overlay):
        told, grace = (
            parse_options(expand_arguments(container)),
            pod["spec"]["terminationGracePeriodSeconds"],
        )
        least = int(told.get("drain-s", 0)) + END_S
        assert grace >= least, (name, grace, least)
        assert "drain-s" not in told or int(told["grace-s"]) == grace, name


def test_listen_ports_match_policies_and_services(overlay: list[Object]) -> None:
    for name, _, container in list_hosts(overlay):
        low, high = (
            parse_options(expand_arguments(container))["listen"].rpartition(":")[2].split("-")
        )
        assert (int(low), int(high)) == RANGE, name
    gateway = {
        port["port"]
        for service in select_kind(overlay, "Service")
        for port in service["spec"]["ports"]
    }
    assert gateway == {RANGE[1]}  # the gateway has the last port of the range


def test_disruption_budgets_select_one_workload_each(overlay: list[Object]) -> None:
    budgets = select_kind(overlay, "PodDisruptionBudget")
    for budget in budgets:
        chosen = [
            name
            for name, pod in list_templates(overlay)
            if matches_selector(
                budget["spec"]["selector"]["matchLabels"], pod["metadata"]["labels"]
            )
        ]
        assert chosen == [budget["metadata"]["name"]]
    workers = {found["metadata"]["name"] for found in select_kind(overlay, "Deployment")}
    assert workers <= {budget["metadata"]["name"] for budget in budgets}


def test_workloads_select_only_their_own_pods(overlay: list[Object]) -> None:
    for kind in ("StatefulSet", "Deployment"):
        for found in select_kind(overlay, kind):
            selector = found["spec"]["selector"]["matchLabels"]
            chosen = [
                name
                for name, pod in list_templates(overlay)
                if matches_selector(selector, pod["metadata"]["labels"])
            ]
            assert chosen == [found["metadata"]["name"]]


def test_each_host_has_its_own_volume(overlay: list[Object]) -> None:
    """Check that each pod has its own directory; only the head's outlives its pod."""
    for name, pod, container in list_hosts(overlay):
        volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
        for volume in volumes.values():
            assert set(volume) <= {"name", "emptyDir", "secret", "configMap"}, (name, volume)
        at = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        root = parse_options(expand_arguments(container))["root"]
        place = at["/var/lib/meshrl"]
        assert root.startswith(
            "/var/lib/meshrl/"
        )  # the directory of a volume may be world-writable
        assert (place in volumes) == (name != "meshrl-head")
    [head] = select_kind(overlay, "StatefulSet")
    assert head["spec"]["replicas"] == 1
    for claim in head["spec"]["volumeClaimTemplates"]:
        assert claim["spec"]["accessModes"] in (["ReadWriteOnce"], ["ReadWriteOncePod"])


def test_pods_meet_the_restricted_standard(overlay: list[Object]) -> None:
    [space] = select_kind(overlay, "Namespace")
    assert space["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, pod in list_templates(overlay):
        spec = pod["spec"]
        whole = spec["securityContext"]
        assert (whole["runAsNonRoot"], whole["runAsUser"], whole["fsGroup"]) == (True, USER, USER)
        assert whole["seccompProfile"]["type"] == "RuntimeDefault"
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        for container in containers(pod):
            own = container["securityContext"]
            assert own["capabilities"] == {"drop": ["ALL"]}, name
            assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
            assert "privileged" not in own
            if "procMount" in own:  # the standard permits it only in a user namespace
                assert spec["hostUsers"] is False
            limits, requests = container["resources"]["limits"], container["resources"]["requests"]
            assert "memory" in limits and {"cpu", "memory"} <= set(requests)


def test_no_pod_can_use_the_cluster_api(overlay: list[Object]) -> None:
    accounts = {
        found["metadata"]["name"]: found for found in select_kind(overlay, "ServiceAccount")
    }
    for _, pod in list_templates(overlay):
        assert pod["spec"]["automountServiceAccountToken"] is False
        account = accounts[pod["spec"]["serviceAccountName"]]
        assert account["automountServiceAccountToken"] is False
        assert pod["spec"]["enableServiceLinks"] is False
    bound = [one for binding in select_kind(overlay, "RoleBinding") for one in binding["subjects"]]
    assert not {one["name"] for one in bound} & set(accounts)


def test_settings_of_a_head_stay_private_after_a_remount(
    overlay: list[Object],
) -> None:
    """Check for `OnRootMismatch`: `Always` opens every file to the group, and readable settings are
    rejected.
    """
    [head] = select_kind(overlay, "StatefulSet")
    context = head["spec"]["template"]["spec"]["securityContext"]
    assert context["fsGroupChangePolicy"] == "OnRootMismatch"


@pytest.mark.parametrize("overlay", ["gpu-a100", "gpu-h100", "prod"], indirect=True)
def test_gpu_workers_are_scheduled_on_gpu_nodes(overlay: list[Object]) -> None:
    workers = [
        (pod, container) for name, pod, container in list_hosts(overlay) if name.startswith(WORKER)
    ]
    chosen = [pod["spec"]["nodeSelector"]["nvidia.com/gpu.product"] for pod, _ in workers]
    assert len(chosen) == len(set(chosen)) > 0
    for pod, container in workers:
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) > 0
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in (
            pod["spec"]["tolerations"]
        )
        assert parse_options(expand_arguments(container))["device"] == "cuda"
        assert container["image"].endswith(":cuda")


def test_pod_on_a_spot_node_declares_its_market(objects: dict[str, list[Object]]) -> None:
    told = {}
    for name, pod, container in list_hosts(objects["prod"]):
        if name.startswith(WORKER):
            spot = pod["spec"].get("nodeSelector", {}).get("karpenter.sh/capacity-type") == "spot"
            told[parse_options(expand_arguments(container))["market"]] = spot
    assert told == {"spot": True, "reserved": False}


def test_only_sandboxes_have_the_rights_that_bubblewrap_needs(
    objects: dict[str, list[Object]],
) -> None:
    for name, pod, container in list_hosts(objects["prod"]):
        own = container["securityContext"]
        if name == "meshrl-sandbox":
            assert (pod["spec"]["hostUsers"], own["procMount"]) == (False, "Unmasked")
            assert own["seccompProfile"] == {"type": "Localhost", "localhostProfile": "meshrl.json"}
        else:
            assert "procMount" not in own and "seccompProfile" not in own
    assert (rendering.SOURCE.parent / "seccomp.json").is_file()  # which the operator puts there


SPACE = "meshrl"
PORTS = (22, 53, 80, 443, 6379, 7000, 7099, 7100, 7150, 7198, 7199, 7200, 9090, 9400, 10250, 40000)
MESH = range(7100, 7200)
GATEWAY, NAMES = 7199, 53

PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}


def list_ends(objects: list[Object]) -> list[End]:
    """Return a pod of each workload and other possible peers."""
    own = [End(name, pod["metadata"]["labels"], SPACE) for name, pod in list_templates(objects)]
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


def get_role(end: End) -> str:
    if end.space == SPACE and end.labels.get("app.kubernetes.io/name") == "meshrl":
        kind = end.labels["app.kubernetes.io/component"]
        return {"worker": "host", "sandbox": "host"}.get(kind, kind)
    return end.name


def is_needed(source: End, target: End, port: int, protocol: str, office: bool) -> bool:
    """Return True if the mesh needs the connection; written independently of the policies."""
    who, whom = get_role(source), get_role(target)
    if whom == "dns":
        return who in ("head", "host", "client") and port == NAMES
    if protocol != "TCP":
        return False
    if {who, whom} <= {"head", "host"}:
        return port in MESH
    if whom == "head" and port == GATEWAY:
        return who == "client" or (who == "office" and office)
    return who == "prometheus" and whom in ("head", "host") and port == HEALTH


def test_policies_allow_exactly_the_connections_of_a_mesh(
    overlay: list[Object], request: pytest.FixtureRequest
) -> None:
    policies, around = select_kind(overlay, "NetworkPolicy"), list_ends(overlay)
    office = "prod" in request.node.callspec.id
    wrong, asked = [], 0
    for source, target in product(around, around):
        if SPACE not in (source.space, target.space) or source == target:
            continue
        for port, protocol in product(PORTS, ("TCP", "UDP")):
            found = is_allowed(policies, source, target, port, protocol)
            if found != is_needed(source, target, port, protocol, office):
                wrong.append((source.name, target.name, port, protocol, found))
            asked += 1
    assert not wrong
    assert asked > 1000


def test_replicas_of_a_workload_reach_each_other(overlay: list[Object]) -> None:
    policies = select_kind(overlay, "NetworkPolicy")
    for end in list_ends(overlay):
        if get_role(end) == "host":
            assert is_allowed(policies, end, end, 7150, "TCP")


def test_unknown_pod_is_isolated(overlay: list[Object]) -> None:
    """Check that a new pod in the namespace reaches nothing until a policy allows it."""
    policies = select_kind(overlay, "NetworkPolicy")
    unknown = End("stranger", {"app": "debug"}, SPACE)
    for end in list_ends(overlay):
        for port in PORTS:
            assert not is_allowed(policies, unknown, end, port, "TCP")
            assert not is_allowed(policies, end, unknown, port, "TCP")
