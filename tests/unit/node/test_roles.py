"""From a gang's record to a command line, and from a host to its accelerators."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.process.host import SystemHost
from services.node.accelerators import cpu_slots, discover, parsed, shared
from services.node.roles import COMMANDS, Assignment, with_overrides


def test_each_role_has_its_process_and_its_name_in_the_registry() -> None:
    engine = Assignment("rollout", "calc", False, 3)
    core = Assignment("training", "calc", True, 4)
    hybrid = Assignment("training", "calc", False, 4)
    frozen = Assignment("scoring", "calc", False, 4)
    assert [a.name("g1") for a in (engine, core, hybrid, frozen)] == [
        "engine/g1",
        "trainer/calc",
        "hybrid/g1",
        "scoring/calc",
    ]
    assert engine.argv("g1", COMMANDS) == [
        *[sys.executable, "-m", "services.engine"],
        *["--gang", "g1", "--job", "calc", "--epoch", "3"],
    ]
    assert core.argv("g1", COMMANDS)[-1] == "--core"
    second = Assignment("training", "calc", True, 4, rank=1, ranks=2)
    assert second.name("g0") == "rank/calc/1"
    assert second.argv("g0", COMMANDS)[-5:] == ["--core", "--rank", "1", "--ranks", "2"]
    with pytest.raises(ConfigError, match="no process serves the role 'serving'"):
        Assignment("serving", "calc", False, 1).argv("g1", COMMANDS)


def test_commands_are_replaced_by_role() -> None:
    commands = with_overrides(["rollout=" + shlex.join(["python", "a b"]), "serving=x"])
    assert commands["rollout"] == ["python", "a b"] and commands["serving"] == ["x"]
    assert commands["training"] == COMMANDS["training"]
    for wrong in ("rollout", "rollout="):
        with pytest.raises(ConfigError):
            with_overrides([wrong])


def test_slots_see_one_accelerator_each() -> None:
    assert [a.name for a in cpu_slots(2)] == ["cpu:0", "cpu:1"]
    gpus = parsed("0, NVIDIA H200\n1, NVIDIA H200\nNo devices were found\n")
    assert gpus == [("0", "NVIDIA H200"), ("1", "NVIDIA H200")]
    assert [a.name for a in shared(gpus, 0)] == ["cuda:0 NVIDIA H200", "cuda:1 NVIDIA H200"]
    assert [a.env["CUDA_VISIBLE_DEVICES"] for a in shared(gpus, 3)] == ["0", "1", "0"]


async def test_a_host_without_gpus_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r'mesh\.device = "cpu"'):
        await discover(SystemHost(), "cuda", 0, tmp_path)
