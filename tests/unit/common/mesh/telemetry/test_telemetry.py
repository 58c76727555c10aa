"""Logs, stopwatches, watchdogs, and monitoring answers while the event loop is blocked."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from meshrl.common.base.errors import ConfigError, Refused
from meshrl.common.base.host.listen_addresses import parse_listen_address
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.lease import LEASE_LOST_EXIT_STATUS
from meshrl.common.mesh.telemetry import stopwatch
from meshrl.common.mesh.telemetry.metrics_endpoint import (
    MAX_CLIENTS,
    MetricsEndpoint,
    make_health_page,
)
from meshrl.common.mesh.telemetry.stopwatch import NULL_STOPWATCH, Stopwatch
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.common.state import registry
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.load import scaled
from tests.unit.common.mesh.runtime.talking import Join, Talker

PROGRAM = """
import asyncio, sys, threading
from meshrl.common.mesh.telemetry.logs import Telemetry, log_to_stderr
from meshrl.common.mesh.telemetry.tracing import adopt_trace

log_to_stderr(*sys.argv[1:])
log = Telemetry(*sys.argv[1:]).log

async def answers(trace):
    adopt_trace(trace)
    await asyncio.sleep(0)
    log.info("answers")

async def main():
    log.info("starts")
    traces = [f"00-{digit * 32}-0123456789abcdef-01" for digit in "ab"]
    await asyncio.gather(*map(answers, traces))
    thread = threading.Thread(target=log.info, args=("on a thread",))
    thread.start()
    thread.join()

asyncio.run(main())
"""
HUNG = """
import asyncio, sys, time
from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import Mesh, run_service
from meshrl.common.mesh.runtime.dependencies import LeaseTerms, MeshDependencies
from meshrl.common.base.random import Random
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport

def stand_still(seconds):
    time.sleep(seconds)

STALL_S = float(sys.argv[1])

async def main():
    clock = SystemClock()
    state, random = open_simulated_state(clock), Random.from_os_entropy()
    dependencies = MeshDependencies(state, ZmqTransport(), clock, random, SystemHost())
    terms = LeaseTerms(renew_interval_s=0.1, stall_limit_s=STALL_S)
    mesh = Mesh("hung", "test", dependencies, terms=terms)
    await mesh.join(None)
    with mesh.loading():
        stand_still(1.5 * STALL_S)
    print("loaded", flush=True)
    stand_still(3600)

