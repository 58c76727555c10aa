"""Choice of the transport of weights to an SGLang server, by a table of devices."""

from __future__ import annotations

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.services.engine.sglang.server_devices import find_push_devices
from meshrl.services.engine.sglang.transport_choice import (
    PushDevices,
    ServerTransportChoice,
    choose_server_transport,
)

A, B, C = "GPU-a", "GPU-b", "GPU-c"
M, N = "MIG-m", "MIG-n"
EIGHT = tuple(f"GPU-{number}" for number in range(8))


@pytest.mark.parametrize(
    ("devices", "transport", "gpus", "reason"),
    [
        # the server computes on a CPU; its sender too, or on a GPU
        (PushDevices(), "disk", (), "server computes on a CPU"),
        (PushDevices((), (A,)), "disk", (), "server computes on a CPU"),
        # the sender has no GPU: its torch has no CUDA
        (PushDevices((A,)), "disk", (), "no GPU"),
        (PushDevices((A, B)), "disk", (), "no GPU"),
        (PushDevices(EIGHT), "disk", (), "no GPU"),
        # one GPU for both sides, also if a trainer uses it while the server sleeps
        (PushDevices((A,), (A,)), "ipc", (0,), "shares each rank's GPU"),
        (PushDevices((A, B), (A, B)), "ipc", (0, 1), "shares each rank's GPU"),
        (PushDevices((B, A), (A, B)), "ipc", (1, 0), "shares each rank's GPU"),
        (PushDevices(EIGHT, EIGHT), "ipc", tuple(range(8)), "shares each rank's GPU"),
        # shared GPUs are preferred to a further one
        (PushDevices((A,), (A, B)), "ipc", (0,), "shares each rank's GPU"),
        # the sender has a GPU of its own
        (PushDevices((A,), (B,)), "distributed", (0,), "GPU of its own"),
        (PushDevices((A, B), (C,)), "distributed", (0,), "GPU of its own"),
        (PushDevices((A, B), (A, C)), "distributed", (1,), "GPU of its own"),
        (PushDevices(EIGHT[:7], (EIGHT[7],)), "distributed", (0,), "GPU of its own"),
        # it has the GPUs of some ranks, and no other
        (PushDevices((A, B), (A,)), "disk", (), "GPU of rank 1"),
        # instances: one is shared, others never connect, and CUDA offers a process the first alone
        (PushDevices((M,), (M,)), "ipc", (0,), "shares each rank's GPU"),
        (PushDevices((M,), (N,)), "disk", (), "GPU of rank 0"),
        (PushDevices((N,), (M, N)), "disk", (), "GPU of rank 0"),
        (PushDevices((M, N), (M, N)), "disk", (), "GPU of rank 1"),
        (PushDevices((A,), (M,)), "disk", (), "GPU of rank 0"),
        # several processes for a rank
        (PushDevices((A,), (A,), copies=2), "disk", (), "pipeline stages or replicas"),
    ],
)
def test_auto_chooses_by_the_devices_of_both_sides(
    devices: PushDevices, transport: str, gpus: tuple[int, ...], reason: str
) -> None:
    choice = choose_server_transport(devices)
    assert (choice.transport, choice.gpus) == (transport, gpus)
    assert reason in choice.reason
    assert choice.backend == ("nccl" if transport == "distributed" else "")


@pytest.mark.parametrize(
    ("devices", "backend", "gpus"),
    [
        (PushDevices((A,), (A, B)), "nccl", (1,)),
        (PushDevices((A,), (A,)), "gloo", ()),
        (PushDevices((A, B), (A, B)), "gloo", ()),
        (PushDevices(EIGHT, EIGHT), "gloo", ()),
        (PushDevices((M,), (N,)), "gloo", ()),
        (PushDevices(), "gloo", ()),
        (PushDevices((), (A,)), "gloo", ()),
    ],
)
def test_broadcast_uses_nccl_only_between_different_gpus(
    devices: PushDevices, backend: str, gpus: tuple[int, ...]
) -> None:
    choice = choose_server_transport(devices, "distributed")
    assert (choice.transport, choice.backend, choice.gpus) == ("distributed", backend, gpus)
    used = {devices.sender_gpus[gpu] for gpu in choice.gpus}
    assert not used & set(devices.server)


def test_impossible_transports_are_rejected_with_the_reason() -> None:
    for devices, requested, reason in (
        (PushDevices(), "ipc", "computes on a CPU"),
        (PushDevices((A, B), (A,)), "ipc", "GPU of rank 1"),
        (PushDevices((A,), (A,), copies=2), "tensors", "from a file only"),
        (PushDevices((A,), (A,), copies=2), "distributed", "from a file only"),
        (PushDevices(), "magic", "no transport 'magic'"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            choose_server_transport(devices, requested)
        assert caught.value.where == "rollout.sglang_weights" and caught.value.fix


def test_files_and_shared_host_memory_need_no_gpu() -> None:
    for devices in (PushDevices(), PushDevices((A, B), (A, B)), PushDevices((M,), (N,))):
        for transport in ("disk", "tensors"):
            choice = choose_server_transport(devices, transport)
            assert choice == ServerTransportChoice(transport, "set by rollout.sglang_weights")
    assert choose_server_transport(PushDevices(copies=4), "disk").transport == "disk"


def test_devices_follow_the_servers_description_and_cudas_variables() -> None:
    visible = {"CUDA_VISIBLE_DEVICES": f"{A}, {B},{C}"}
    about = {"tp_size": 2, "pp_size": 1, "base_gpu_id": 1}
    assert find_push_devices(about, "cuda", 3, visible) == PushDevices((B, C), (A, B, C))
    assert find_push_devices(about, "cuda", 0, visible) == PushDevices((B, C), ())
    assert find_push_devices({"tp_size": 2}, "cuda", 2, {}) == PushDevices(("0", "1"), ("0", "1"))
    stepped = {"tp_size": 2, "gpu_id_step": 2, "dp_size": None}
    assert find_push_devices(stepped, "cuda", 3, visible) == PushDevices((A, C), (A, B, C))
    assert find_push_devices({"pp_size": 2, "dp_size": 2}, "cpu", 0, {}) == PushDevices(copies=4)
