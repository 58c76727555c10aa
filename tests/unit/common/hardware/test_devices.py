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
AB = "GPU-ab111111-0000-0000-0000-000000000000"  # begins as A does not, but as far as GPU-a
M1, M2 = (f"MIG-{number}0000000-0000-0000-0000-000000000000" for number in (1, 2))
H100 = "NVIDIA H100"
ALIKE = [Device(uuid, H100, 80, index) for index, uuid in enumerate((A, B, C, D))]
UNLIKE = [Device(A, "NVIDIA L4", 24, 0), Device(B, H100, 80, 1)]
SLICED = [
    Device(A, H100, 80, 0, is_mig_enabled=True),
    Device(M1, "1g.10gb", 10, 0, A, (7, 0)),
    Device(M2, "2g.20gb", 20, 0, A, (9, 0)),
    Device(B, H100, 80, 1),
]


def test_declared_kinds_come_along_and_a_faster_link_never_leaves_the_host() -> None:
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
def test_the_name_of_a_driver_tells_the_kind(name: str, kind: str) -> None:
    assert match_kind(name) == kind


def test_paces_are_those_of_the_declared_kinds() -> None:
    assert ENGINE_PROFILES["a100-7b"].decode_step_s == pytest.approx(2 * 7.6e9 / (2.04e12 * 0.85))
    assert ENGINE_PROFILES["h100-7b"].plateau_batch == round(989e12 * 0.55 / (3.35e12 * 0.85))
    assert ENGINE_PROFILES["l40s-7b"].prefill_tokens_per_s == pytest.approx(
        362e12 * 0.55 / (2 * 7.6e9)
    )
    trains = TRAINING_PROFILES["a100-14b"]
    assert trains.tokens_per_s == pytest.approx(312e12 * 0.4 / (6 * 14.8e9))
    assert trains.update_s == pytest.approx(28 * 14.8e9 / (2.04e12 * 0.85))


def named(devices: list[Device], **environment: str) -> list[str]:
    return [device.uuid for device in select_visible(devices, environment)]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("0", [A]),
        ("2,0", [C, A]),  # in the order in which they are named
        (" 1 , 3 ", [B, D]),
        ("+1", [B]),
        ("1gpu2,2", [B, C]),  # as strtoul reads numbers
        ("0,-1,2", [A]),  # a negative one ends the list
        ("-1", []),
        ("", []),  # set, and empty: none
        ("NoDevFiles", []),  # Slurm's for a step without GPUs
        ("0,,2", [A]),
        (A, [A]),
        (f"{D},{A}", [D, A]),
        ("GPU-b", [B]),  # as much of a UUID as tells them apart
        ("GPU-c1111111,GPU-a", [C, A]),
    ],
)
def test_what_is_named_is_seen_as_cuda_sees_it(
    asked: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert named(ALIKE, CUDA_VISIBLE_DEVICES=asked) == found
    # PyTorch has CUDA's rules written down, for a look that must not initialise CUDA.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    theirs = torch.cuda._parse_visible_devices()
    if theirs and isinstance(theirs[0], str):
        every = [device.uuid for device in ALIKE]
        theirs = torch.cuda._transform_uuid_to_ordinals(theirs, every)
    assert [ALIKE[int(place)].uuid for place in theirs] == found


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("4", "no GPU 4, the driver lists 4"),
        ("0,9,1", "no GPU 9"),
        ("0,0", "0 is there twice"),
        (f"{A},{A}", "is there twice"),
        (f"0,{A}", "is there twice"),
        ("GPU-9", "the driver lists no GPU-9"),
        ("GPU-", "GPU- fits 4 devices"),
        ("MIG-1", "the driver lists no MIG-1"),
        (f"MIG-{A}/7/0", f"lists no MIG-{A}/7/0"),
    ],
)
def test_what_cuda_would_drop_in_silence_is_refused(asked: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        named(ALIKE, CUDA_VISIBLE_DEVICES=asked)


def test_an_abbreviated_uuid_that_fits_two_is_refused_with_both() -> None:
    devices = [*ALIKE, Device(AB, H100, 80, 4)]
    with pytest.raises(ConfigError, match=f"GPU-a fits 2 devices: {A}, {AB}"):
        named(devices, CUDA_VISIBLE_DEVICES="GPU-a")
    assert named(devices, CUDA_VISIBLE_DEVICES="GPU-a1") == [A]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, [M1, M2, B]),  # a GPU in MIG mode computes by its instances alone
        ("0", [M1, M2]),
        (A, [M1, M2]),
        (M2, [M2]),
        ("MIG-1", [M1]),
        (f"MIG-{A}/9/0", [M2]),  # as drivers before R470 named them
        (f"MIG-{A}/7/0,{B}", [M1, B]),
        ("1", [B]),
    ],
)
def test_instances_are_devices_of_their_own(asked: str | None, found: list[str]) -> None:
    environment = {} if asked is None else {"CUDA_VISIBLE_DEVICES": asked}
    assert named(SLICED, **environment) == found


