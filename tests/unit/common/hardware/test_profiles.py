"""Profiles of accelerators: what comes along, and which one a driver's name tells."""

from __future__ import annotations

from importlib.resources import files

import pytest

from meshrl.common.hardware.profiles import declared, kind_of
from meshrl.common.job.pace import PROFILES, TRAINING_PROFILES

KINDS = ("A800", "A100", "H100", "H200", "A40", "V100", "L40S", "T4", "CPU")


def test_the_declared_kinds_come_along_with_the_package() -> None:
    assert (files("meshrl.common.hardware") / "accelerators.toml").is_file()
    assert tuple(declared()) == KINDS


def test_a_faster_link_never_leaves_the_host() -> None:
    for one in declared().values():
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
    assert kind_of(name) == kind


def test_paces_are_those_of_the_declared_kinds() -> None:
    assert PROFILES["a100-7b"].decode_s == pytest.approx(2 * 7.6e9 / (2.04e12 * 0.85))
    assert PROFILES["h100-7b"].plateau == round(989e12 * 0.55 / (3.35e12 * 0.85))
    assert PROFILES["l40s-7b"].prefill_tokens_per_s == pytest.approx(362e12 * 0.55 / (2 * 7.6e9))
    trains = TRAINING_PROFILES["a100-14b"]
    assert trains.tokens_per_s == pytest.approx(312e12 * 0.4 / (6 * 14.8e9))
    assert trains.update_s == pytest.approx(28 * 14.8e9 / (2.04e12 * 0.85))
