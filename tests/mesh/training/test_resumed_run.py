"""Resumed runs, replayed steps, and training of adapters."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtests.replay.runs import DEATHS, JOB, one_run
from meshrl.common.api.weights import Manifest
from meshrl.common.model.files.initial_parameters import load_model
from meshrl.common.model.network.lora import is_adapter_tensor
from meshrl.common.weights.bulk.port import ChunkStore
from meshrl.common.weights.layout.manifest import read_complete_manifest
from meshrl.directory.model_export import export_model
from meshrl.launch import leftover_processes
from tests.load import scaled
from tests.mesh.running import Run, slow_pace

STEPS, STALENESS = 10, 1


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_resumed_run_accounts_for_all_groups_within_its_staleness(
    run: Callable[..., Run],
) -> None:
    mesh = run(
        budget__steps=STEPS,
        algorithm__max_staleness=STALENESS,
        algorithm__filter_zero_variance="false",
        training__checkpoint_every=2,
        rollout__pace=slow_pace(10, 64, 100000),
    )
    mesh.until("three steps and groups under way in the record", lambda: list_in_flight(mesh, 3))
    first = mesh.pid("trainer/digits")
    crash(mesh)

    mesh.resume()
    second = mesh.pid("trainer/digits", other_than=first)
    mesh.until("six steps", lambda: mesh.version >= 6)
    os.kill(second, signal.SIGKILL)  # unfinished when the run ends
    mesh.end()
    shutil.rmtree(mesh.directory / "mesh/redis")
    for path in mesh.directory.glob("store/??/*"):  # no file is retained as recent
        os.utime(path, (0, 0))

    mesh.resume()
    assert mesh.finish() == 0, mesh.output
    summary, found = mesh.summary(), mesh.audit()
    assert (summary["phase"], summary["steps"]) == ("finished", STEPS)
    assert (found["lost"], found["trained_twice"]) == (0, 0)
    written = [mesh.directory, *mesh.directory.rglob("*")]
    assert [p for p in written if not p.is_symlink() and p.stat().st_mode & 0o077] == []
    lines = (mesh.directory / "metrics.jsonl").read_text().splitlines()
    staleness = [
        step["staleness_max"] for step in map(json.loads, lines) if "staleness_max" in step
    ]
    assert len(staleness) >= STEPS and max(staleness) <= STALENESS
    steps: dict[int, list[int]] = {0: [], 1: []}
    for event in mesh.events("step"):
        steps[event["lineage"]].append(event["step"])
    assert steps[0] == list(range(1, len(steps[0]) + 1)), "Redis went on from where it was"
    assert len(steps[0]) >= 6
    assert steps[1] == list(range(steps[1][0], STEPS + 1))
    assert steps[1][0] <= len(steps[0]) + 1, "without it, from the last checkpoint"


def list_in_flight(mesh: Run, steps: int) -> set[int]:
    """Return the groups that were opened and not trained on, once there were so many steps."""
    trained = [row["group"] for event in mesh.events("step") for row in event["groups"]]
    opened = {group for event in mesh.events("opened") for group in event["groups"]}
    return opened - set(trained) if len(mesh.events("step")) >= steps else set()


def crash(mesh: Run) -> None:
    """Kill everything at once; the remaining record accounts for each trajectory."""
    mesh.program.send_signal(signal.SIGKILL)
    mesh.program.wait(scaled(10.0))
    assert not (mesh.directory / "in_flight.json").exists()
    found = mesh.audit()
    assert (found["lost"], found["trained_twice"]) == (0, 0), found
    assert found["trained"] >= 3 * 2 * 4 and found["in_flight"] > 0
    end_mesh((mesh.directory / "mesh/settings.json").resolve())


def end_mesh(settings: Path) -> None:
    """End processes that wait for an agent that does not return: workers wait a minute."""
    asyncio.run(leftover_processes.kill_leftovers(settings, scaled(5.0)))
    assert leftover_processes.find_leftovers(settings) == []


ADAPTED_STEPS = 16


def fetch_page(address: str, page: str) -> str:
    with urllib.request.urlopen(address + page, timeout=scaled(5.0)) as answer:
        return str(answer.read().decode())


def endpoint_of(run: Run, name: str) -> str:
    return str(run.entry(name).get("metrics", ""))


def list_retained_manifests(run: Run) -> list[Manifest]:
    """Return the manifests of the versions that the store still has, in the order of steps."""
    chunks = ChunkStore(run.directory / "store")
    digests = [fields["manifest"] for fields in run.events("initial") + run.events("step")]
    return [read_complete_manifest(chunks.read, digest) for digest in digests if chunks.has(digest)]


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_adapters_are_trained_published_monitored_and_exported(run: Callable[..., Run]) -> None:
    one = run(
        **{"lora__rank": 4, "optimizer__adamw_lr": 0.01, "budget__steps": ADAPTED_STEPS},
        **{"algorithm__filter_zero_variance": "false", "algorithm__max_staleness": 0},
        **{"mesh__workers": 3, "planner__training": 2, "training__checkpoint_every": 3},
        lora__engines="beside",
        # a second or more per step, so that the test can read its state
        rollout__pace=slow_pace(25, 32, 6000),
        tracking__tensorboard="true",
    )
    one.until("a few steps", lambda: one.version >= 4, 90.0)
    of_job = ("trainer/digits", "rollout/digits/0", "sandbox/digits/0")
    for name in (*of_job, "weights", "planner/0"):
        address = one.until(f"{name}'s endpoint", partial(endpoint_of, one, name))
        assert fetch_page(address, "/livez") == fetch_page(address, "/readyz") == "ok\n"
        assert f'meshrl_live{{job="{one.entry(name)["stats"].get("job", "")}"' in fetch_page(
            address, "/metrics"
        )
    pid = one.pid("trainer/digits")
    os.kill(pid, signal.SIGKILL)
    one.pid("trainer/digits", other_than=pid)
    assert export_model(one.directory, None, False, one.directory / "early") == 0
    assert one.finish() == 0, one.output

    rows = [json.loads(line) for line in (one.directory / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(1, ADAPTED_STEPS + 1))
    gaps = [row["logprob_gap"] for row in rows if row["logprob_gap"] is not None]
    assert gaps[-1] < 1e-4 and max(gaps) < 1e-4  # engines compute with the adapters of each version
    assert one.audit()["lost"] == one.audit()["trained_twice"] == 0
    assert_only_adapters_change(list_retained_manifests(one))
    assert_exported_and_shown(one.directory)


def assert_only_adapters_change(versions: list[Manifest]) -> None:
    frozen = [{t.chunk for t in v.tensors if not is_adapter_tensor(t.name)} for v in versions]
    moving = [{t.chunk for t in v.tensors if is_adapter_tensor(t.name)} for v in versions]
    assert len(versions) >= 2 and all(chunks == frozen[0] for chunks in frozen)
    assert not any(later & earlier for earlier, later in pairwise(moving))
    alone = [v.base.version for v in versions if v.base is not None]
    assert len(alone) >= len(versions) - 1 and set(alone) == {0}


def assert_exported_and_shown(run_dir: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def matrix(directory: str) -> Any:
        return load_model(run_dir / directory)[1].layers[0].qkv

    final, base, early = matrix("model"), matrix("model/base"), matrix("early")
    assert not torch.equal(final, base) and not torch.equal(early, final)
    about = json.loads((run_dir / "model/adapter/adapter_config.json").read_text())
    assert (about["r"], about["base_model_name_or_path"]) == (4, str(run_dir / "model/base"))
    shown = EventAccumulator(str(run_dir / "tensorboard")).Reload().Scalars("step")
    assert [event.step for event in shown] == list(range(1, ADAPTED_STEPS + 1))


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return one_run(JOB, tmp_path_factory.mktemp("undisturbed") / "one")


@pytest.mark.timeout(300)
@pytest.mark.group("replayed steps")
@pytest.mark.rotating(2 * len(DEATHS))  # units of the trainer replay steps daily
@pytest.mark.parametrize("deaths", DEATHS, ids=" ".join)
def test_steps_replay_bit_by_bit_after_a_trainer_loss_at_any_point(
    deaths: Sequence[str], uninterrupted_run: dict[str, Any], tmp_path: Path
) -> None:
    run = one_run(JOB, tmp_path / "one", deaths)
    assert run["deaths"] == sorted(deaths)
    assert run["manifests"] == uninterrupted_run["manifests"]
    assert run["lineages"] == [0]
    assert (run["lost"], run["trained_twice"]) == (0, 0)
