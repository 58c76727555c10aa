"""Providers of spot hosts: a user's command, or a workload of Kubernetes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import ssl
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from meshrl.common.base.errors import ConfigError, DeadlineExceeded, MeshError
from meshrl.common.mesh.process.output.log_bounds import rotate_file_if_long

OUTPUT_BYTES = 64 << 10  # of a command's output that its log keeps: the end
ERROR_CHARS = 300  # of that end in an error
EXIT_GRACE_S = 1.0  # for the rest of the output, which a process left behind may hold open
WORKLOADS = ("deployment", "statefulset")
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DELETION_COST = {"controller.kubernetes.io/pod-deletion-cost": "-1"}  # default 0; lowest goes first


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """Number of spot hosts that a provider is to run from now on, and those that it may end."""

    hosts: int
    workers: int  # of all these hosts
    release: Mapping[str, str] = field(default_factory=dict)  # empty host -> its address


class Provider(Protocol):
    async def scale(self, request: ScaleRequest) -> None:
        """Bring the number of hosts to that of the request; repeats change nothing.

        Raises MeshError.
        """


class CommandProvider:
    """User's program, called as `COMMAND scale HOSTS` with the request in its environment.

    The log gets the end of its output. At its deadline it is killed with its process group.
    """

    def __init__(self, command: Sequence[str], timeout_s: float, log: Path) -> None:
        self._command, self._timeout_s, self._log = command, timeout_s, log

    async def scale(self, request: ScaleRequest) -> None:
        words = [*self._command, "scale", str(request.hosts)]
        try:
            transport, run = await asyncio.get_running_loop().subprocess_exec(
                _CommandRun,
                *words,
                env=self._make_environment(request),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise MeshError(
                f"{self._command[0]} cannot be started: {error.strerror or error}",
                where="pool.scaler.command",
                fix="Install it on the head, or correct mesh.toml",
            ) from error
        try:
            async with asyncio.timeout(self._timeout_s):
                await run.exited.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_GRACE_S):
                    await run.closed.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"`{shlex.join(words)}` has not ended within {self._timeout_s:g} s and is killed",
                where="pool.scaler.command",
                fix=f"Read {self._log}, or raise pool.scaler.timeout_s",
            ) from None
        finally:
            if not run.exited.is_set():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(transport.get_pid(), signal.SIGKILL)
            transport.close()
            await asyncio.to_thread(self._write_log, words, bytes(run.output))
        if status := transport.get_returncode():
            last = run.output.decode(errors="replace").strip()[-ERROR_CHARS:] or "no output"
            raise MeshError(
                f"`{shlex.join(words)}` ended with status {status}: {last}",
                where="pool.scaler.command",
                fix=f"Read {self._log}",
            )

    @staticmethod
    def _make_environment(request: ScaleRequest) -> dict[str, str]:
        """Return the launcher's environment without the mesh's secrets and marks."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("MESHRL_")}
        return inherited | {
            "MESHRL_SPOT_HOSTS": str(request.hosts),
            "MESHRL_SPOT_WORKERS": str(request.workers),
            "MESHRL_RELEASE_HOSTS": " ".join(request.release),
            "MESHRL_RELEASE_ADDRESSES": " ".join(request.release.values()),
        }

    def _write_log(self, words: Sequence[str], output: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk, which the mesh reports itself
            rotate_file_if_long(self._log)
            with self._log.open("ab") as log:
                log.write(f"$ {shlex.join(words)}\n".encode() + output.rstrip() + b"\n")


class _CommandRun(asyncio.SubprocessProtocol):
    """Running command: the end of its output, and its exit."""

    def __init__(self) -> None:
        self.output = bytearray()
        self.exited, self.closed = asyncio.Event(), asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.output += data
        del self.output[:-OUTPUT_BYTES]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self.closed.set()

    def process_exited(self) -> None:
        self.exited.set()


def parse_workload(text: str) -> tuple[str, str, str]:
    """Return namespace, kind and name of `NAMESPACE/KIND/NAME`. Raises ConfigError."""
    parts = text.lower().split("/")
    if len(parts) != 3 or not all(parts) or parts[1] not in WORKLOADS:
        raise ConfigError(
            f"{text!r} is no workload of Kubernetes",
            where="pool.scaler.kubernetes",
            fix="Set NAMESPACE/deployment/NAME or NAMESPACE/statefulset/NAME",
        )
    return parts[0], parts[1], parts[2]


def find_api_address() -> str:
    """Return the URL of the cluster's API, as its pods have it; empty outside a cluster."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    address = f"[{host}]" if ":" in host else host
    return f"https://{address}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}" if host else ""


class KubernetesProvider:
    """Deployment or StatefulSet whose number of replicas is the number of hosts.

    It uses the account of the head's pod, which needs the rights of
    `compose/kubernetes/components/scaler`. Before a reduction the pods of released hosts get the
    lowest deletion cost, so that a Deployment ends them first; a StatefulSet ends its last pods.
    """

    def __init__(
        self, workload: str, api_url: str, timeout_s: float, account: Path = ACCOUNT
    ) -> None:
        """`timeout_s`: for one answer."""
        self._timeout_s = timeout_s
        self._namespace, self._kind, self._name = parse_workload(workload)
        self._api_url, self._account = api_url, account

    async def scale(self, request: ScaleRequest) -> None:
        pods = f"/api/v1/namespaces/{self._namespace}/pods"
        path = f"/apis/apps/v1/namespaces/{self._namespace}/{self._kind}s/{self._name}/scale"
        try:
            token = (self._account / "token").read_text().strip()  # the kubelet replaces it
            authority = self._account / "ca.crt"
            verify = ssl.create_default_context(cafile=authority) if authority.exists() else True
            async with httpx.AsyncClient(
                base_url=self._api_url,
                headers={"Authorization": f"Bearer {token}"},
                verify=verify,
                timeout=self._timeout_s,
                trust_env=False,
            ) as client:
                for address in request.release.values():
                    query = {"fieldSelector": f"status.podIP={address}"}
                    found = _decode(await client.get(pods, params=query))
                    for pod in found.get("items", []):
                        change = {"metadata": {"annotations": DELETION_COST}}
                        await self._patch(client, f"{pods}/{pod['metadata']['name']}", change)
                await self._patch(client, path, {"spec": {"replicas": request.hosts}})
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
            raise MeshError(
                f"the Kubernetes API at {self._api_url} did not scale {self._name}: {error!r}",
                where="pool.scaler.kubernetes",
                fix="Check that the head's pod reaches the API and has its account's token",
            ) from error

    async def _patch(self, client: httpx.AsyncClient, path: str, change: Mapping[str, Any]) -> None:
        kind = {"Content-Type": "application/merge-patch+json"}
        _decode(await client.patch(path, json=change, headers=kind))


def _decode(answer: httpx.Response) -> dict[str, Any]:
    """Return the object in an answer; raise MeshError with the message of a failure."""
    if answer.is_success:
        found: dict[str, Any] = answer.json()
        return found
    try:
        message = answer.json()["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text.strip()[:ERROR_CHARS] or answer.reason_phrase
    fixes = {
        401: "The head's pod needs the token of its account (components/scaler)",
        403: "Give the head's account the rights of compose/kubernetes/components/scaler",
        404: "Correct pool.scaler.kubernetes, or create the workload",
    }
    raise MeshError(
        f"Kubernetes answered {answer.status_code} to {answer.request.url.path}: {message}",
        where="pool.scaler.kubernetes",
        fix=fixes.get(answer.status_code, "The launcher repeats the request"),
    )
