"""From a gang's record to the processes of a worker, and from a host to its accelerators."""

from __future__ import annotations

import shlex
import sys

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.gpus.devices import Device
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state.pool.workers.rows import Gang, Resident, Role, Tier
from meshrl.services.node.gpus.accelerators import cpu_slots, discover, of_gpus
from meshrl.services.node.job_services import command
from meshrl.services.node.residents.roles import COMMANDS, wishes, with_overrides

GANG = Gang(
    "g1",
    ("w3", "w1"),
    7,
    (
        Resident("g1.0", "calc", Role.ROLLOUT, ranks=(1,), generation=3, turns=True),
        Resident("g1.1", "calc", Role.TRAINING, core=True, ranks=(0, 1), generation=4),
        Resident("g1.2", "calc", Role.TRAINING, generation=4),
        Resident("g1.3", "calc", Role.SCORING, tier=Tier.ABSENT),
    ),
)


def test_a_worker_runs_what_occupies_its_rank_under_the_names_of_the_registry() -> None:
    first, second = wishes(GANG, "w3"), wishes(GANG, "w1")
    assert list(first) == ["trainer/calc", "hybrid/g1.2", "scoring/calc"]
    assert list(second) == ["engine/g1.0", "rank/calc/1"]
    assert first["scoring/calc"].absent and not first["hybrid/g1.2"].absent
    assert wishes(GANG, "w0") == {} == wishes(None, "w3")


def test_command_lines_say_whose_process_it_is_and_who_keeps_the_turns() -> None:
    found = wishes(GANG, "w1")
    assert found["engine/g1.0"].argv(COMMANDS) == [
        *[sys.executable, "-m", "meshrl.services.engine", "--gang", "g1", "--resident", "g1.0"],
        *["--job", "calc", "--generation", "3", "--keeper", "worker/w3", "--turns"],
    ]
    rank = found["rank/calc/1"].argv(COMMANDS)
    assert rank[-5:] == ["--core", "--rank", "1", "--ranks", "2"]
    with pytest.raises(ConfigError, match="no process serves the role 'rollout'"):
        found["engine/g1.0"].argv({})


def test_services_of_jobs_are_told_their_job() -> None:
    python = [sys.executable, "-m"]
    assert command("rollout/calc/2", []) == [
        *[*python, "meshrl.services.rollout", "--job", "calc", "--shard", "2"]
    ]
    sandbox = command("sandbox/a/b/0", ["--orphan-s", "3"])
    assert sandbox == [
        *python,
        "meshrl.services.sandbox",
        "--name",
        "sandbox/a/b/0",
        "--orphan-s",
        "3",
    ]


def test_commands_are_replaced_by_role() -> None:
    commands = with_overrides(["rollout=" + shlex.join(["python", "a b"]), "serving=x"])
    assert commands["rollout"] == ["python", "a b"] and commands["serving"] == ["x"]
    assert commands["training"] == COMMANDS["training"]
    for wrong in ("rollout", "rollout="):
        with pytest.raises(ConfigError):
            with_overrides([wrong])


def test_each_worker_sees_one_device_by_its_uuid() -> None:
    assert [a.name for a in cpu_slots(2)] == ["cpu:0", "cpu:1"]
    assert [a.name for a in cpu_slots(3, ["A40", "v100"])] == ["cpu:0 A40", "cpu:1 V100", "cpu:2"]
    for mistaken in (["A41"], ["CPU"], ["A40"] * 4):
        with pytest.raises(ConfigError, match="MESHRL_STAND_FOR"):
            cpu_slots(3, mistaken)
    whole = Device("GPU-a", "NVIDIA H200", 1000, 0)
    part = Device("MIG-b", "NVIDIA H200 MIG 1g.18gb", 100, 1, "GPU-b", (7, 0))
    found = of_gpus([whole, part], 0)
    assert [a.name for a in found] == ["cuda:0 NVIDIA H200", "cuda:1/7/0 NVIDIA H200 MIG 1g.18gb"]
    assert [a.env["CUDA_VISIBLE_DEVICES"] for a in found] == ["GPU-a", "MIG-b"]
    assert [a.bytes for a in found] == [1000, 100]
    assert of_gpus([whole, part], 1) == found[:1]
    with pytest.raises(ConfigError, match=r"3 workers are asked for, and there are 2 GPUs"):
        of_gpus([whole, part], 3)
    with pytest.raises(ConfigError, match="by turns in a mesh that stands"):
        of_gpus([whole], 2)  # which no run can do with less


async def test_a_gpu_stands_for_nothing_else() -> None:
    with pytest.raises(ConfigError, match="MESHRL_STAND_FOR"):
        await discover(SystemHost(), "cuda", 0, ["A40"])
