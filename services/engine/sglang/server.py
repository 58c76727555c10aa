"""Process of an SGLang server, started in its own interpreter and stopped with its children."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import ConfigError, DeadlineExceeded, PeerLost, RemoteFailure
from meshrl.common.generation.sglang_model import to_sglang_config
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.host import Host, Stoppable
from meshrl.common.mesh.process.output.log_bounds import rotate_file_if_long
from meshrl.common.mesh.process.spawning import SpawnOptions
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.http_client import UNAUTHORIZED, HttpClient
from meshrl.services.engine.sglang.server_devices import count_gpus, find_push_devices
from meshrl.services.engine.sglang.transport_choice import (
    PushDevices,
    ServerTransportChoice,
    choose_server_transport,
)

START_TIMEOUT_S = 280.0  # some 30 s on an idle core; less than a role process's load timeout
PROBE_TIMEOUT_S, POLL_S = 5.0, 0.25
DESCRIBE_TIMEOUT_S = 60.0  # for its API description, which it computes at the first request
STOP_TIMEOUT_S = 5.0  # for a killed process to exit
LOG_CHECK_INTERVAL_S = 1.0  # interval of checks of the log's length
TAIL_LINES, MAX_LINE_CHARS = 25, 300  # lines of the log in an error, and characters of each
EXTRA_POSITIONS = 16  # positions beyond a slot, because SGLang reserves some
ENV_PROGRAM = "env"  # coreutils' env changes the directory, then execs the server

# Secret name and key, passed by `--config`: no other server can impersonate this one, and it
# answers no other client.
RESERVED_OPTIONS = {"--served-model-name", "--api-key", "--admin-api-key", "--config"}

# Variables of our interpreter that the server must not inherit.
UNSET_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSAFEPATH")
CPU_FLAGS = ("--attention-backend", "torch_native", "--disable-overlap-schedule", "--sleep-on-idle")
GPU_FLAGS = ("--enable-memory-saver",)  # without this flag, sleep releases no memory


@dataclass(frozen=True)
class AdapterLimits:
    """Limits of the adapters that a server accepts."""

    max_rank: int  # at most
    projections: tuple[str, ...]  # by Hugging Face names

    def build_flags(self, device: str) -> list[str]:
        rank = ("--enable-lora", "--max-lora-rank", str(self.max_rank))
        # other backends require a GPU
        backend = ("--lora-backend", "torch_native") if device == "cpu" else ()
        return [*rank, "--lora-target-modules", *self.projections, *backend]


@dataclass(frozen=True)
class HierarchicalCache:
    """Storage for keys and values that do not fit on the server's GPU.

    It is SGLang 0.5's `--enable-hierarchical-cache` (HiCache).
    """

    memory_gib: float
    directory: Path | None = None  # on disk, without a size limit; None: no disk tier

    def build_flags(self, device: str) -> list[str]:
        """Return the server's flags; raise ConfigError if the device has no such cache."""
        if device != "cuda":
            raise ConfigError(
                "SGLang has KV tiers only on GPUs",
                where="rollout.kv",
                fix="Set memory and disk to 0, or use the built-in engine",
            )
        flags = [
            "--enable-hierarchical-cache",
            "--hicache-size",
            str(max(1, round(self.memory_gib))),
        ]
        return flags + (["--hicache-storage-backend", "file"] if self.directory else [])

    def build_environment(self) -> dict[str, str]:
        if self.directory is None:
            return {}
        return {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.directory)}


