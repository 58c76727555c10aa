"""Providers of spot hosts: a real command in each way that it can fail, and Kubernetes' API."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from meshrl.common.base.errors import ConfigError, DeadlineExceeded, MeshError
from meshrl.launch.redis.access.certificates import (
    CA_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    issue_certificate,
)
from meshrl.launch.scaler.providers import (
    OUTPUT_BYTES,
    CommandProvider,
    KubernetesProvider,
    ScaleRequest,
    find_api_address,
    parse_workload,
)
from tests.load import scaled

REQUEST = ScaleRequest(2, 4, {"spot-1": "10.0.0.1", "spot-2": "10.0.0.2"})


def make_provider(tmp_path: Path, script: str, timeout_s: float = 30.0) -> CommandProvider:
    """Return the provider of a shell script."""
    return CommandProvider(["sh", "-c", script, "provider"], scaled(timeout_s), tmp_path / "log")


async def test_command_gets_the_request_and_no_secret_of_the_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHRL_SETTINGS", "secret")
    out = tmp_path / "out"
    script = f'echo "$@" > {out}; env | grep ^MESHRL_ | sort >> {out}; echo said'
    await make_provider(tmp_path, script).scale(REQUEST)
    assert out.read_text().splitlines() == [
        "scale 2",
        "MESHRL_RELEASE_ADDRESSES=10.0.0.1 10.0.0.2",
        "MESHRL_RELEASE_HOSTS=spot-1 spot-2",
        "MESHRL_SPOT_HOSTS=2",
        "MESHRL_SPOT_WORKERS=4",
    ]
    assert "scale 2\nsaid\n" in (tmp_path / "log").read_text()


async def test_missing_command_is_named(tmp_path: Path) -> None:
    missing = CommandProvider([str(tmp_path / "none")], 5.0, tmp_path / "log")
    with pytest.raises(MeshError, match="none cannot be started: No such file") as caught:
        await missing.scale(REQUEST)
    assert caught.value.where == "pool.scaler.command"


async def test_failed_command_is_reported_with_the_end_of_its_output(tmp_path: Path) -> None:
    script = "echo no capacity in eu-west-1 >&2; exit 3"
    with pytest.raises(MeshError, match="ended with status 3: no capacity in eu-west-1"):
        await make_provider(tmp_path, script).scale(REQUEST)


async def test_hanging_command_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {pid}.new; mv {pid}.new {pid}; echo waiting; wait"
    provider = CommandProvider(["sh", "-c", script], 0.3, tmp_path / "log")
    with pytest.raises(DeadlineExceeded, match=r"has not ended within 0\.3 s and is killed"):
        await provider.scale(REQUEST)
    if pid.exists():
        until = time.monotonic() + scaled(10.0)
        while is_running(int(pid.read_text())):
            assert time.monotonic() < until
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_cancelled_command_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    task = asyncio.create_task(
        make_provider(tmp_path, f"echo $$ > {ready}.new; mv {ready}.new {ready}; sleep 600").scale(
            REQUEST
        )
    )
    until = time.monotonic() + scaled(10.0)
    while not ready.exists():
        assert time.monotonic() < until
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while is_running(int(ready.read_text())):
        assert time.monotonic() < until
        await asyncio.sleep(0.01)


async def test_megabytes_of_output_leave_a_short_log(tmp_path: Path) -> None:
    script = "head -c 8000000 /dev/zero | tr '\\0' x; echo; echo end"
    await make_provider(tmp_path, script).scale(REQUEST)
    log = tmp_path / "log"
    assert log.stat().st_size < OUTPUT_BYTES + 500 and log.read_text().endswith("x\nend\n")


async def test_process_left_behind_outlives_the_command(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    await make_provider(tmp_path, f"sleep 60 >/dev/null 2>&1 & echo $! > {pid}").scale(REQUEST)
    found = int(pid.read_text())
    assert is_running(found)
    os.kill(found, 9)


class KubernetesServer:
    """Kubernetes' API as far as a scaler uses it: pods, and the scale of a Deployment.

    It answers as the API server of Kubernetes 1.33 does. `failure`: status and reason of all
    changes of the scale.
    """

    def __init__(self) -> None:
        self.replicas = 1
        self.pods = {"10.0.0.1": "worker-x2x9z", "10.0.0.2": "worker-b7k2p"}
        self.annotations: dict[str, dict[str, str]] = {}
        self.failure: tuple[int, str] | None = None
        self.token = "first"
        self.url = ""

    def create_application(self) -> web.Application:
        application = web.Application()
        scale = "/apis/apps/v1/namespaces/mesh/{kind}/{name}/scale"
        pods = "/api/v1/namespaces/mesh/pods"
        application.add_routes(
            [
                web.patch(scale, self.change_scale),
                web.get(pods, self.list_pods),
                web.patch(pods + "/{name}", self.change_pod),
            ]
        )
        return application

    def check(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            raise self.make_failure(web.HTTPUnauthorized, 401, "Unauthorized")

    @staticmethod
    def make_failure(kind: Any, code: int, message: str) -> web.HTTPException:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
        body = json.dumps(status | {"message": message})
        failure: web.HTTPException = kind(text=body, content_type="application/json")
        return failure

    async def change_scale(self, request: web.Request) -> web.Response:
        self.check(request)
        if self.failure is not None:
            code, message = self.failure
            status = {"kind": "Status", "status": "Failure", "message": message, "code": code}
            return web.json_response(status, status=code)
        kind, name = request.match_info["kind"], request.match_info["name"]
        if kind not in ("deployments", "statefulsets") or name != "worker":
            raise self.make_failure(web.HTTPNotFound, 404, f'deployments.apps "{name}" not found')
        if request.content_type != "application/merge-patch+json":
            raise self.make_failure(web.HTTPUnsupportedMediaType, 415, "the body is no patch")
        self.replicas = (await request.json())["spec"]["replicas"]
        scale = {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": {"name": name}}
        return web.json_response(scale | {"spec": {"replicas": self.replicas}})

    async def list_pods(self, request: web.Request) -> web.Response:
        self.check(request)
        key, _, address = request.query["fieldSelector"].partition("=")
        assert key == "status.podIP"
        items = [{"metadata": {"name": name}} for ip, name in self.pods.items() if ip == address]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "items": items})

    async def change_pod(self, request: web.Request) -> web.Response:
        self.check(request)
        assert request.content_type == "application/merge-patch+json"
        name = request.match_info["name"]
        self.annotations[name] = (await request.json())["metadata"]["annotations"]
        return web.json_response({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name}})


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[KubernetesServer]:
    found = KubernetesServer()
    issue_certificate(tmp_path, ["127.0.0.1"], datetime.now(UTC))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / CERTIFICATE_FILE, tmp_path / KEY_FILE)
    runner = web.AppRunner(found.create_application())
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        found.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        yield found
    finally:
        await runner.cleanup()


def make_kubernetes(
    cluster: KubernetesServer, tmp_path: Path, workload: str = "mesh/deployment/worker"
) -> KubernetesProvider:
    (tmp_path / "token").write_text(f"{cluster.token}\n")
    (tmp_path / "ca.crt").write_bytes((tmp_path / CA_FILE).read_bytes())
    return KubernetesProvider(workload, cluster.url, scaled(20.0), tmp_path)


async def test_kubernetes_scales_and_ends_the_pods_of_released_hosts_first(
    cluster: KubernetesServer, tmp_path: Path
) -> None:
    provider = make_kubernetes(cluster, tmp_path)
    await provider.scale(ScaleRequest(3, 3))
    assert cluster.replicas == 3 and not cluster.annotations
    cluster.pods.pop("10.0.0.2")  # gone already
    await provider.scale(REQUEST)
    assert cluster.replicas == 2
    cost = {"controller.kubernetes.io/pod-deletion-cost": "-1"}
    assert cluster.annotations == {"worker-x2x9z": cost}
    await make_kubernetes(cluster, tmp_path, "mesh/statefulset/worker").scale(ScaleRequest(0, 0))
    assert cluster.replicas == 0


async def test_api_of_another_authority_gets_no_token(
    cluster: KubernetesServer, tmp_path: Path
) -> None:
    provider = make_kubernetes(cluster, tmp_path)
    issue_certificate(tmp_path / "other", ["127.0.0.1"], datetime.now(UTC))
    (tmp_path / "ca.crt").write_bytes((tmp_path / "other" / CA_FILE).read_bytes())
    with pytest.raises(MeshError, match=r"did not scale worker: .*CERTIFICATE_VERIFY_FAILED"):
        await provider.scale(ScaleRequest(3, 3))
    assert cluster.replicas == 1


async def test_kubernetes_token_is_read_again(cluster: KubernetesServer, tmp_path: Path) -> None:
    provider = make_kubernetes(cluster, tmp_path)
    cluster.token = "second"
    with pytest.raises(MeshError, match=r"answered 401 to /apis/apps/v1.*: Unauthorized"):
        await provider.scale(ScaleRequest(3, 3))
    (tmp_path / "token").write_text("second")
    await provider.scale(ScaleRequest(3, 3))


@pytest.mark.parametrize(
    ("failure", "fix"),
    [
        ((403, 'deployments.apps "worker" is forbidden'), "Give the head's account the rights"),
        ((409, "the object has been modified"), "The launcher repeats the request"),
        ((500, "etcdserver: request timed out"), "The launcher repeats the request"),
    ],
)
async def test_kubernetes_failure_is_reported_with_its_fix(
    cluster: KubernetesServer, tmp_path: Path, failure: tuple[int, str], fix: str
) -> None:
    provider = make_kubernetes(cluster, tmp_path)
    cluster.failure = failure
    with pytest.raises(MeshError) as caught:
        await provider.scale(ScaleRequest(3, 3))
    assert f"answered {failure[0]}" in caught.value.message
    assert failure[1] in caught.value.message and caught.value.fix.startswith(fix)


async def test_unknown_deployment_is_named(cluster: KubernetesServer, tmp_path: Path) -> None:
    provider = make_kubernetes(cluster, tmp_path, "mesh/deployment/other")
    with pytest.raises(MeshError, match=r'answered 404 .*"other" not found'):
        await provider.scale(ScaleRequest(3, 3))


async def test_api_without_an_answer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("token")
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with silent:
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        provider = KubernetesProvider("mesh/deployment/worker", url, 0.2, tmp_path)
        with pytest.raises(MeshError, match="did not scale worker: ReadTimeout") as caught:
            await provider.scale(ScaleRequest(3, 3))
        assert caught.value.where == "pool.scaler.kubernetes"
    with pytest.raises(MeshError, match="did not scale worker: ConnectError"):
        await provider.scale(ScaleRequest(3, 3))
    (tmp_path / "token").unlink()
    with pytest.raises(MeshError, match="FileNotFoundError"):
        await provider.scale(ScaleRequest(3, 3))


def test_workload_is_parsed_or_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_workload("mesh/Deployment/worker") == ("mesh", "deployment", "worker")
    for wrong in ("worker", "mesh/job/worker", "mesh/deployment/", "a/deployment/b/c"):
        with pytest.raises(ConfigError, match="is no workload of Kubernetes"):
            parse_workload(wrong)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert find_api_address() == ""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert find_api_address() == "https://[fd00::1]:6443"
