"""SGLang servers of a real mesh, one of which is killed while it generates."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from meshrl.common.generation.builtin.engine_builder import build_engine
from meshrl.common.job.bundle.model_shape import load_model_config
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.layout.version_image import open_verified_image
from meshrl.services.rollout.standalone.console import load_job
from tests.mesh.faults.test_killed_processes import (
    assert_nothing_lost,
    read_ledger,
    read_trained_groups,
)
from tests.mesh.running import Run
from tests.sglang.interpreter import python
from tests.sglang.processes import pids_of_session, title_of
from tests.unit.common.generation.engines_under_test import Listener, request

MAX_TOKENS = 2000  # seconds of a server, so that it is killed in mid-stream
START_S = 400.0  # of two servers at once on a shared machine


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Run]:
    """Start a run with two servers, of which the most likely token is sampled."""
    run = Run(
        tmp_path,
        mesh__workers=3,
        rollout__engine="sglang",
        rollout__sglang_python=python(),
        rollout__top_k=1,
        algorithm__correction="tis",
        rollout__max_tokens=MAX_TOKENS,
        rollout__stop="[]",
        algorithm__max_staleness=0,
        algorithm__filter_zero_variance="false",
        algorithm__groups_per_step=8,
        algorithm__group_size=4,
        budget__steps=1,
    )
    yield run
    run.end()


def find_engines(mesh: Run) -> list[str]:
    keys = mesh.redis.keys("{mesh}:entry:engine/*")
    return sorted(str(key).removeprefix("{mesh}:entry:") for key in keys)


def find_busy_engine(mesh: Run) -> str:
    """Return an engine that has generated tokens, once two are there; empty before."""
    engines = {name: mesh.entry(name) for name in find_engines(mesh)}
    busy = [name for name, entry in engines.items() if entry and entry["stats"].get("tokens")]
    return busy[0] if busy and len(engines) == 2 else ""


def count_continued(mesh: Run) -> int:
    """Return the number of trajectories that moved after a failure of their engine."""
    stats = mesh.entry("rollout/digits/0").get("stats", {})
    return int(stats.get("continued", 0))


def kill_server(engine: int) -> int:
    """Kill all processes of an engine's server at once, and return their number."""
    sessions = {
        os.getsid(one.pid)
        for one in psutil.Process(engine).children(recursive=True)
        if "sglang" in title_of(one.pid)
    }
    (session,) = sessions - {os.getsid(engine)}
    server = pids_of_session(session)
    for pid in server:
        os.kill(pid, signal.SIGKILL)
    return len(server)


def generate_alone(mesh: Run, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """Return the greedy continuations of prompts by the built-in engine and version 0."""
    (initial,) = mesh.events("initial")
    image = open_verified_image(ChunkStore(mesh.directory / "store"), initial["manifest"])
    config = load_model_config(load_job(mesh.directory, "compare"))
    engine = build_engine(config, len(prompts), MAX_TOKENS, backend="eager")
    engine.wake(dict(image.tensors), 0)
    requests = [
        request(id, tokens, max_new=MAX_TOKENS - len(tokens), temperature=0.0)
        for id, tokens in prompts.items()
    ]
    heard = Listener(engine).run(*requests)
    return {id: [*tokens, *heard[id].tokens] for id, tokens in prompts.items()}


def test_requests_of_a_killed_server_continue_exactly_elsewhere(
    mesh: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = mesh.until("a busy engine", lambda: find_busy_engine(mesh), START_S)
    processes = kill_server(mesh.pid(engine))
    left = read_ledger(mesh.copy_ledger(tmp_path / "left"))
    continued = mesh.until("a continued trajectory", lambda: count_continued(mesh))
    mesh.finish()  # members of a group are equal, so its status is that it has not learned
    assert_nothing_lost(mesh, 1)
    trained = read_trained_groups(mesh)
    half = {t.id: t for t in left.values() if t.prompt_length < t.length < len(trained[t.id])}
    prompts = {id: t.tokens[: t.prompt_length].tolist() for id, t in left.items()}
    expected = generate_alone(mesh, prompts)
    found = {id: np.asarray(tokens).tolist() for id, tokens in trained.items()}
    figures = {
        "killed_processes": processes,
        "trajectories": len(trained),
        "continued": continued,
        "unfinished": len(half),
        "tokens_before": sum(t.length - t.prompt_length for t in half.values()),
        "tokens": sum(map(len, found.values())),
        "differing_trajectories": sum(found[id] != expected[id] for id in found),
    }
    with capsys.disabled():
        print(f"\nkilled server: {json.dumps(figures)}")
    assert half and found == expected
