"""Scenario in which a mesh of pods trains compose/kubernetes/submit while pods are replaced.

Workers, a sandbox and the head are each stopped as the kubelet stops them, and created again at
other addresses.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.deploy.kubernetes import rendering
from tests.deploy.kubernetes.kubelet import Node, Pod, PodFailed, parse_output, run
from tests.deploy.kubernetes.rendering import SECRETS, Object, list_templates
from tests.load import scaled

JOB = "game"
HEAD, WORKER, SANDBOX, CLIENT = "meshrl-head", "meshrl-worker", "meshrl-sandbox", "meshrl-game"
WORKERS = 2  # number of pods in the overlay that the job takes
APART = 5  # steps between two disturbances
OVER_S = 1200.0
LOOK_S = 1.0


@dataclass
class ScenarioResult:
    """Result: the job's steps, `lost` and `trained_twice` of its accounting, and times in seconds.
    The times are until all pods were ready, and of the exit of each stopped pod.
    """

    ready_s: float
    wall_s: float
    phase: str
    steps: int
    lost: int
    trained_twice: int
    ends: dict[str, list[float]]  # by pod: exit code, seconds
    restarts: int  # of containers that exited without a stop
    hosts: int  # registered hosts at the end

    @property
    def is_good(self) -> bool:
        """True if no trajectory was lost and every pod exited in order."""
        codes = [int(code) for code, _ in self.ends.values()]
        return self.phase == "finished" and not (self.lost or self.trained_twice or any(codes))


@dataclass
class Mesh:
    """Pods of one overlay on one node."""

    node: Node
    pods: dict[str, Object]
    disk: Path
    restarts: int = 0

    def create(self, workload: str) -> Pod:
        """Create and start a new pod of a workload."""
        claims = {"state": self.disk} if workload == HEAD else None
        pod = self.node.pod(workload, self.pods[workload], claims)
        self.node.start(pod)
        return pod

    def end(self, pod: Pod) -> list[float]:
        """Stop a pod; return its exit code and the seconds until it exited."""
        self.restarts += self.node.restarts(pod)
        code, took = self.node.end(pod)
        return [code, round(took, 1)]

    def step(self, head: Pod) -> int:
        """Return the job's steps by its head's metrics; 0 before the job starts."""
        try:
            page = self.node.fetch_page(f"http://{head.address}:9400/metrics")
        except RuntimeError:
            return 0  # the head starts or stops
        for line in page.splitlines():
            if line.startswith("meshrl_job_steps{") and f'job="{JOB}"' in line:
                return int(float(line.rpartition(" ")[2]))
        return 0

    def await_step(self, head: Pod, client: Pod, step: int) -> int:
        """Wait until the job has made this many steps; PodFailed if it ends before."""
        until = time.monotonic() + scaled(OVER_S)
        while (done := self.step(head)) < step:
            if not self.node.is_running(client) or time.monotonic() > until:
                raise PodFailed(f"{JOB} is at step {done}, not {step}: {self.node.log(client)}")
            time.sleep(LOOK_S)
        return done


def make_secrets(objects: Path, command: str) -> None:
    """Replace the stub files of a test by the output of `meshrl secrets`."""
    files = objects / "secrets/files"
    for name in SECRETS:
        (files / name).unlink()
    files.rmdir()
    run(command, "secrets", str(files), "--head", HEAD)


def play(node: Node, disk: Path, steps: int) -> ScenarioResult:
    """Train, replace pods, and count."""
    started_s = time.monotonic()
    mesh = Mesh(node, dict(list_templates(node.objects)), disk)
    for container in mesh.pods[CLIENT]["spec"]["initContainers"]:
        if container["args"][0] == "submit":
            container["args"].append(f"--set=budget.steps={steps}")
    head = mesh.create(HEAD)
    node.await_ready(head)
    workers = [mesh.create(WORKER) for _ in range(WORKERS)]
    sandbox = mesh.create(SANDBOX)
    for pod in (*workers, sandbox):
        node.await_ready(pod)
    ready_s = time.monotonic() - started_s
    client = mesh.create(CLIENT)
    ends: dict[str, list[float]] = {}
    done = mesh.await_step(head, client, 2)
    for index in range(WORKERS):
        ends[f"{WORKER}-{index}"] = mesh.end(workers[index])
        workers[index] = mesh.create(WORKER)
        node.await_ready(workers[index])
        done = mesh.await_step(head, client, done + APART)
    ends[SANDBOX] = mesh.end(sandbox)
    sandbox = mesh.create(SANDBOX)
    node.await_ready(sandbox)
    done = mesh.await_step(head, client, done + APART)
    before = head.address
    ends[HEAD] = mesh.end(head)
    head = mesh.create(HEAD)
    if head.address == before:
        raise PodFailed("the head is where it was")
    node.await_ready(head)
    mesh.await_step(head, client, done + 1)
    code = int(run("docker", "wait", client.container("wait"), timeout=OVER_S))
    if code:
        raise PodFailed(f"the job's pod ended with {code}: {node.log(client)}")
    status = parse_output(node.execute(head, "meshrl", "status", "--json"))
    [job] = [one for one in status["jobs"] if one["id"] == JOB]
    run_of = f"/var/lib/meshrl/head/runs/{JOB}"
    count = parse_output(node.execute(head, "meshrl", "audit", run_of, "--json"))
    hosts = parse_output(node.execute(head, "meshrl", "hosts", "--json"))
    wall_s = time.monotonic() - started_s
    return ScenarioResult(
        round(ready_s, 1),
        round(wall_s, 1),
        job["phase"],
        job["steps_done"],
        count["lost"],
        count["trained_twice"],
        ends,
        mesh.restarts + sum(map(node.restarts, (head, sandbox, *workers))),
        len(hosts),
    )


def run_scenario(scratch: Path, image: str, command: str, steps: int) -> ScenarioResult:
    """Run the overlay `cpu` and the Job with `steps` steps and fresh secrets."""
    directory = rendering.copy_overlays(scratch / "kubernetes")
    make_secrets(directory, command)
    objects = rendering.render_all(directory)
    disk = scratch / "disk"
    disk.mkdir()
    with Node(objects["cpu"] + objects["submit"], scratch / "pods", image).open() as node:
        return play(node, disk, steps)


def format_result(found: ScenarioResult) -> str:
    """Return the result as one line of JSON."""
    return json.dumps(asdict(found) | {"good": found.is_good})
