"""Start of an SGLang server: its ports, the names of its GPUs, its progress and its limits."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, DeadlineExceeded
from meshrl.common.hardware.gpus.visibility import CUDA_ENV
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.engine.sglang import ports
from meshrl.services.engine.sglang.devices import VisibleDevices
from meshrl.services.engine.sglang.http_client import HttpClient
from meshrl.services.engine.sglang.launch_config import LaunchConfig, write_model_config
from meshrl.services.engine.sglang.ports import PortBlock
from meshrl.services.engine.sglang.server import SGLangServer
from meshrl.services.engine.sglang.start_progress import (
    StartLimits,
    StartProgress,
    compute_start_limits,
)
from tests.gpus.driver import Gpus
from tests.unit.common.generation.engines_under_test import TINY, ManualClock
from tests.unit.engine.sglang.test_secrets import create_interpreter

A, B, C = (f"GPU-{letter}0000000-0000-0000-0000-000000000000" for letter in "abc")
MIG = "MIG-10000000-0000-0000-0000-000000000000"


# -- ports ---------------------------------------------------------------------------------------


def test_two_servers_of_a_host_get_different_free_ports() -> None:
    first, second = PortBlock.reserve(), PortBlock.reserve()
    assert abs(first.http - second.http) >= ports.BLOCK_PORTS
    taken = (first.http, first.ranks, first.data_parallel, second.http, second.ranks)
    assert len(set(taken)) == 5 and max(taken) < 32768  # no program gets one by asking for any
    listeners = [socket.create_server(("127.0.0.1", port)) for port in taken]
    for held in listeners:
        held.close()
    first.release()
    second.release()
    again = PortBlock.reserve()
    assert again.http == first.http
    again.release()


def test_block_with_a_port_in_use_is_skipped() -> None:
    free = PortBlock.reserve()
    free.release()
    with socket.create_server(("127.0.0.1", free.http + 9)):
        other = PortBlock.reserve()
    assert other.http != free.http
    other.release()


def build_arguments(*options: str, ranks: int = 1) -> list[str]:
    launch = LaunchConfig(
        "python", Path("m"), 4, 64, options=options, tensor_parallel_size=ranks, device="cuda"
    )
    return launch.build_arguments(PortBlock(20000))


def test_server_gets_its_own_port_for_ranks() -> None:
    plain = build_arguments()
    assert plain[plain.index("--port") + 1] == "20000"
    assert plain[plain.index("--nccl-port") + 1] == "20001"
    assert "--dist-init-addr" not in plain
    # SGLang gives each data-parallel rank another port, and fails at a fixed one.
    assert "--nccl-port" not in build_arguments("--dp-size", "2")
    attention = build_arguments("--dp-size=2", "--enable-dp-attention")
    assert attention[attention.index("--dist-init-addr") + 1] == "127.0.0.1:20002"


def test_last_value_of_an_option_counts() -> None:
    launch = LaunchConfig("python", Path("m"), 4, 64)
    assert launch.stream_interval == 0
    for options in (("--stream-interval", "4"), ("--stream-interval=9", "--stream-interval=4")):
        assert LaunchConfig("p", Path("m"), 4, 64, options=options).stream_interval == 4


def test_overlapping_steps_are_not_disabled() -> None:
    assert "--disable-overlap-schedule" not in build_arguments()


# -- devices -------------------------------------------------------------------------------------

READ = """
import json, os
from meshrl.services.engine.sglang.devices import read_visible_devices
found = read_visible_devices(os.environ)
print(json.dumps([dict(found.environment), found.has_only_uuids]))
"""


def test_gpus_are_named_by_their_index_on_the_bus(gpus: Gpus) -> None:
    for uuid in (A, B, C):
        gpus.gpu(uuid)
    named = gpus.run(READ, **{CUDA_ENV: f"{C},{A}"})
    assert json.loads(named) == [
        {"CUDA_VISIBLE_DEVICES": "2,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        False,
    ]


def test_mig_instances_keep_their_uuids_without_custom_all_reduce(gpus: Gpus) -> None:
    gpus.gpu(A, mig=1)
    gpus.instance(A, MIG, 7)
    assert json.loads(gpus.run(READ, **{CUDA_ENV: MIG})) == [{}, True]
    launch = LaunchConfig(
        "p",
        Path("m"),
        4,
        64,
        device="cuda",
        devices=VisibleDevices({}, True),
        tensor_parallel_size=2,
    )
    assert "--disable-custom-all-reduce" in launch.build_arguments(PortBlock(20000))
    assert "--disable-custom-all-reduce" not in build_arguments(ranks=2)


def test_server_environment_names_the_gpus() -> None:
    devices = VisibleDevices({"CUDA_VISIBLE_DEVICES": "1"})
    launch = LaunchConfig("p", Path("m"), 4, 64, device="cuda", devices=devices)
    assert launch.build_environment()["CUDA_VISIBLE_DEVICES"] == "1"


# -- progress ------------------------------------------------------------------------------------

# Lines of SGLang 0.5.23, in the order of a start on GPUs.
LOG = (
    ("[2026-11-30 10:00:05 TP0] Init parallel begin.\n", "connecting its ranks"),
    ("[2026-11-30 10:00:09 TP0] Load weight begin. avail mem=139.10 GB\n", "creating its weights"),
    (
        "[2026-11-30 10:00:21 TP0] Load weight end. elapsed=12.01 s, type=Qwen3ForCausalLM\n",
        "allocating its cache",
    ),
    (
        "[2026-11-30 10:00:23 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 401\n",
        "preparing its kernels",
    ),
    (
        "[2026-11-30 10:00:25 TP0] Capture decode CUDA graph begin. backend=full, bs=[1, 2]\n",
        "capturing graphs",
    ),
    (
        "\rCapturing batches (bs=64 avail_mem=20.1 GB):   6%|6   | 2/36 [00:03<00:40,  1.1it/s]",
        "capturing graphs, 2 of 36",
    ),
    (
        "\rCapturing batches (bs=60 avail_mem=20.0 GB):  25%|##5 | 9/36 [00:05<00:10,  2.9it/s]\r",
        "capturing graphs, 9 of 36",
    ),
    (
        "[2026-11-30 10:00:40 TP0] Try DeepGEMM JIT Compiling for <GEMM> N=4096, K=4096\n",
        "compiling DeepGEMM kernels",
    ),
    (
        "[2026-11-30 10:00:50 TP0] Capture decode CUDA graph end. bs=[1, 2], elapsed=25.11 s\n",
        "starting its listener",
    ),
)


class Watched:
    """Start with a log, processes and a clock that a test advances."""

    def __init__(self, directory: Path, limits: StartLimits, log_bytes: int = 0) -> None:
        self.clock, self.log = ManualClock(), directory / "sglang.log"
        self.used_s, self.names = 0.0, {"python"}
        self.progress = StartProgress(self.clock, self.log, self.measure, limits, log_bytes)

    def measure(self) -> tuple[float, set[str]]:
        return self.used_s, self.names

    def pass_time(self, seconds: float, text: str = "") -> str:
        """Return why the start has failed after some seconds and log output."""
        self.clock.advance(seconds)
        with open(self.log, "a") as log:
            log.write(text)
        self.progress.observe()
        return self.progress.explain_failure()


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path, StartLimits(total_s=300.0, compile_s=900.0, stall_s=100.0))


def test_log_lines_become_progress(watched: Watched) -> None:
    assert watched.progress.text == "importing its modules"
    for line, text in LOG:
        assert not watched.pass_time(1.0, line)
        assert watched.progress.text == text
    assert watched.progress.output_bytes == sum(len(line.encode()) for line, _ in LOG)


def test_rotated_log_is_read_from_its_beginning(watched: Watched) -> None:
    watched.pass_time(1.0, LOG[0][0] * 3)
    watched.log.write_text("")
    watched.pass_time(1.0, LOG[1][0])
    assert watched.progress.text == LOG[1][1]


def test_log_of_an_earlier_start_is_no_progress(tmp_path: Path) -> None:
    (tmp_path / "sglang.log").write_text(earlier := LOG[-2][0])
    watched = Watched(tmp_path, StartLimits(total_s=300.0), len(earlier))
    assert not watched.pass_time(1.0, LOG[0][0])
    assert watched.progress.text == LOG[0][1] and watched.progress.deadline_s == 300.0


def test_stalled_start_fails_before_a_slow_one(watched: Watched) -> None:
    assert not watched.pass_time(40.0, LOG[0][0])
    assert not watched.pass_time(60.0)
    assert watched.progress.text == "connecting its ranks, silent for 60 s"
    assert "stalled" in watched.pass_time(41.0)
    watched.used_s = 10.0  # it computes again
    assert not watched.pass_time(20.0)
    assert watched.progress.text == "connecting its ranks"
    slow = watched.pass_time(150.0, "some line\n")
    assert "was not ready within 300 s, though it still works: connecting its ranks" in slow


def test_first_compilation_extends_the_limit(watched: Watched) -> None:
    watched.names = {"python", "ninja", "cicc"}
    watched.used_s = 50.0
    assert not watched.pass_time(299.0, LOG[3][0])
    assert watched.progress.text == "compiling kernels (cicc) while preparing its kernels"
    watched.names, watched.used_s = {"python"}, 500.0
    assert not watched.pass_time(800.0) and watched.progress.deadline_s == 1200.0
    assert "within 1200 s" in watched.pass_time(150.0)


def test_limits_grow_with_the_model() -> None:
    small, gpu = (compute_start_limits(TINY, "float32", device) for device in ("cpu", "cuda"))
    assert gpu.total_s > small.total_s >= 300.0
    half = compute_start_limits(TINY, "bfloat16", "cuda")
    assert gpu.total_s - 900.0 == pytest.approx(2 * (half.total_s - 900.0))


SILENT = "import time; time.sleep(600)"


def processes_below(directory: Path) -> list[int]:
    """Return the processes whose working directory this is."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [process.pid] if process.cwd() == str(directory) else []
    return found