@dataclass(frozen=True)
class LaunchConfig:
    """Launch configuration of a server."""

    python: str  # path of the interpreter
    directory: Path  # folder of config.json, the log and new weights
    slots: int  # concurrent requests
    max_length: int  # tokens of a slot
    kv_tokens: int = 0  # size of the cache; 0: all slots full on a CPU, SGLang's choice on a GPU
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    exact_switch: bool = True  # no step runs while weights change, see `build_command`
    adapter_limits: AdapterLimits | None = None  # limits of adapters; None: no adapters
    read_back: bool = False  # the server reports digests of its tensors
    options: tuple[str, ...] = ()  # further flags; the last of a kind takes effect
    tensor_parallel_size: int = 1  # GPUs that share the weights
    hierarchical_cache: HierarchicalCache | None = None  # storage beyond its GPU cache

    @property
    def model_directory(self) -> Path:
        return self.directory / "model"

    @property
    def log_file(self) -> Path:
        return self.directory / "sglang.log"

    @property
    def secrets_file(self) -> Path:
        """File with the secrets that its command line must not show; the server reads it at its
        start.
        """
        return self.directory / "sglang-secrets.yaml"

    def build_arguments(self, port: int) -> list[str]:
        flags: list[str] = [
            *("--model-path", str(self.model_directory), "--load-format", "dummy"),
            *("--skip-tokenizer-init", "--incremental-streaming-output", "--skip-server-warmup"),
            *("--host", "127.0.0.1", "--port", str(port), "--weight-version", "-1"),
            *("--context-length", str(self.max_length + EXTRA_POSITIONS)),
            *("--max-running-requests", str(self.slots)),
            *("--dtype", self.dtype, "--device", self.device, "--random-seed", str(self.seed)),
            *("--log-level", "warning", "--sampling-mask-max-tokens", str(v0_5.MAX_MASK_TOKENS)),
        ]
        flags += CPU_FLAGS if self.device == "cpu" else GPU_FLAGS
        if self.exact_switch and self.device != "cpu":
            # Tokens of a step that overlaps with a pause in place would count for the next version.
            flags.append("--disable-overlap-schedule")
        tokens = self.kv_tokens
        if not tokens and self.device == "cpu":
            tokens = self.slots * (self.max_length + EXTRA_POSITIONS)
        if tokens:
            flags += ["--max-total-tokens", str(tokens)]
        if self.tensor_parallel_size > 1:
            flags += ["--tp-size", str(self.tensor_parallel_size)]
        if self.adapter_limits is not None:
            flags += self.adapter_limits.build_flags(self.device)
        if self.hierarchical_cache is not None:
            flags += self.hierarchical_cache.build_flags(self.device)
        return [*flags, *self.options, "--config", str(self.secrets_file)]

    def build_command(self, port: int) -> list[str]:
        """Build the command line, which excludes this product's folders and import paths.

        The server so imports the modules of its own environment.
        """
        unset = [part for name in UNSET_VARIABLES for part in ("-u", name)]
        start = [ENV_PROGRAM, "-C", str(self.model_directory), *unset, self.python, "-P"]
        return [*start, "-m", "sglang.launch_server", *self.build_arguments(port)]

    def build_environment(self) -> dict[str, str]:
        own = v0_5.ENVIRONMENT | (
            self.hierarchical_cache.build_environment()
            if self.hierarchical_cache is not None
            else {}
        )
        return own | ({"SGLANG_USE_CPU_ENGINE": "1"} if self.device == "cpu" else {})


def write_model_config(launch_config: LaunchConfig, config: ModelConfig) -> None:
    """Write the config.json that is served: no end tokens, since each request names its own.

    Raise ConfigError for a model that SGLang computes differently, or with too few positions.
    """
    if launch_config.max_length > config.max_positions:
        raise ConfigError(
            f"slots of {launch_config.max_length} tokens exceed the model's "
            f"{config.max_positions} positions",
            where="rollout.max_tokens",
            fix="Lower it, or raise max_position_embeddings",
        )
    served = replace(
        to_sglang_config(config, launch_config.max_length),
        eos_ids=(),
        bos_id=None,
        pad_id=None,
        max_positions=max(config.max_positions, launch_config.max_length + EXTRA_POSITIONS),
    )
    launch_config.model_directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        served.to_hf() | {"dtype": launch_config.dtype, "torch_dtype": launch_config.dtype},
        indent=2,
    )
    (launch_config.model_directory / "config.json").write_text(text + "\n")