def test_numbers_of_gpus_that_differ_need_an_order() -> None:
    with pytest.raises(ConfigError, match="count by speed or by bus") as told:
        named(UNLIKE, CUDA_VISIBLE_DEVICES="0")
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in told.value.fix
    assert named(UNLIKE, CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER=BY_BUS) == [A]
    assert named(UNLIKE, CUDA_VISIBLE_DEVICES="1,0") == [B, A]  # all of them, whoever counts
    assert named(UNLIKE, CUDA_VISIBLE_DEVICES=B) == [B]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("all", [A, B, C, D]),
        ("", [A, B, C, D]),
        ("void", [A, B, C, D]),  # CDI has put them there by another way
        ("/var/run/nvidia-container-devices", [A, B, C, D]),
        ("none", []),
        (B, [B]),  # the container is privileged, and the driver lists all of the host
        (f"{D},{B}", [B, D]),
        ("1,2", [B, C]),
        ("0,1,2,7", [A, B, C, D]),  # as many as are listed: their numbers are the host's
    ],
)
def test_what_a_container_was_given_holds_also_where_it_sees_more(
    given: str, found: list[str]
) -> None:
    assert named(ALIKE, NVIDIA_VISIBLE_DEVICES=given) == found


def test_both_hold_together() -> None:
    both = {"NVIDIA_VISIBLE_DEVICES": f"{B},{C}", "CUDA_VISIBLE_DEVICES": "3,2,1"}
    assert named(ALIKE, **both) == [C, B]
    assert named(SLICED, NVIDIA_VISIBLE_DEVICES="0:1") == [M2]
    assert named(SLICED, NVIDIA_VISIBLE_DEVICES=M1) == [M1]


def test_a_lost_gpu_is_left_out_and_refused_where_it_is_named() -> None:
    devices = [Device("", "NVIDIA GPU", 0, 0, lost_reason="GPU is lost"), Device(B, H100, 80, 1)]
    assert named(devices) == [B]
    with pytest.raises(ConfigError, match=r"cuda:0 NVIDIA GPU: GPU is lost"):
        named(devices, CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER=BY_BUS)


def test_none_at_all_says_what_was_looked_for() -> None:
    assert explain_no_devices([], {}) == "the driver lists 0 GPUs"
    hidden = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "none"}
    said = explain_no_devices(ALIKE, hidden)
    assert said.startswith("the driver lists 4 GPUs (CUDA_VISIBLE_DEVICES=''; NVIDIA_")
    bare = [Device(A, H100, 80, 0, is_mig_enabled=True)]
    assert select_visible(bare, {}) == []
    assert "in MIG mode without an instance: cuda:0 NVIDIA H100" in explain_no_devices(bare, {})
    lost = [Device("", "NVIDIA GPU", 0, 0, lost_reason="GPU is lost")]
    assert "lost: cuda:0 NVIDIA GPU: GPU is lost" in explain_no_devices(lost, {})