async def test_start_reports_its_progress_and_ends_at_its_limit(tmp_path: Path) -> None:
    launch = LaunchConfig(create_interpreter(tmp_path, SILENT), tmp_path / "engine", 4, 64)
    reports: list[str] = []
    with pytest.raises(DeadlineExceeded, match="not ready within 0 s"):
        await SGLangServer.start(
            SystemHost(),
            SystemClock(),
            launch,
            TINY,
            deadline_s=0.0,
            on_progress=lambda text, numbers: reports.append(text),
        )
    assert reports and not processes_below(launch.model_directory)


async def test_failed_launch_ends_its_process(tmp_path: Path) -> None:
    """Check that a failed restart after a sleep leaves the ports to the next one."""
    launch = LaunchConfig(create_interpreter(tmp_path, SILENT), tmp_path / "engine", 4, 64)
    write_model_config(launch, TINY)
    block = PortBlock.reserve()
    http = HttpClient(f"http://127.0.0.1:{block.http}", 4)
    server = SGLangServer(launch, http, "mine", "key", SystemHost(), SystemClock())
    server._ports = block
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="not ready within 0 s") as error:
            await server.launch()
        assert "Read the log" in error.value.fix
        assert not processes_below(launch.model_directory)
    await server.stop()


async def test_occupied_ports_are_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    first = PortBlock.reserve()
    monkeypatch.setattr(ports, "FIRST_PORT", first.http)
    monkeypatch.setattr(ports, "END_PORT", first.http + ports.BLOCK_PORTS)
    with pytest.raises(ConfigError, match="in use"):
        PortBlock.reserve()
    first.release()


def test_only_modules_that_load_and_compile_log_their_progress(tmp_path: Path) -> None:
    launch = LaunchConfig("p", tmp_path, 4, 64)
    write_model_config(launch, TINY)
    named = launch.build_environment()["SGLANG_LOGGING_CONFIG_PATH"]
    config = json.loads(Path(named).read_text())
    assert config["loggers"]["sglang.srt.model_executor"] == {"level": "INFO"}
    assert config["root"]["level"] == "WARNING"  # so no module logs the arguments with the key
    own = replace(launch, options=("--log-level", "info"))
    assert "SGLANG_LOGGING_CONFIG_PATH" not in own.build_environment()
