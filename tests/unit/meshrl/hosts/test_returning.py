"""What a host that comes back takes of the command that starts it, and what it says of the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.common.base.host.settings import MeshSettings
from meshrl.directory.places import MeshPlace
from meshrl.launch.hosts.hosting import HostShape
from meshrl.launch.hosts.membership import Membership
from meshrl.launch.hosts.returning import GIB, Offer, as_told

SHAPE = HostShape(
    workers=2, market="spot", memory_bytes=GIB, planner="planner/2", takes=("shards",)
)
SETTINGS = MeshSettings("", "here", host="gpu1-aa", metrics="off", network="ib", chunks_bytes=GIB)


def test_what_is_not_said_stays() -> None:
    assert as_told(SHAPE, SETTINGS, Offer()) == (SHAPE, SETTINGS, [])


def test_what_the_head_need_not_know_is_taken() -> None:
    named = {"market", "memory", "disk", "cache", "metrics", "network", "services"}
    named |= {"rate_up", "rate_down"}
    offer = Offer(
        metrics="127.0.0.1:9",
        market="lent",
        memory_gib=3.0,
        disk_gib=4.0,
        network="",
        cache_gib=5.0,
        takes=("sandboxes",),
        rate_up_mb=20.0,
        rate_down_mb=0.5,
        named=named,
    )
    shape, settings, kept = as_told(SHAPE, SETTINGS, offer)
    sizes: dict[str, Any] = {"memory_bytes": 3 * GIB, "disk_bytes": 4 * GIB}
    assert shape == replace(SHAPE, market="lent", takes=("sandboxes",), **sizes)
    now: dict[str, Any] = {"metrics": "127.0.0.1:9", "network": "", "chunks_bytes": 5 * GIB}
    now |= {"rate_up": 20_000_000, "rate_down": 500_000}
    assert settings == replace(SETTINGS, **now)
    assert kept == []


def test_what_it_would_have_to_know_is_not_and_that_is_said() -> None:
    same = Offer(workers=2, named={"workers", "device", "standby"})
    assert as_told(SHAPE, SETTINGS, same) == (SHAPE, SETTINGS, [])
    named = {"workers", "device", "ephemeral", "standby"}
    other = Offer(workers=0, device="cuda", ephemeral=True, standby=False, named=named)
    kept = ["--workers 2", "--device cpu", "not --ephemeral", "--standby"]
    assert as_told(SHAPE, SETTINGS, other) == (SHAPE, SETTINGS, kept)
    assert as_told(SHAPE, SETTINGS, Offer(0, named={"no_workers"}))[2] == ["--workers 2"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workers", "4"], "gpu1-aa stays what it joined as: --workers 2. For something else"),
        (["--no-workers"], "gpu1-aa stays what it joined as: --workers 2. For something else"),
        (["--workers", "2", "--market", "lent"], ""),
        ([], ""),
    ],
)
def test_the_command_says_which_options_it_does_not_take(
    tmp_path: Path, options: list[str], said: str
) -> None:
    place = MeshPlace(tmp_path)
    place.directory.mkdir()
    Membership("gpu1-aa", "tcp://127.0.0.1:9", "g" * 40, "s" * 40).write(place)
    SETTINGS.to_file(place.settings)
    SHAPE.write(place)
    # It goes no further than to the address, which is not this host's alone.
    command = ["join", "--root", str(tmp_path), "--listen", "0.0.0.0", *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0
    assert said in result.output if said else "stays what" not in result.output
