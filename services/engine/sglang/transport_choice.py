"""Choice of the transport of weights to an SGLang server, from the devices of both sides.

Sources of the rules:
- NCCL rejects a communicator in which two ranks have one GPU, and has no transport between MIG
  instances (NCCL's and MIG's user guides).
- CUDA opens a handle of GPU memory in other processes of the same device only: not across GPU
  instances of MIG. A process sees one instance at most.
- SGLang 0.5.23 opens the payload of `tp_rank` in each pipeline stage, although a handle may be
  opened once, and numbers the ranks of a broadcast by `tp_rank` alone. Data-parallel replicas
  accept neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.common.base.errors import ConfigError

TRANSPORTS = ("auto", "disk", "tensors", "ipc", "distributed")
SETTING = "rollout.sglang_weights"
_MIG = "MIG-"  # prefix of the UUID of an instance


@dataclass(frozen=True)
class PushDevices:
    """Devices of a server, and of the process that sends it weights."""

    server: tuple[str, ...] = ()  # GPU of each tensor-parallel rank; empty: it computes on a CPU
    sender: tuple[str, ...] = ()  # GPUs that the sender may use, in CUDA's order; empty: none
    copies: int = 1  # processes of each tensor-parallel rank: pipeline stages, replicas

    @property
    def sender_gpus(self) -> tuple[str, ...]:
        """GPUs that CUDA offers the sender: of instances the first alone."""
        return self.sender[:1] if any(map(_is_instance, self.sender)) else self.sender

    @property
    def has_instances(self) -> bool:
        """True if a side has an instance of MIG."""
        return any(map(_is_instance, (*self.server, *self.sender)))


@dataclass(frozen=True)
class ServerTransportChoice:
    """Chosen transport of weights, with its devices as the sender numbers them."""

    transport: str
    reason: str
    gpus: tuple[int, ...] = ()  # of `ipc`: GPU of each rank; of `nccl`: the sender's own GPU
    backend: str = ""  # of `distributed`: nccl or gloo


def choose_server_transport(devices: PushDevices, requested: str = "auto") -> ServerTransportChoice:
    """Choose the transport of weights to a server.

    Raise ConfigError if the requested one is impossible between these devices.
    """
    if requested not in TRANSPORTS:
        raise _reject(f"there is no transport {requested!r}", f"Use one of {', '.join(TRANSPORTS)}")
    if requested == "disk":
        return ServerTransportChoice("disk", f"set by {SETTING}")
    if devices.copies > 1:
        why = f"each rank has {devices.copies} processes (pipeline stages or replicas)"
        if requested != "auto":
            raise _reject(f"{why}, which receive weights from a file only", 'Use "auto" or "disk"')
        return ServerTransportChoice("disk", why)
    ipc, ipc_problem = _find_shared_gpus(devices)
    own, own_problem = _find_own_gpu(devices)
    if requested == "tensors":
        return ServerTransportChoice("tensors", f"set by {SETTING}")
    if requested == "distributed":
        if own is None:
            return ServerTransportChoice("distributed", f"gloo: {own_problem}", (), "gloo")
        return ServerTransportChoice("distributed", f"set by {SETTING}", (own,), "nccl")
    if requested == "ipc":
        if ipc_problem:
            raise _reject(f"GPU memory cannot be shared: {ipc_problem}", 'Use "auto" or "disk"')
        return ServerTransportChoice("ipc", f"set by {SETTING}", ipc)
    if not ipc_problem:
        return ServerTransportChoice("ipc", "the engine process shares each rank's GPU", ipc)
    if own is not None:
        return ServerTransportChoice(
            "distributed", "the engine process has a GPU of its own", (own,), "nccl"
        )
    return ServerTransportChoice("disk", ipc_problem)


def _find_shared_gpus(devices: PushDevices) -> tuple[tuple[int, ...], str]:
    """Return the GPU of each rank by the sender's number, or the reason why one is not shared."""
    if not devices.server:
        return (), "the server computes on a CPU"
    if not devices.sender_gpus:
        return (), "the engine process has no GPU"
    numbers = {gpu: number for number, gpu in enumerate(devices.sender_gpus)}
    missing = [rank for rank, gpu in enumerate(devices.server) if gpu not in numbers]
    if missing:
        return (), f"the engine process cannot use the GPU of rank {missing[0]}"
    return tuple(numbers[gpu] for gpu in devices.server), ""


def _find_own_gpu(devices: PushDevices) -> tuple[int | None, str]:
    """Return the first GPU of the sender that no rank of the server has, or why there is none."""
    if not devices.server:
        return None, "the server computes on a CPU"
    if devices.has_instances:
        return None, "NCCL does not connect instances of MIG"
    for number, gpu in enumerate(devices.sender_gpus):
        if gpu not in devices.server:
            return number, ""
    return None, "the engine process has no GPU that the server does not use"


def _is_instance(gpu: str) -> bool:
    return gpu.startswith(_MIG)


def _reject(message: str, fix: str) -> ConfigError:
    return ConfigError(message, where=SETTING, fix=fix)
