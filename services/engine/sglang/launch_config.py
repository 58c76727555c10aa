"""Launch configuration of an SGLang server: its flags, its environment and its files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.generation.sglang_model import to_sglang_config
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.devices import VisibleDevices
from meshrl.services.engine.sglang.ports import PortBlock

EXTRA_POSITIONS = 16  # positions beyond a slot, because SGLang reserves some
ENV_PROGRAM = "env"  # coreutils' env changes the directory, then execs the server

# Secret name and key, passed by `--config`: no other server can impersonate this one, and it
# answers no other client.
RESERVED_OPTIONS = {"--served-model-name", "--api-key", "--admin-api-key", "--config"}

# Variables of our interpreter that the server must not inherit.
UNSET_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSAFEPATH")
CPU_FLAGS = ("--attention-backend", "torch_native", "--sleep-on-idle")
GPU_FLAGS = ("--enable-memory-saver",)  # without this flag, sleep releases no memory
BACKUP_FLAG = "--enable-weights-cpu-backup"  # of released weights, in pinned host memory
BACKUP_SPARE_BYTES = 8 << 30  # of free host memory that a backup leaves
# With several data-parallel ranks SGLang gives each a port of its own.
DATA_PARALLEL_FLAGS = ("--dp-size", "--data-parallel-size", "--dp")


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


def prefers_weights_backup(weight_bytes: int, free_host_bytes: int) -> bool:
    """Return True if a copy of released weights costs less than a reload, and fits.

    Both copy the weights from the host to the GPU. The copy away takes as long again, at the rate
    of pinned memory. A reload instead fetches the chunks of the version, checks their digests and
    converts them, which takes several times as long.
    """
    return weight_bytes + BACKUP_SPARE_BYTES <= free_host_bytes


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
    adapter_limits: AdapterLimits | None = None  # limits of adapters; None: no adapters
    backs_up_weights: bool = False  # on a GPU: it copies released weights to host memory
    read_back: bool = False  # the server reports digests of its tensors
    options: tuple[str, ...] = ()  # further flags; the last of a kind takes effect
    tensor_parallel_size: int = 1  # GPUs that share the weights
    hierarchical_cache: HierarchicalCache | None = None  # storage beyond its GPU cache
    devices: VisibleDevices = field(default_factory=VisibleDevices)  # names of its GPUs

    def find_option(self, *names: str) -> str | None:
        """Return the last value of an option by any of its names; None if it is not set."""
        found = None
        for flag, following in zip(self.options, (*self.options[1:], ""), strict=False):
            name, separator, value = flag.partition("=")
            if name in names:
                found = value if separator else following
        return found

    @property
    def stream_interval(self) -> int:
        """Tokens that the server sends together; 0: chosen for each request."""
        return int(self.find_option("--stream-interval") or 0)

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

    @property
    def logging_file(self) -> Path:
        """File with the levels of SGLang's loggers: its log shows the progress of a start."""
        return self.model_directory / "logging.json"

    def build_arguments(self, ports: PortBlock) -> list[str]:
        flags: list[str] = [
            *("--model-path", str(self.model_directory), "--load-format", "dummy"),
            *("--skip-tokenizer-init", "--incremental-streaming-output", "--skip-server-warmup"),
            *("--host", "127.0.0.1", "--port", str(ports.http), "--weight-version", "-1"),
            *("--context-length", str(self.max_length + EXTRA_POSITIONS)),
            *("--max-running-requests", str(self.slots)),
            *("--dtype", self.dtype, "--device", self.device, "--random-seed", str(self.seed)),
            *("--log-level", "warning", "--sampling-mask-max-tokens", str(v0_5.MAX_MASK_TOKENS)),
        ]
        if self.find_option(*DATA_PARALLEL_FLAGS) is None:
            flags += ["--nccl-port", str(ports.ranks)]
        if "--enable-dp-attention" in self.options:
            flags += ["--dist-init-addr", f"127.0.0.1:{ports.data_parallel}"]
        flags += CPU_FLAGS if self.device == "cpu" else GPU_FLAGS
        if self.backs_up_weights and self.device != "cpu":
            flags.append(BACKUP_FLAG)
        tokens = self.kv_tokens
        if not tokens and self.device == "cpu":
            tokens = self.slots * (self.max_length + EXTRA_POSITIONS)
        if tokens:
            flags += ["--max-total-tokens", str(tokens)]
        if self.tensor_parallel_size > 1:
            flags += ["--tp-size", str(self.tensor_parallel_size), *self.devices.build_flags()]
        if self.adapter_limits is not None:
            flags += self.adapter_limits.build_flags(self.device)
        if self.hierarchical_cache is not None:
            flags += self.hierarchical_cache.build_flags(self.device)
        return [*flags, *self.options, "--config", str(self.secrets_file)]

    def build_command(self, ports: PortBlock) -> list[str]:
        """Build the command line, which excludes this product's folders and import paths.

        The server so imports the modules of its own environment.
        """
        unset = [part for name in UNSET_VARIABLES for part in ("-u", name)]
        start = [ENV_PROGRAM, "-C", str(self.model_directory), *unset, self.python, "-P"]
        return [*start, "-m", "sglang.launch_server", *self.build_arguments(ports)]

    def build_environment(self) -> dict[str, str]:
        own = v0_5.ENVIRONMENT | (
            self.hierarchical_cache.build_environment()
            if self.hierarchical_cache is not None
            else {}
        )
        own |= self.devices.environment
        if self.find_option("--log-level") is None:
            own["SGLANG_LOGGING_CONFIG_PATH"] = str(self.logging_file)
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
    launch_config.logging_file.write_text(json.dumps(v0_5.build_logging_config()))


def write_secrets(path: Path, name: str, key: str) -> None:
    """Write a server's name and key as flags that SGLang reads, readable by this user alone."""
    path.unlink(missing_ok=True)
    flags = {"served-model-name": name, "api-key": key}
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(json.dumps(flags))  # JSON is YAML
