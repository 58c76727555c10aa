"""Mesh in the foreground, and one complete session of it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.common.base.errors import (
    ConfigError,
    DeadlineExceeded,
    MeshError,
    NotAllowed,
    NotFound,
    PeerLost,
    Refused,
    StateUnavailable,
    StorageFull,
)
from meshrl.common.base.host.listen_addresses import AddressInUse
from meshrl.common.mesh.access.admitted_hosts import AdmittedHost
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.telemetry.metrics_endpoint import MetricsEndpoint
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.checks import address_checks, budget_checks
from meshrl.launch.directory_lock import DirectoryLock, DirectoryLocked
from meshrl.launch.foreground import (
    EXIT_FATAL,
    EXIT_OK,
    EXIT_RETRY,
    choose_exit_status,
    report_error_after_stop,
    run_foreground,
    start_unless_stopped,
)
from meshrl.launch.redis.access.redis_network import RedisNetwork
from meshrl.runs.outcome import EXIT_FINISHED, EXIT_NOT_LEARNED
from tests.load import scaled

WITHIN_S = 30.0


@pytest.mark.parametrize("kind", [ConfigError, NotAllowed, NotFound, Refused])
def test_user_error_exits_as_fatal(kind: type[MeshError]) -> None:
    assert choose_exit_status(kind("no")) == EXIT_FATAL


@pytest.mark.parametrize(
    "kind", [DeadlineExceeded, PeerLost, StateUnavailable, StorageFull, DirectoryLocked]
)
def test_transient_error_exits_as_retry(kind: type[MeshError]) -> None:
    assert choose_exit_status(kind("not now")) == EXIT_RETRY


def test_taken_port_exits_as_retry_and_a_too_small_range_as_fatal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            address_checks.require_free_ports(f"tcp://127.0.0.1:{port}-{port}", 1)
        assert choose_exit_status(caught.value) == EXIT_RETRY
    with pytest.raises(ConfigError) as caught:
        address_checks.require_free_ports(f"tcp://127.0.0.1:{port}-{port}", 12)
    assert choose_exit_status(caught.value) == EXIT_FATAL
    with pytest.raises(ConfigError) as caught:
        address_checks.resolve_listen_endpoint("no-such-host.invalid")
    assert choose_exit_status(caught.value) == EXIT_RETRY


@pytest.mark.parametrize("text", ["abc", "-5", "1e9", ""])
def test_byte_budget_that_is_no_number_is_rejected_before_a_start(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHRL_DISK_BYTES", "8000000000")
    budget_checks.require_valid_budgets()
    monkeypatch.setenv("MESHRL_DISK_BYTES", text)
    with pytest.raises(ConfigError, match=r"is not a number of bytes.*\$MESHRL_DISK_BYTES"):
        budget_checks.require_valid_budgets()


def test_error_is_printed_and_sets_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = DirectoryLock(MeshPaths(tmp_path)), DirectoryLock(MeshPaths(tmp_path))
    first.acquire()

    def acquire_lock() -> int:
        second.acquire()
        return EXIT_OK

    assert run_foreground(acquire_lock) == EXIT_RETRY
    assert "error: a mesh already runs in" in capsys.readouterr().err
    first.release()
    assert run_foreground(acquire_lock) == EXIT_OK
    second.release()


@pytest.mark.parametrize(
    ("number", "status"), [(errno.EROFS, EXIT_FATAL), (errno.ENOSPC, EXIT_RETRY)]
)
def test_unwritable_root_exits_as_fatal(
    number: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_to_root() -> int:
        raise OSError(number, os.strerror(number), "/root")

    assert run_foreground(write_to_root) == status
    assert ("--root" in capsys.readouterr().err) == (status == EXIT_FATAL)


async def test_stop_signal_cancels_a_start() -> None:
    stop, undone = asyncio.Event(), []

    async def start() -> None:
        try:
            stop.set()
            await asyncio.sleep(3600)
        finally:
            undone.append(True)

    assert not await start_unless_stopped(start(), stop) and undone
    assert await start_unless_stopped(asyncio.sleep(0), asyncio.Event())

    async def fail() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        await start_unless_stopped(fail(), asyncio.Event())


async def test_stop_signal_hides_later_errors_of_the_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop = asyncio.Event()

    async def start() -> None:
        try:
            stop.set()
            await asyncio.sleep(3600)
        finally:
            raise NotFound("the fork server is gone")

    assert not await start_unless_stopped(start(), stop)
    assert "the fork server is gone" in capsys.readouterr().err
    assert report_error_after_stop(Refused("no"), stop) == EXIT_OK
    with pytest.raises(Refused):
        report_error_after_stop(Refused("no"), asyncio.Event())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_before_the_start_ends_the_mesh_in_order(number: signal.Signals) -> None:
    def reject_signal(*_: object) -> None:
        raise AssertionError("nobody listens to it")

    before = signal.signal(number, reject_signal)
    try:

        def run_until_signal() -> int:
            async def send_signal() -> None:
                os.kill(os.getpid(), number)
                await asyncio.sleep(WITHIN_S)

            asyncio.run(send_signal())
            return EXIT_FATAL

        with pytest.raises(SystemExit) as caught:
            run_foreground(run_until_signal)
        assert caught.value.code == EXIT_OK
        assert signal.getsignal(number) is reject_signal
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("what", ["metrics", "redis"])
def test_taken_port_of_any_listener_exits_as_retry(what: str, tmp_path: Path) -> None:
    def listen() -> None:
        if what == "metrics":
            MetricsEndpoint(f"127.0.0.1:{port}", "", SystemHost(), {})
        else:
            RedisNetwork(AdmittedHost("head-000001", {}, 0.0), f"127.0.0.1:{port}").make_listener(
                tmp_path, None
            )

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse) as caught:
            listen()
    assert choose_exit_status(caught.value) == EXIT_RETRY
    with pytest.raises(ConfigError) as elsewhere:
        address_checks.require_metrics_ports(
            "192.0.2.1:7000-7001", 1
        )  # an address of no host (RFC 5737)
    assert choose_exit_status(elsewhere.value) == EXIT_FATAL


ROOT = Path(__file__).parents[4]
STEPS = 20
SMALL = {
    "budget.steps": STEPS,
    "training.checkpoint_every": 1,  # a checkpoint exists as soon as a step appears
    "warm_start.steps": 2,
    "algorithm.groups_per_step": 2,
    "algorithm.group_size": 4,
    "rollout.max_tokens": 64,
    "evaluation.problems": 4,
    "evaluation.every": 0,
    "mesh.workers": 2,
}


def meshrl(*words: str, where: Path) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "MESHRL_REDIS_URL"}
    return subprocess.Popen(
        [sys.executable, "-m", "meshrl", *words],
        cwd=where,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(program: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = program.communicate(timeout=scaled(200))
    return program.returncode, said


@pytest.mark.deep
@pytest.mark.timeout(560)
def test_run_is_stopped_resumed_without_redis_audited_and_extended(tmp_path: Path) -> None:
    settings = [f"--set={key}={value}" for key, value in {**SMALL, "cache": '""'}.items()]
    job = str(ROOT / "examples/calculator.toml")
    first = meshrl("run", job, *settings, where=tmp_path)
    assert first.stdout is not None
    lines = []
    for line in first.stdout:
        lines.append(line)
        if "] step " in line:
            first.send_signal(signal.SIGINT)
            break
    code, said = finish(first)
    assert code == 130, "".join(lines) + said
    assert "meshrl resume runs/calculator" in said

    run_dir = tmp_path / "runs/calculator"
    assert finish(meshrl("audit", "runs/calculator", where=tmp_path))[0] == 0
    shutil.rmtree(run_dir / "mesh/redis")
    code, said = finish(meshrl("resume", "runs/calculator", where=tmp_path))
    assert code in (EXIT_FINISHED, EXIT_NOT_LEARNED), said
    assert "restarts from step-000-" in said

    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["phase"], summary["steps"]) == ("finished", STEPS)
    assert (summary["lost"], summary["trained_twice"]) == (0, 0)
    assert summary["held_out"]["before"] and summary["held_out"]["after"]
    assert [json.loads(row)["step"] for row in (run_dir / "metrics.jsonl").open()] == list(
        range(1, STEPS + 1)
    )
    assert "<svg" in (run_dir / "report.html").read_text()
    assert (run_dir / "model/config.json").is_file()
    assert finish(meshrl("audit", "runs/calculator", where=tmp_path))[0] == 0

    code, said = finish(meshrl("resume", "runs/calculator", where=tmp_path))
    assert code == 1 and "--set budget.steps=N" in said

    more = ["--set", f"budget.steps={STEPS + 2}", "--set", "optimizer.adamw_lr=0.0005"]
    code, said = finish(meshrl("resume", "runs/calculator", *more, where=tmp_path))
    assert code in (EXIT_FINISHED, EXIT_NOT_LEARNED), said
    assert f"optimizer.adamw_lr: 0.001 -> 0.0005, from step {STEPS + 1} on" in said
    extended = json.loads((run_dir / "summary.json").read_text())
    assert (extended["phase"], extended["steps"]) == ("finished", STEPS + 2)
    tags = {e["tag"]: e["step"] for e in extended["evaluations"]}
    assert tags == {"before": 0, f"step-{STEPS}": STEPS, "after": STEPS + 2}
    assert (extended["lost"], extended["trained_twice"]) == (0, 0)
    kept = json.loads((run_dir / "job.json").read_text())
    assert kept["changes"][0]["was"] == {"budget.steps": STEPS, "optimizer.adamw_lr": 0.001}
    assert kept["document"]["optimizer"]["adamw_lr"] == 0.0005
