"""Node for pods made of Docker containers, which applies manifests as the kubelet does.

Not supported, because Docker has no equivalent: user namespaces of single pods, placement of nodes
(affinity, spreading), CPU requests.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.kubernetes.rendering import SOURCE, Object, expand_arguments, select_kind
from tests.load import scaled

COMMAND_S = 120.0
SUBNET = "10.213.77.0/24"
FIRST_HOST = 16  # first address for pods in the subnet; the engine takes the first one of all
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
PROBE = """
import sys, urllib.request, urllib.error
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2])).read().decode())
except urllib.error.HTTPError as error:
    sys.exit(f"{error.code} {error.read().decode()}")
except OSError as error:
    sys.exit(str(error))
"""


class PodFailed(RuntimeError):
    """Error for a pod in a state that its cluster reports as an error, with its last output."""


def run(*command: str, timeout: float = COMMAND_S) -> str:
    """Return the output of a command; RuntimeError with it if the command fails."""
    found = subprocess.run(command, capture_output=True, text=True, timeout=scaled(timeout))
    if found.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {found.stderr or found.stdout}")
    return found.stdout


@dataclass
class Pod:
    """Pod with its name, address, template and volumes."""

    name: str
    address: str
    template: Object
    mounts: dict[str, list[str]]  # arguments of docker run by the volume's name
    directory: Path

    def container(self, name: str) -> str:
        return f"{self.name}.{name}"

    @property
    def main(self) -> Object:
        """Return the container that is not an init container."""
        [found] = self.template["spec"]["containers"]
        return dict(found)


@dataclass
class Node:
    """Node that runs the pods of a namespace's objects, with `image` in place of every named
    image.
    """

    objects: list[Object]
    state: Path
    image: str
    name: str = "meshrl-pods"
    _pods: list[Pod] = field(default_factory=list)
    _started: int = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[Node]:
        """Provide the network; remove it and all pods at the end."""
        run("docker", "network", "create", "--subnet", SUBNET, self.name)
        try:
            yield self
        finally:
            for pod in list(self._pods):
                self.remove(pod)
            run("docker", "network", "rm", self.name)

    def pod(self, name: str, template: Object, claims: dict[str, Path] | None = None) -> Pod:
        """Create a pod with an address of its own, without starting its containers.

        `claims` are the directories of the volumes of its claims, which outlive the pod.
        """
        self._started += 1
        address = f"{SUBNET.rpartition('.')[0]}.{FIRST_HOST + self._started}"
        name = f"{name}-{self._started}"
        directory = self.state / name
        directory.mkdir(parents=True)
        pod = Pod(name, address, template, {}, directory)
        group = str(template["spec"]["securityContext"]["fsGroup"])
        for volume in template["spec"]["volumes"]:
            pod.mounts[volume["name"]] = self._volume(volume, directory, group)
        for claim, path in (claims or {}).items():
            _for_group(path, group, 0o2775)  # an empty file system of root's, given to the group
            pod.mounts[claim] = [f"type=bind,source={path}"]
        self._pods.append(pod)
        return pod

    def start(self, pod: Pod) -> None:
        """Run the init containers in sequence to their end, then start the main container."""
        for container in pod.template["spec"].get("initContainers", ()):
            self._run(pod, container)
            code = int(run("docker", "wait", pod.container(container["name"]), timeout=600))
            if code:
                raise PodFailed(
                    f"{container['name']} ended with {code}: {self.log(pod, container)}"
                )
        self._run(pod, pod.main)

    def await_ready(self, pod: Pod) -> float:
        """Poll the probes at their periods until the pod is ready; return the seconds.

        PodFailed if the kubelet would have ended the pod.
        """
        started_s = time.monotonic()
        self._await(pod, "startupProbe")
        self._await(pod, "readinessProbe", patience=240)
        self._await(pod, "livenessProbe")
        return time.monotonic() - started_s

    def run_probe(self, pod: Pod, probe: str) -> str:
        """Return a probe's page; RuntimeError if it reports a problem."""
        asked = pod.main[probe]
        ports = {one["name"]: one["containerPort"] for one in pod.main["ports"]}
        where = f"http://{pod.address}:{ports[asked['httpGet']['port']]}{asked['httpGet']['path']}"
        return self.fetch_page(where, asked["timeoutSeconds"])

    def fetch_page(self, where: str, timeout: float = 5.0) -> str:
        """Return a page, requested from the node's own network."""
        enter = shlex.split(os.environ.get("MESHRL_ENGINE_ENTER", ""))
        return run(*enter, sys.executable, "-c", PROBE, where, str(timeout))

    def end(self, pod: Pod) -> tuple[int, float]:
        """Send SIGTERM, and SIGKILL after the grace period; return the main container's exit code
        and seconds.

        Afterwards the pod is removed with its volumes, except those of claims.
        """
        name = pod.container(pod.main["name"])
        grace = pod.template["spec"].get("terminationGracePeriodSeconds", 30)
        started_s = time.monotonic()
        run("docker", "stop", "--time", str(grace), name, timeout=grace + COMMAND_S)
        took = time.monotonic() - started_s
        code = self.get_exit_code(pod)
        self.remove(pod)
        return code, took

    def get_exit_code(self, pod: Pod) -> int:
        """Return the main container's exit code."""
        name = pod.container(pod.main["name"])
        return int(run("docker", "inspect", "--format", "{{.State.ExitCode}}", name))

    def is_running(self, pod: Pod) -> bool:
        """Return True if the main container is running."""
        name = pod.container(pod.main["name"])
        return run("docker", "inspect", "--format", "{{.State.Running}}", name).strip() == "true"

    def restarts(self, pod: Pod) -> int:
        """Return the number of restarts of the main container."""
        name = pod.container(pod.main["name"])
        return int(run("docker", "inspect", "--format", "{{.RestartCount}}", name))

    def log(self, pod: Pod, container: Object | None = None, lines: int = 40) -> str:
        """Return the last lines of a container's log."""
        name = pod.container((container or pod.main)["name"])
        found = subprocess.run(
            ["docker", "logs", "--tail", str(lines), name],
            capture_output=True,
            text=True,
            timeout=scaled(COMMAND_S),
        )
        return found.stdout + found.stderr

    def execute(self, pod: Pod, *words: str) -> str:
        """Run a command in the main container, as `kubectl exec` does."""
        return run("docker", "exec", pod.container(pod.main["name"]), *words)

    def remove(self, pod: Pod) -> None:
        """Kill a pod and remove its containers; its logs stay beside its directory."""
        all_of = [*pod.template["spec"].get("initContainers", ()), pod.main]
        for container in all_of:
            name = pod.container(container["name"])
            with contextlib.suppress(RuntimeError):
                kept = pod.directory.parent / f"{pod.directory.name}.{container['name']}.log"
                kept.write_text(self.log(pod, container, 100_000))
                run("docker", "rm", "--force", "--volumes", name)
        shutil.rmtree(pod.directory)
        self._pods.remove(pod)

    def _volume(self, volume: Object, directory: Path, group: str) -> list[str]:
        """Return the arguments of `docker run --mount`, without the target."""
        path = directory / volume["name"]
        if "secret" in volume:
            [secret] = [
                found
                for found in select_kind(self.objects, "Secret")
                if found["metadata"]["name"] == volume["secret"]["secretName"]
            ]
            # As the kubelet does: links to a directory, so that all files change at once.
            (path / "..data").mkdir(parents=True)
            for key, value in secret["data"].items():
                file = path / "..data" / key
                file.write_bytes(base64.b64decode(value))
                _for_group(file, group, volume["secret"]["defaultMode"])
                (path / key).symlink_to(Path("..data", key))
            _for_group(path / "..data", group, 0o2755)
            _for_group(path, group, 0o3777)
            return [f"type=bind,source={path}"]
        if "configMap" in volume:
            [given] = [
                found
                for found in select_kind(self.objects, "ConfigMap")
                if found["metadata"]["name"] == volume["configMap"]["name"]
            ]
            path.mkdir()
            for key, text in given["data"].items():
                (path / key).write_text(text)
            return [f"type=bind,source={path}"]
        if volume["emptyDir"].get("medium") == "Memory":
            size = _bytes(volume["emptyDir"]["sizeLimit"])
            return ["type=tmpfs", f"tmpfs-size={size}", "tmpfs-mode=1777"]
        path.mkdir()
        _for_group(path, group, 0o2777)
        return [f"type=bind,source={path}"]

    def _run(self, pod: Pod, container: Object) -> None:
        spec = pod.template["spec"]
        whole, own = spec["securityContext"], container["securityContext"]
        again = spec.get("restartPolicy", "Always") == "Always"
        words = [
            "docker", "run", "--detach", "--init=false", "--no-healthcheck",
            "--name", pod.container(container["name"]),
            "--hostname", pod.name, "--network", self.name, "--ip", pod.address,
            "--user", f"{whole['runAsUser']}:{whole['runAsGroup']}",
            "--group-add", str(whole["fsGroup"]),
            "--restart", "always" if again else "no",
            "--memory", str(_bytes(container["resources"]["limits"]["memory"])),
        ]  # fmt: skip
        for name in self._names(pod):
            words += ["--network-alias", name]
        words += ["--read-only"] if own["readOnlyRootFilesystem"] else []
        words += [] if own["allowPrivilegeEscalation"] else ["--security-opt=no-new-privileges"]
        for capability in own["capabilities"]["drop"]:
            words += ["--cap-drop", capability]
        profile = own.get("seccompProfile", whole["seccompProfile"])
        if profile["type"] == "Localhost":
            words.append(f"--security-opt=seccomp={SOURCE.parent / 'seccomp.json'}")
        if own.get("procMount") == "Unmasked":
            words.append("--security-opt=systempaths=unconfined")
        for one in container.get("env", ()):
            value = one.get("value", pod.address)  # the only field that the manifests use
            words += ["--env", f"{one['name']}={value}"]
        for mount in container["volumeMounts"]:
            parts = [*pod.mounts[mount["name"]], f"target={mount['mountPath']}"]
            parts += ["readonly"] if mount.get("readOnly") else []
            words += ["--mount", ",".join(parts)]
        run(*words, self.image, *expand_arguments(container, {"POD_IP": pod.address}))

    def _names(self, pod: Pod) -> list[str]:
        """Return the names of the services that lead to this pod."""
        labels = pod.template["metadata"]["labels"]
        return [
            service["metadata"]["name"]
            for service in select_kind(self.objects, "Service")
            if service["spec"]["selector"].items() <= labels.items()
        ]

    def _await(self, pod: Pod, probe: str, patience: int = 0) -> None:
        asked = pod.main[probe]
        left = patience or asked.get("failureThreshold", 3)
        while True:
            try:
                self.run_probe(pod, probe)
            except RuntimeError as error:
                left -= 1
                if not left:
                    said = f"{error}\n{self.log(pod)}"
                    raise PodFailed(f"{pod.name}: its {probe} fails: {said}") from None
                time.sleep(asked["periodSeconds"])
            else:
                return


def _for_group(path: Path, group: str, mode: int) -> None:
    os.chown(path, 0, int(group))
    path.chmod(mode)


def _bytes(amount: str) -> int:
    return int(amount[:-2]) * UNITS[amount[-2:]]


def parse_output(text: str) -> Any:
    """Parse the JSON output of a command."""
    return json.loads(text)