run_service(main)
"""
ROOT = Path(__file__).parents[5]
REPLY_TIMEOUT_S = 30.0  # for a reply on a busy host
LABELS = {"service": "monitored/0", "kind": "monitored", "job": "j"}
same_worker = pytest.mark.group("monitored")


def run_and_parse_log(*process_labels: str) -> list[dict[str, str]]:
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, *process_labels], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in completed.stderr.splitlines()]


def test_every_log_line_has_the_job_and_the_trace_of_the_call() -> None:
    log_lines = run_and_parse_log("engine/g1.0", "calculator")
    assert {(line["service"], line["job"]) for line in log_lines} == {("engine/g1.0", "calculator")}
    assert [line["event"] for line in log_lines] == ["starts", "answers", "answers", "on a thread"]
    assert [line.get("trace") for line in log_lines] == [None, "a" * 32, "b" * 32, None]
    assert not any("job" in line for line in run_and_parse_log("planner/0"))


def list_part_pairs(watch: Stopwatch) -> list[tuple[str, float]]:
    flat = watch.list_parts()
    return list(zip(flat[::2], flat[1::2], strict=True))  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.001, 5.0)), max_size=20))
def test_stopwatch_parts_are_ordered_and_cover_the_time(
    transitions: list[tuple[str, float]],
) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        watch, start_s = Stopwatch(clock, "begin"), clock.monotonic()
        for state, seconds in transitions:
            watch.enter(state)
            await clock.sleep(seconds)
        lasted_ms = 1000 * (clock.monotonic() - start_s)
        parts = list_part_pairs(watch)
        assert sum(ms for _, ms in parts) == pytest.approx(lasted_ms, abs=0.001 * len(parts) + 1e-6)
        part_names = [state for state, _ in parts]
        entered = [state for state, _ in transitions]
        assert part_names == [s for i, s in enumerate(entered) if i == 0 or s != entered[i - 1]]

    run_virtual(main)


def test_time_after_the_last_stopwatch_part_is_added_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopwatch, "MAX_PARTS", 2)

    async def main(clock: VirtualClock, random: Random) -> None:
        watch = Stopwatch(clock, "a")
        for state in ("b", "c", "d", "e"):
            await clock.sleep(1.0)
            watch.enter(state)
        await clock.sleep(1.0)
        assert list_part_pairs(watch) == [("a", 1000.0), ("b", 1000.0), ("c", 3000.0)]

    run_virtual(main)


def test_null_stopwatch_accepts_states() -> None:
    NULL_STOPWATCH.enter("queue")
    assert not hasattr(NULL_STOPWATCH, "list_parts")


def test_blocked_loop_dumps_its_stacks_and_exits() -> None:
    command = [sys.executable, "-c", HUNG, str(min(10.0, scaled(2.0)))]
    completed = subprocess.run(
        command, capture_output=True, text=True, timeout=scaled(100), check=False
    )
    assert completed.returncode == LEASE_LOST_EXIT_STATUS
    assert completed.stdout == "loaded\n"
    assert "the event loop has not run for" in completed.stderr
    assert "in stand_still" in completed.stderr


async def test_ready_is_published_without_waiting_for_the_renewal(join: Join) -> None:
    mesh = await join("a", Talker(), renew_interval_s=60.0, ttl_s=120.0)
    mesh.ready = True
    await mesh.publish()
    entry = await registry.lookup(mesh.state, "a")
    assert entry is not None and entry.stats["ready"] is True


async def test_name_has_one_owner(join: Join) -> None:
    first = await join("a", Talker(), ttl_s=30.0)
    with pytest.raises(Refused):
        await join("a", Talker(), ttl_s=0.1)
    await first.leave()
    second = await join("a", Talker())
    assert second.token > first.token > 0


class Monitored:
    def __init__(self, where: str) -> None:
        self.program = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("monitored.py")), where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.program.stdout is not None
        first_line = self.program.stdout.readline()
        self.address: str = json.loads(first_line)["address"]

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(
                self.address + path, timeout=scaled(REPLY_TIMEOUT_S)
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def until(self, path: str, status: int) -> str:
        end = time.monotonic() + scaled(REPLY_TIMEOUT_S)
        while (answer := self.get(path))[0] != status:
            assert time.monotonic() < end, answer
            time.sleep(0.01)
        return answer[1]

    def unblock_loop(self) -> None:
        """Unblock the loop that SIGUSR1 blocked."""
        assert self.program.stdin is not None
        self.program.stdin.write(b"\n")
        self.program.stdin.flush()

    def metrics(self) -> dict[str, float]:
        """Return metrics by name, or by `name of` for tables."""
        metrics = {}
        for family in text_string_to_metric_families(self.get("/metrics")[1]):
            for sample in family.samples:
                assert LABELS.items() <= sample.labels.items(), sample
                metrics[f"{sample.name} {sample.labels.get('of', '')}".strip()] = sample.value
        return metrics


@pytest.fixture(scope="module")
def monitored() -> Iterator[Monitored]:
    service = Monitored("127.0.0.1:*")
    yield service
    service.program.terminate()
    assert service.program.wait(scaled(REPLY_TIMEOUT_S)) == 0


@same_worker
def test_metrics_come_from_kernel_service_and_runtime(monitored: Monitored) -> None:
    metrics = monitored.metrics()
    assert metrics["process_cpu_seconds_total"] > 0.1
    assert metrics["process_resident_memory_bytes"] > 1e7
    assert metrics["meshrl_busy_s"] == 2.5
    assert metrics["meshrl_core"] == 1.0
    assert metrics["meshrl_requests rollout/0"] == 4.0
    assert metrics["meshrl_answers_total"] == 3.0
    assert "meshrl_path" not in metrics and "meshrl_answers" not in metrics
    while monitored.metrics()["meshrl_loop_lag_seconds"] > 0.4:  # a busy host may block the loop
        time.sleep(0.01)


@same_worker
def test_liveness_reports_a_blocked_loop(monitored: Monitored) -> None:
    assert monitored.until("/livez", 200) == "ok\n"
    monitored.program.send_signal(signal.SIGUSR1)
    reason = monitored.until("/livez", 503)
    assert "the event loop has not run for" in reason
    assert monitored.metrics()["meshrl_loop_lag_seconds"] > 0.4
    assert monitored.metrics()["meshrl_live"] == 0.0
    monitored.unblock_loop()
    assert monitored.until("/livez", 200) == "ok\n"  # the loop runs again


@same_worker
def test_readiness_follows_the_service(monitored: Monitored) -> None:
    monitored.until("/livez", 200)
    assert monitored.until("/readyz", 503) == "the service is not ready for work\n"
    monitored.program.send_signal(signal.SIGUSR2)
    assert monitored.until("/readyz", 200) == "ok\n"


@same_worker
def test_unknown_path_lists_the_known_ones(monitored: Monitored) -> None:
    assert monitored.get("/health") == (404, "known paths: /metrics /livez /readyz\n")


@same_worker
def test_silent_clients_do_not_block_others(monitored: Monitored) -> None:
    host, _, port = monitored.address.removeprefix("http://").partition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(8)]
    assert monitored.until("/livez", 200) == "ok\n"
    for connection in silent:
        connection.close()


def test_metrics_endpoints_share_a_range_of_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        first_port = occupied.getsockname()[1]
        one = MetricsEndpoint(
            f"127.0.0.1:{first_port}-{first_port + 20}",
            "",
            SystemHost(),
            {"/": make_health_page(str)},
        )
        assert first_port < int(one.address.rpartition(":")[2]) <= first_port + 20
        one.close()
        with pytest.raises(ConfigError, match=r"no port .* wider range"):
            MetricsEndpoint(f"127.0.0.1:{first_port}", "", SystemHost(), {})


@pytest.mark.parametrize("advertise", ["tcp://worker-7:*", "tcp://worker-7", "worker-7:7000"])
def test_advertised_host_is_in_the_address(advertise: str) -> None:
    one = MetricsEndpoint("0.0.0.0:*", advertise, SystemHost(), {})
    assert re.fullmatch(r"http://worker-7:\d+", one.address)
    one.close()


def test_loopback_endpoint_ignores_the_advertised_host() -> None:
    one = MetricsEndpoint(
        "127.0.0.1:*", "tcp://worker-7:*", SystemHost(), {"/": make_health_page(str)}
    )
    with urllib.request.urlopen(one.address + "/", timeout=scaled(5.0)) as answer:
        assert answer.read() == b"ok\n"
    one.close()


@pytest.mark.parametrize("advertise", ["127.0.0.1", "tcp://127.0.0.1", "tcp://127.0.0.1:*"])
async def test_advertised_host_gets_the_bound_port(advertise: str) -> None:
    transport = ZmqTransport("tcp://127.0.0.1:*", advertise)
    assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", transport.address)
    await transport.close()


async def test_complete_endpoint_is_advertised_unchanged() -> None:
    transport = ZmqTransport("tcp://127.0.0.1:*", "tcp://[fe80::7]:7000")
    assert transport.address == "tcp://[fe80::7]:7000"
    await transport.close()


@pytest.mark.parametrize("where", ["9400", "here:", "here:a-b", "here:9-8", "here:70000"])
def test_invalid_listen_addresses_are_rejected(where: str) -> None:
    with pytest.raises(ConfigError, match="not a listen address"):
        parse_listen_address(where, "mesh.metrics")


def test_idle_clients_use_few_threads_and_do_not_block_others() -> None:
    endpoint = MetricsEndpoint(
        "127.0.0.1:*", "", SystemHost(), {"/livez": make_health_page(lambda: "")}
    )
    host, _, port = endpoint.address.removeprefix("http://").rpartition(":")
    before = threading.active_count()
    connections = []
    for _ in range(4 * MAX_CLIENTS):
        connections.append(
            socket.create_connection((host, int(port)), timeout=scaled(REPLY_TIMEOUT_S))
        )
        connections[-1].sendall(b"GET /livez HTTP/1.0\r\n")  # an unfinished request
    with urllib.request.urlopen(
        f"{endpoint.address}/livez", timeout=scaled(REPLY_TIMEOUT_S)
    ) as answer:
        assert answer.read() == b"ok\n"
    for closed_connection in connections[: 3 * MAX_CLIENTS]:
        with suppress(ConnectionResetError):
            assert closed_connection.recv(1) == b""
    assert threading.active_count() - before <= 2 * MAX_CLIENTS
    for connection in connections:
        connection.close()
    endpoint.close()
