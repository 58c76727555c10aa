"""A run that trains adapters, watched by a monitor and a tracker, whose trainer is killed."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.common.api.weights import Manifest
from meshrl.common.model.files.rows import load_model
from meshrl.common.model.network.lora import is_adapter
from meshrl.common.weights.bulk.port import ChunkStore
from meshrl.common.weights.layout.manifest import read_whole
from meshrl.directory.exporting import export
from tests.load import scaled
from tests.mesh.running import Run, slow_pace

STEPS = 16


def get(address: str, page: str) -> str:
    with urllib.request.urlopen(address + page, timeout=scaled(5.0)) as answer:
        return str(answer.read().decode())


def endpoint_of(run: Run, name: str) -> str:
    return str(run.entry(name).get("metrics", ""))


def kept(run: Run) -> list[Manifest]:
    """Of the versions that the store still has, in the order of steps."""
    chunks = ChunkStore(run.directory / "store")
    digests = [fields["manifest"] for fields in run.events("initial") + run.events("step")]
    return [read_whole(chunks.read, digest) for digest in digests if chunks.has(digest)]


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_adapters_are_trained_published_monitored_and_exported(run: Callable[..., Run]) -> None:
    one = run(
        **{"lora__rank": 4, "optimizer__adamw_lr": 0.01, "budget__steps": STEPS},
        **{"algorithm__filter_zero_variance": "false", "algorithm__max_staleness": 0},
        **{"mesh__workers": 3, "planner__training": 2, "training__checkpoint_every": 3},
        lora__engines="beside",
        # a second or more for a step: there is time to look at it
        rollout__pace=slow_pace(25, 32, 6000),
        tracking__tensorboard="true",
    )
    one.until("a few steps", lambda: one.version >= 4, 90.0)
    of_job = ("trainer/digits", "rollout/digits/0", "sandbox/digits/0")
    for name in (*of_job, "weights", "planner/0"):
        address = one.until(f"{name}'s endpoint", partial(endpoint_of, one, name))
        assert get(address, "/livez") == get(address, "/readyz") == "ok\n"
        assert f'meshrl_live{{job="{one.entry(name)["stats"].get("job", "")}"' in get(
            address, "/metrics"
        )
    pid = one.pid("trainer/digits")
    os.kill(pid, signal.SIGKILL)
    one.pid("trainer/digits", other_than=pid)
    assert export(one.directory, None, False, one.directory / "early") == 0
    assert one.finish() == 0, one.said

    rows = [json.loads(line) for line in (one.directory / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    gaps = [row["logprob_gap"] for row in rows if row["logprob_gap"] is not None]
    assert gaps[-1] < 1e-4 and max(gaps) < 1e-4  # engines compute with the adapters of each version
    assert one.audit()["lost"] == one.audit()["trained_twice"] == 0
    base_stays_and_adapters_move(kept(one))
    exported_and_shown(one.directory)


def base_stays_and_adapters_move(versions: list[Manifest]) -> None:
    frozen = [{t.chunk for t in v.tensors if not is_adapter(t.name)} for v in versions]
    moving = [{t.chunk for t in v.tensors if is_adapter(t.name)} for v in versions]
    assert len(versions) >= 2 and all(chunks == frozen[0] for chunks in frozen)
    assert not any(later & earlier for earlier, later in pairwise(moving))
    alone = [v.base.version for v in versions if v.base is not None]
    assert len(alone) >= len(versions) - 1 and set(alone) == {0}


def exported_and_shown(run_dir: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def matrix(directory: str) -> Any:
        return load_model(run_dir / directory)[1].layers[0].qkv

    final, base, early = matrix("model"), matrix("model/base"), matrix("early")
    assert not torch.equal(final, base) and not torch.equal(early, final)
    about = json.loads((run_dir / "model/adapter/adapter_config.json").read_text())
    assert (about["r"], about["base_model_name_or_path"]) == (4, str(run_dir / "model/base"))
    shown = EventAccumulator(str(run_dir / "tensorboard")).Reload().Scalars("step")
    assert [event.step for event in shown] == list(range(1, STEPS + 1))
