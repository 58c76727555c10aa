"""Profiles of accelerators: what comes along, what a user declares, what is refused."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.hardware.profiles import declared, kind_of, profiles
from common.job.pace import PROFILES, TRAINING_PROFILES

KINDS = ("A800", "A100", "H100", "H200", "A40", "V100", "L40S", "T4", "CPU")
TABLE = """
[Mine]
flops = 100e12
memory_bytes = 24e9
memory_bytes_per_s = 1e12
link_bytes_per_s = 32e9
network_bytes_per_s = 10_000_000_000
"""


def of_user(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_the_declared_kinds_come_along_with_the_package() -> None:
    assert (files("common.hardware") / "accelerators.toml").is_file()
    assert tuple(declared()) == KINDS


def test_a_faster_link_never_leaves_the_host() -> None:
    for one in declared().values():
        assert one.network_bytes_per_s < one.link_bytes_per_s <= one.memory_bytes_per_s


def test_a_users_file_adds_kinds_and_replaces_declared_ones(tmp_path: Path) -> None:
    text = TABLE + TABLE.replace("Mine", "T4") + "read_share = 0.7"
    found = profiles(of_user(tmp_path, text))
    assert set(found) == {*KINDS, "Mine"}
    assert found["Mine"].network_bytes_per_s == 10e9
    assert found["T4"].read_bytes_per_s == pytest.approx(0.7e12)
    assert declared()["T4"].flops == 65e12


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[Mine]\nflops = 1e12", "memory_bytes is missing"),
        (TABLE + "speed = 3", "speed is not known"),
        (TABLE.replace("100e12", "0"), "[Mine] flops"),
        (TABLE.replace("100e12", "-1e12"), "[Mine] flops"),
        (TABLE.replace("100e12", "nan"), "[Mine] flops"),
        (TABLE.replace("100e12", "inf"), "[Mine] flops"),
        (TABLE.replace("100e12", "'fast'"), "[Mine] flops"),
        (TABLE.replace("100e12", "true"), "[Mine] flops"),
        (TABLE + "busy_share = 1.5", "[Mine] busy_share"),
        ("Mine = 3", "Mine is no table"),
        ("[Mine", "cannot be read"),
    ],
)
def test_what_no_accelerator_has_is_refused_with_its_place(
    tmp_path: Path, text: str, named: str
) -> None:
    path = of_user(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        profiles(path)
    assert named in str(refused.value)
    assert str(path) in refused.value.where
    assert refused.value.fix


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        profiles(tmp_path / "none.toml")


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
