"""Profiles of accelerators, and devices that a process may use."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.accelerators import load_accelerators, match_kind
from meshrl.common.hardware.gpus.devices import Device
from meshrl.common.hardware.gpus.visibility import BY_BUS, explain_no_devices, select_visible
from meshrl.common.job.emulation import ENGINE_PROFILES, TRAINING_PROFILES

KINDS = ("A800", "A100", "H100", "H200", "A40", "V100", "L40S", "T4", "CPU")
A, B, C, D = (f"GPU-{letter}{'1' * 7}-0000-0000-0000-000000000000" for letter in "abcd")
AB = "GPU-ab111111-0000-0000-0000-000000000000"  # shares its first digits with A up to GPU-a
M1, M2 = (f"MIG-{number}0000000-0000-0000-0000-000000000000" for number in (1, 2))
H100 = "NVIDIA H100"
EQUAL_GPUS = [Device(uuid, H100, 80, index) for index, uuid in enumerate((A, B, C, D))]
DIFFERENT_GPUS = [Device(A, "NVIDIA L4", 24, 0), Device(B, H100, 80, 1)]
MIG_GPUS = [
    Device(A, H100, 80, 0, is_mig_enabled=True),
    Device(M1, "1g.10gb", 10, 0, A, (7, 0)),
    Device(M2, "2g.20gb", 20, 0, A, (9, 0)),
    Device(B, H100, 80, 1),
]


def test_declared_kinds_are_packaged_with_plausible_bandwidths() -> None:
    assert (files("meshrl.common.hardware") / "accelerators.toml").is_file()
    assert tuple(load_accelerators()) == KINDS
    for one in load_accelerators().values():
        assert one.network_bytes_per_s < one.link_bytes_per_s <= one.memory_bytes_per_s


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla T4", "T4"),
        ("cpu:0", "CPU"),
        ("NVIDIA A400", ""),
    ],
)
def test_driver_name_matches_the_kind(name: str, kind: str) -> None:
    assert match_kind(name) == kind


def test_emulation_profiles_follow_the_declared_kinds() -> None:
    assert ENGINE_PROFILES["a100-7b"].decode_step_s == pytest.approx(2 * 7.6e9 / (2.04e12 * 0.85))
    assert ENGINE_PROFILES["h100-7b"].plateau_batch == round(989e12 * 0.55 / (3.35e12 * 0.85))
    assert ENGINE_PROFILES["l40s-7b"].prefill_tokens_per_s == pytest.approx(
        362e12 * 0.55 / (2 * 7.6e9)
    )
    training_profile = TRAINING_PROFILES["a100-14b"]
    assert training_profile.tokens_per_s == pytest.approx(312e12 * 0.4 / (6 * 14.8e9))
    assert training_profile.update_s == pytest.approx(28 * 14.8e9 / (2.04e12 * 0.85))


def select_uuids(devices: list[Device], **environment: str) -> list[str]:
    return [device.uuid for device in select_visible(devices, environment)]


@pytest.mark.parametrize(
    ("visible_devices", "expected"),
    [
        ("0", [A]),
        ("2,0", [C, A]),  # in the listed order
        (" 1 , 3 ", [B, D]),
        ("+1", [B]),
        ("1gpu2,2", [B, C]),  # as strtoul reads numbers
        ("0,-1,2", [A]),  # a negative number ends the list
        ("-1", []),
        ("", []),  # set but empty: none
        ("NoDevFiles", []),  # Slurm's value for a step without GPUs
        ("0,,2", [A]),
        (A, [A]),
        (f"{D},{A}", [D, A]),
        ("GPU-b", [B]),  # a unique prefix of a UUID
        ("GPU-c1111111,GPU-a", [C, A]),
    ],
)
def test_visible_devices_are_parsed_like_cuda(
    visible_devices: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert select_uuids(EQUAL_GPUS, CUDA_VISIBLE_DEVICES=visible_devices) == expected
    # PyTorch implements CUDA's rules for lookups that must not initialise CUDA.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_devices)
    torch_devices = torch.cuda._parse_visible_devices()
    if torch_devices and isinstance(torch_devices[0], str):
        uuids = [device.uuid for device in EQUAL_GPUS]
        torch_devices = torch.cuda._transform_uuid_to_ordinals(torch_devices, uuids)
    assert [EQUAL_GPUS[int(index)].uuid for index in torch_devices] == expected


@pytest.mark.parametrize(
    ("visible_devices", "why"),
    [
        ("4", "no GPU 4; the driver lists 4"),
        ("0,9,1", "no GPU 9"),
        ("0,0", "0 is listed twice"),
        (f"{A},{A}", "is listed twice"),
        (f"0,{A}", "is listed twice"),
        ("GPU-9", "the driver lists no GPU-9"),
        ("GPU-", "GPU- fits 4 devices"),
        ("MIG-1", "the driver lists no MIG-1"),
        (f"MIG-{A}/7/0", f"lists no MIG-{A}/7/0"),
    ],
)
def test_devices_that_cuda_would_silently_drop_are_rejected(visible_devices: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        select_uuids(EQUAL_GPUS, CUDA_VISIBLE_DEVICES=visible_devices)


def test_ambiguous_uuid_prefix_is_rejected_with_all_matches() -> None:
    devices = [*EQUAL_GPUS, Device(AB, H100, 80, 4)]
    with pytest.raises(ConfigError, match=f"GPU-a fits 2 devices: {A}, {AB}"):
        select_uuids(devices, CUDA_VISIBLE_DEVICES="GPU-a")
    assert select_uuids(devices, CUDA_VISIBLE_DEVICES="GPU-a1") == [A]


@pytest.mark.parametrize(
    ("visible_devices", "expected"),
    [
        (None, [M1, M2, B]),  # a GPU in MIG mode computes only by its instances
        ("0", [M1, M2]),
        (A, [M1, M2]),
        (M2, [M2]),
        ("MIG-1", [M1]),
        (f"MIG-{A}/9/0", [M2]),  # the format of drivers before R470
        (f"MIG-{A}/7/0,{B}", [M1, B]),
        ("1", [B]),
    ],
)
def test_mig_instances_are_separate_devices(
    visible_devices: str | None, expected: list[str]
) -> None:
    environment = {} if visible_devices is None else {"CUDA_VISIBLE_DEVICES": visible_devices}
    assert select_uuids(MIG_GPUS, **environment) == expected


def test_indices_of_different_gpus_need_a_device_order() -> None:
    with pytest.raises(ConfigError, match="follow speed or bus order") as raised:
        select_uuids(DIFFERENT_GPUS, CUDA_VISIBLE_DEVICES="0")
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in raised.value.fix
    assert select_uuids(DIFFERENT_GPUS, CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER=BY_BUS) == [A]
    # All of them, so their order does not matter.
    assert select_uuids(DIFFERENT_GPUS, CUDA_VISIBLE_DEVICES="1,0") == [B, A]
    assert select_uuids(DIFFERENT_GPUS, CUDA_VISIBLE_DEVICES=B) == [B]


@pytest.mark.parametrize(
    ("container_devices", "expected"),
    [
        ("all", [A, B, C, D]),
        ("", [A, B, C, D]),
        ("void", [A, B, C, D]),  # CDI has added the devices in another way
        ("/var/run/nvidia-container-devices", [A, B, C, D]),
        ("none", []),
        (B, [B]),  # the container is privileged, and the driver lists all devices of the host
        (f"{D},{B}", [B, D]),
        ("1,2", [B, C]),
        ("0,1,2,7", [A, B, C, D]),  # only as many as are listed: their numbers are the host's
    ],
)
def test_container_devices_limit_the_selection(container_devices: str, expected: list[str]) -> None:
    assert select_uuids(EQUAL_GPUS, NVIDIA_VISIBLE_DEVICES=container_devices) == expected


def test_container_and_cuda_selections_combine() -> None:
    both = {"NVIDIA_VISIBLE_DEVICES": f"{B},{C}", "CUDA_VISIBLE_DEVICES": "3,2,1"}
    assert select_uuids(EQUAL_GPUS, **both) == [C, B]
    assert select_uuids(MIG_GPUS, NVIDIA_VISIBLE_DEVICES="0:1") == [M2]
    assert select_uuids(MIG_GPUS, NVIDIA_VISIBLE_DEVICES=M1) == [M1]


def test_lost_gpu_is_skipped_and_rejected_if_selected() -> None:
    devices = [Device("", "NVIDIA GPU", 0, 0, lost_reason="GPU is lost"), Device(B, H100, 80, 1)]
    assert select_uuids(devices) == [B]
    with pytest.raises(ConfigError, match=r"cuda:0 NVIDIA GPU: GPU is lost"):
        select_uuids(devices, CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER=BY_BUS)


def test_explanation_names_the_reasons_for_no_devices() -> None:
    assert explain_no_devices([], {}) == "the driver lists 0 GPUs"
    environment = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "none"}
    explanation = explain_no_devices(EQUAL_GPUS, environment)
    assert explanation.startswith("the driver lists 4 GPUs (CUDA_VISIBLE_DEVICES=''; NVIDIA_")
    mig_without_instances = [Device(A, H100, 80, 0, is_mig_enabled=True)]
    assert select_visible(mig_without_instances, {}) == []
    assert "in MIG mode without an instance: cuda:0 NVIDIA H100" in explain_no_devices(
        mig_without_instances, {}
    )
    lost = [Device("", "NVIDIA GPU", 0, 0, lost_reason="GPU is lost")]
    assert "lost: cuda:0 NVIDIA GPU: GPU is lost" in explain_no_devices(lost, {})