def write_secrets(path: Path, name: str, key: str) -> None:
    """Write a server's name and key as flags that SGLang reads, readable by this user alone."""
    path.unlink(missing_ok=True)
    flags = {"served-model-name": name, "api-key": key}
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(json.dumps(flags))  # JSON is YAML


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class SGLangServer:
    """Running server. Its children exit with it, and it exits with the process that started it."""

    def __init__(
        self,
        launch_config: LaunchConfig,
        child: ChildProcess,
        http: HttpClient,
        name: str,
        clock: Clock,
    ) -> None:
        """Wrap a started server; `name` is the model name that identifies it."""
        self.launch_config, self.child, self.http, self.name = launch_config, child, http, name
        self.clock = clock
        self.version = ""  # SGLang's version
        self.uses_seeds = False  # the server samples from each request's seed
        self.ranks = 1  # processes that hold a share of the weights
        self.push_devices = PushDevices()  # of the server, and of this process
        self.pid = child.pid
        self.log_bounder: Stoppable | None = None  # limits the size of the log

    @classmethod
    async def start(
        cls,
        host: Host,
        clock: Clock,
        launch_config: LaunchConfig,
        config: ModelConfig,
        weights: str = "auto",
        deadline_s: float = START_TIMEOUT_S,
    ) -> SGLangServer:
        """Start a server and return it ready, prepared for `weights` (a transport) and without
        weights.

        Call this on the main thread. Raise ConfigError if the server does not start or lacks an
        operation, PeerLost if another server has its port.
        """
        if not os.access(launch_config.python, os.X_OK):
            raise ConfigError(
                f"there is no interpreter {launch_config.python}",
                where="rollout.sglang_python",
                fix="Run `meshrl engine install sglang`, or name the interpreter that has SGLang",
            )
        if reserved := RESERVED_OPTIONS & {
            option.partition("=")[0] for option in launch_config.options
        }:
            raise ConfigError(
                f"{', '.join(sorted(reserved))} is reserved: MeshRL sets it to identify and "
                "protect the server",
                where="rollout.sglang_options",
                fix="Remove it; give the content of a --config file as separate flags",
            )
        write_model_config(launch_config, config)
        port, name, key = find_free_port(), os.urandom(16).hex(), os.urandom(32).hex()
        write_secrets(launch_config.secrets_file, name, key)
        child = host.spawn(
            launch_config.build_command(port),
            name="sglang",
            env=launch_config.build_environment(),
            log=launch_config.log_file,
            options=SpawnOptions(own_session=True),
        )
        bounding = host.run_periodically(
            LOG_CHECK_INTERVAL_S,
            lambda: rotate_file_if_long(launch_config.log_file),
            "rotate sglang.log",
        )
        http = HttpClient(f"http://127.0.0.1:{port}", launch_config.slots, key)
        server = cls(launch_config, child, http, name, clock)
        server.log_bounder = bounding
        try:
            await server._wait_until_ready(deadline_s)
            await server._check_server(weights)
        except BaseException:
            await server.stop()
            raise
        finally:
            launch_config.secrets_file.unlink(missing_ok=True)
        return server

    async def _wait_until_ready(self, deadline_s: float) -> None:
        until = self.clock.monotonic() + deadline_s
        while self.clock.monotonic() < until:
            if (code := self.child.poll()) is not None:
                raise ConfigError(
                    f"SGLang exited with status {code} before it was ready: {self.read_log_tail()}",
                    where=str(self.launch_config.log_file),
                    fix="Read the log; change SGLang's flags in rollout.sglang_options",
                )
            if not await self.http.probe(v0_5.READY, PROBE_TIMEOUT_S):
                return
            await self.clock.sleep(POLL_S)
        raise DeadlineExceeded(
            f"SGLang was not ready within {deadline_s:g} s: {self.read_log_tail()}",
            where=str(self.launch_config.log_file),
        )

    async def _check_server(self, weights: str) -> None:
        """Read the server's version, and check that it offers the operations that the adapter uses.

        Its port was free when it was chosen, and another server may have taken it since.
        """
        try:
            about = await self._fetch(v0_5.INFO)
        except RemoteFailure as error:
            if UNAUTHORIZED not in error.message:
                raise
            about = {}  # the server has another key
        if about.get("served_model_name") != self.name:
            raise PeerLost(
                "another server uses the port of this SGLang server", where=self.http.url
            )
        self.version = str(about.get("version", "unknown"))
        self.ranks = int(about.get("tp_size", 1)) * int(about.get("pp_size", 1))
        self.uses_seeds = bool(about.get("enable_deterministic_inference", False))
        self.push_devices = find_push_devices(
            about, self.launch_config.device, count_gpus(), os.environ
        )
        if not self.version.startswith("0.5."):
            raise ConfigError(
                f"SGLang {self.version} is not supported",
                where=self.launch_config.python,
                fix="Install SGLang 0.5: `meshrl engine install sglang`",
            )
        if (
            self.launch_config.tensor_parallel_size > 1
            and self.ranks % self.launch_config.tensor_parallel_size
        ):
            raise ConfigError(
                f"SGLang runs {self.ranks} processes, not "
                f"{self.launch_config.tensor_parallel_size}",
                where="rollout.tensor_parallel",
                fix="Read its log, and check rollout.sglang_options",
            )
        if self.launch_config.read_back and self.ranks > 1:
            raise ConfigError(
                f"{self.ranks} processes of SGLang share the model, and weights are verified "
                "only with 1",
                where="rollout.verify_weights",
                fix="Remove it, or set rollout.tensor_parallel = [1]",
            )
        described = await self._fetch("/openapi.json", DESCRIBE_TIMEOUT_S)
        lacking = v0_5.find_missing(described, v0_5.REQUIRED_FIELDS)
        transport = self.choose_transport(weights).transport
        for needed in {transport, "disk"} if weights == "auto" else {transport}:
            lacking += v0_5.find_missing(described, v0_5.TRANSPORT_FIELDS[needed])
        if self.launch_config.adapter_limits is not None:
            lacking += v0_5.find_missing(described, v0_5.ADAPTER_FIELDS)
        if self.launch_config.read_back:
            lacking += v0_5.find_missing(described, v0_5.READBACK_FIELDS)
        if lacking:
            raise ConfigError(
                f"SGLang {self.version} does not offer {', '.join(lacking)}",
                where=self.launch_config.python,
                fix="Install the version of `meshrl engine install sglang`",
            )

    def choose_transport(self, requested: str) -> ServerTransportChoice:
        """Choose the transport of weights to this server; ConfigError if it is impossible."""
        return choose_server_transport(self.push_devices, requested)

    async def _fetch(self, path: str, deadline_s: float = PROBE_TIMEOUT_S) -> Mapping[str, Any]:
        answer = await self.http.get(path, deadline_s)
        if not isinstance(answer, dict):
            raise RemoteFailure(f"{path} did not answer with a JSON object", where=self.http.url)
        return answer

    def get_exit_error(self) -> PeerLost | None:
        code = self.child.poll()
        if code is None:
            return None
        return PeerLost(
            f"SGLang exited with status {code}: {self.read_log_tail()}",
            where=str(self.launch_config.log_file),
        )

    def read_log_tail(self) -> str:
        try:
            lines = self.launch_config.log_file.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return "SGLang wrote no log"
        return "\n".join(line[:MAX_LINE_CHARS] for line in lines[-TAIL_LINES:])

    async def stop(self) -> None:
        """Kill the server and all its children; it has no state that a slower stop would save."""
        if self.log_bounder is not None:
            self.log_bounder.stop()
        await self.http.close()
        self.child.kill()
        await self.child.wait(STOP_TIMEOUT_S)
