"""Experiment trackers: their output, and runs that continue when a tracker fails."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import JobConfig, TrackingConfig
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state.events import Event
from meshrl.directory.directory_paths import read_json
from meshrl.job import job_reader
from meshrl.job.checks.job_file.optional_keys import list_trackers
from meshrl.view.trackers.tracker_processes import (
    TrackerLimits,
    TrackerProcess,
    TrackerProgress,
    Trackers,
    flatten_scalars,
)
from tests.load import scaled
from tests.unit.meshrl.view.test_samples import sample

ROOT = Path(__file__).parents[5]
CHILD = """
import json, os, sys, time
sys.path.insert(0, {root!r})
from meshrl.common.mesh.process.entry.child import ChildChannel
channel = ChildChannel.from_env()
about = json.loads(channel.recv())
shown = open(about["target"], "a")
"""
OBEDIENT = (
    CHILD
    + """
channel.send(b"ready")
while (frame := channel.recv()) is not None:
    for record in json.loads(frame):
        print(json.dumps(record), file=shown, flush=True)
    channel.send(b"shown")
"""
)
HANGING = CHILD + 'channel.send(b"ready"); time.sleep(600)'
BROKEN = CHILD + 'print("no", file=shown, flush=True); print("no login", flush=True); os._exit(3)'
FORGETFUL = (
    CHILD
    + """
channel.send(b"ready")
records = json.loads(channel.recv())
print(json.dumps(records[0]), file=shown, flush=True)
os._exit(1)
"""
)


@pytest.fixture(autouse=True)
def python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def rows(first: int, last: int) -> list[dict[str, Any]]:
    return [
        {"step": n, "wall": 1e9 + n, "reward_mean": n / 8, "workers": {"g0": 1.5}, "gap": None}
        for n in range(first, last + 1)
    ]


def evaluation(tag: str, step: int, lineage: int = 0) -> Event:
    fields = {"job": "j", "tag": tag, "step": step, "sampled": 0.5, "manifest": "abc"}
    return Event("1-0", 1_000_000_500, "evaluation", fields | {"lineage": lineage})


LIMITS = TrackerLimits(
    max_queued=160, show_timeout_s=1.0, close_timeout_s=2.0, retry_s=0.05, max_failures=3
)


def relaxed_limits() -> TrackerLimits:
    """Return limits that a tracker also meets on a slow machine."""
    return replace(LIMITS, show_timeout_s=scaled(20.0), close_timeout_s=scaled(20.0))


class Program:
    """Tracker whose process runs a script of the test."""

    def __init__(self, directory: Path, code: str) -> None:
        script = directory / "tracker.py"
        script.write_text(code.format(root=str(ROOT)) if "{root" in code else code)
        self.shown = directory / "shown.jsonl"
        self.tracker = TrackerProcess(
            "tensorboard",
            [sys.executable, str(script)],
            {"target": str(self.shown)},
            TrackerProgress("j-1"),
            SystemHost(),
            SystemClock(),
            directory / "tracker.log",
            LIMITS if code == HANGING else relaxed_limits(),
        )
        self.all = Trackers([self.tracker], directory / "tracking.json")

    def steps(self) -> list[int]:
        lines = self.shown.read_text().splitlines() if self.shown.exists() else []
        return [json.loads(line)["step"] for line in lines if line.startswith("{")]


@pytest.fixture
async def program(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Program]:
    made = Program(tmp_path, request.param)
    yield made
    if made.tracker._task is not None:
        made.tracker._task.cancel()
        await asyncio.wait([made.tracker._task])


async def until(condition: Any, within_s: float = 20.0) -> None:
    end = time.monotonic() + scaled(within_s)
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


def test_scalars_are_finite_numbers_named_by_path() -> None:
    row = {"a": 1, "b": {"c": 2.5, "d": {"e": True}}, "f": None, "g": "x", "h": math.nan, "i": [1]}
    assert flatten_scalars(row) == {"a": 1.0, "b/c": 2.5, "b/d/e": 1.0}
    assert flatten_scalars({"x": math.inf, "y": -math.inf}) == {}


@pytest.mark.parametrize("program", [OBEDIENT], indirect=True)
async def test_records_are_shown_once_and_in_order(program: Program, tmp_path: Path) -> None:
    program.all.enqueue(rows(1, 150), [])
    program.all.enqueue([], [evaluation("before", 0)])
    await program.all.close()
    assert program.steps() == [*range(1, 151), 0]
    last = json.loads(program.shown.read_text().splitlines()[-1])
    assert last["values"] == {"evaluation/sampled": 0.5} and last["wall"] == 1_000_000.5
    kept = read_json(tmp_path / "tracking.json")["tensorboard"]
    assert (kept["step"], kept["shown_evaluations"], kept["dropped"]) == (150, ["before"], 0)
    assert kept["last_error"] == ""


@pytest.mark.parametrize("program", [OBEDIENT], indirect=True)
async def test_resumed_run_shows_only_new_records(program: Program) -> None:
    program.tracker.progress.step, program.tracker.progress.shown_evaluations = 4, ["before"]
    program.all.enqueue(rows(1, 6), [evaluation("before", 0), evaluation("after", 6)])
    await program.all.close()
    assert program.steps() == [5, 6, 6]


@pytest.mark.parametrize("program", [OBEDIENT], indirect=True)
async def test_steps_of_an_abandoned_lineage_are_rewound(program: Program) -> None:
    program.all.enqueue(rows(1, 5), [])
    await until(lambda: program.tracker.progress.step == 5)
    program.all.rewind(3)
    program.all.enqueue(rows(4, 4), [])
    await program.all.close()
    kinds = [json.loads(line)["kind"] for line in program.shown.read_text().splitlines()]
    assert kinds == ["row"] * 5 + ["rewind", "row"]
    assert program.steps()[-2:] == [3, 4] and program.tracker.progress.step == 4


@pytest.mark.parametrize("program", [OBEDIENT], indirect=True)
async def test_version_evaluated_in_another_lineage_is_shown_again(
    program: Program,
) -> None:
    program.all.enqueue(rows(1, 5), [evaluation("step-4", 4)])
    await until(lambda: bool(program.tracker.progress.shown_evaluations))
    program.all.rewind(3)
    program.all.enqueue(rows(4, 4), [evaluation("step-4", 4, lineage=1)])
    await program.all.close()
    assert program.steps() == [1, 2, 3, 4, 5, 4, 3, 4, 4]
    assert program.tracker.progress.shown_evaluations == ["step-4", "step-4@1"]


@pytest.mark.parametrize("program", [HANGING], indirect=True)
async def test_hanging_tracker_drops_its_records_without_delay(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program.all.enqueue(rows(1, 250), [])
    assert program.tracker.progress.dropped == 90
    await until(program.shown.exists)
    started_s = time.monotonic()
    await program.all.close()
    assert time.monotonic() - started_s < scaled(10.0)
    assert program.tracker.progress.dropped == 250
    assert "250 records were not shown" in capsys.readouterr().err


@pytest.mark.parametrize("program", [BROKEN], indirect=True)
async def test_tracker_that_does_not_start_is_given_up(program: Program) -> None:
    program.all.enqueue(rows(1, 2), [])
    await until(lambda: "abandoned" in program.tracker.progress.last_error)
    assert ": no login; the tracker" in program.tracker.progress.last_error  # its own words
    program.all.enqueue(rows(3, 3), [])
    await program.all.close()
    assert program.tracker.progress.dropped == 3
    assert program.shown.read_text() == "no\n" * LIMITS.max_failures


@pytest.mark.parametrize("program", [FORGETFUL], indirect=True)
async def test_unconfirmed_record_is_shown_again_after_a_crash(program: Program) -> None:
    program.all.enqueue(rows(1, 2), [])
    await until(lambda: "abandoned" in program.tracker.progress.last_error)
    assert program.steps() == [1] * LIMITS.max_failures
    await program.all.close()


# -- real trackers ------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """Make a run directory without trackers."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    yield run_dir


def make_trackers(run_dir: Path) -> Trackers:
    path = run_dir / "tracking.json"
    known = read_json(path) if path.is_file() else {}
    return Trackers.from_job_file(
        run_dir, read_json(run_dir / "job.json"), known, SystemHost(), SystemClock()
    )


async def run_tracker(run_dir: Path, **tracking: Any) -> dict[str, Any]:
    """Show three rows and an evaluation in two sessions; return the tracker's progress."""
    document = JobConfig(tracking=TrackingConfig(**tracking)).to_document()
    (run_dir / "job.json").write_text(json.dumps({"job": "j", "document": document}))
    kept_one = sample(0, 0.5, set="held_out.greedy", evaluation="before")
    (run_dir / "samples.jsonl").write_text(json.dumps(kept_one) + "\n")
    for last in (2, 3):
        told = make_trackers(run_dir)
        told.enqueue(rows(1, last), [evaluation("before", 0)])
        await told.close()
    (name,) = tracking
    kept: dict[str, Any] = read_json(run_dir / "tracking.json")[name]
    log = run_dir / f"mesh/logs/{name}.log"
    assert kept["dropped"] == 0 and kept["last_error"] == "", log.read_text()
    assert (kept["step"], kept["shown_evaluations"]) == (3, ["before"])
    return kept


async def test_tensorboard_reads_the_event_files(run: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    await run_tracker(run, tensorboard=True)
    read = EventAccumulator(str(run / "tensorboard")).Reload()
    found = [(e.step, e.value, e.wall_time) for e in read.Scalars("reward_mean")]
    assert found == [(n, n / 8, 1e9 + n) for n in (1, 2, 3)]
    assert [e.value for e in read.Scalars("evaluation/sampled")] == [0.5]
    assert [e.value for e in read.Scalars("workers/g0")] == [1.5] * 3
    (table,) = read.Tensors("evaluation/samples")
    assert b"held_out.greedy" in table.tensor_proto.string_val[0]
    assert b"it is <0>" in table.tensor_proto.string_val[0]


async def test_tensorboard_discards_an_abandoned_lineage(run: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    document = JobConfig(tracking=TrackingConfig(tensorboard=str(run / "tb"))).to_document()
    (run / "job.json").write_text(json.dumps({"job": "j", "document": document}))
    told = make_trackers(run)
    told.enqueue(rows(1, 4), [])
    await until(lambda: told.trackers[0].progress.step == 4)
    told.rewind(2)
    again = rows(3, 3)
    again[0]["reward_mean"] = 7.0
    told.enqueue(again, [])
    await told.close()
    read = EventAccumulator(str(run / "tb")).Reload()
    values = [(e.step, e.value) for e in read.Scalars("reward_mean")]
    assert values == [(1, 0.125), (2, 0.25), (3, 7.0)]


@pytest.mark.deep
async def test_wandb_writes_an_offline_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    kept = await run_tracker(run, wandb="meshrl-tests")
    found = wandb_history(run, f"wandb/offline-run-*-{kept['id']}/*.wandb")
    rewards = [(row["step"], row["reward_mean"]) for row in found if "reward_mean" in row]
    assert rewards == [(1, 0.125), (2, 0.25), (3, 0.375)]
    assert [r["evaluation/sampled"] for r in found if "evaluation/sampled" in r] == [0.5]


def wandb_history(directory: Path, pattern: str) -> list[dict[str, float]]:
    """Return the rows of .wandb files in the order of their sessions."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2  # protobuf generates its classes at run time

    records = [
        messages.Record.FromString(content)
        for file in sorted(directory.glob(pattern))
        for content in leveldb_log(file.read_bytes()[7:])
    ]
    return [
        {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]


def leveldb_log(content: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format whose first block is 7 bytes short."""
    at, whole = 0, b""
    while at + 7 <= len(content):
        left = 32768 - (at + 7) % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a full record or its last fragment
            yield whole
            whole = b""


@pytest.mark.deep
async def test_trackio_writes_a_local_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kept = await run_tracker(run, trackio="meshrl-tests")
    read = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S; "
        "logs = S.get_logs('meshrl-tests', sys.argv[1]); "
        "tables = sum('evaluation/samples' in r for r in logs); "
        "print(json.dumps([[[r['step'], r.get('reward_mean')] for r in logs], tables]))"
    )
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", read, kept["id"]),
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ),
    )
    said, _ = await program.communicate()
    logs, tables = json.loads(said)
    assert [r for r in logs if r[1] is not None] == [[1, 0.125], [2, 0.25], [3, 0.375]]
    assert tables == 1


# -- the job file ---------------------------------------------------------------------------------


def test_job_file_enables_each_tracker(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    lines = ["tracking.tensorboard=true", "tracking.wandb=one", "tracking.trackio=two"]
    config, _ = job_reader.load_config(job, lines)
    assert config.tracking == TrackingConfig(True, "one", "two")
    assert list_trackers(config) == ["tensorboard", "wandb", "trackio"]
    assert JobConfig.from_document(config.to_document()).tracking == config.tracking
    assert job_reader.load_config(job, ["tracking.tensorboard=some/where"])[
        0
    ].tracking == TrackingConfig("some/where")
    with pytest.raises(ConfigError, match="true or false, or a string, not 3"):
        job_reader.load_config(job, ["tracking.tensorboard=3"])


def test_missing_package_is_reported_before_the_job_starts(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ConfigError, match=r"wandb is not installed.*pip install 'meshrl\[tracking\]"
    ):
        job_reader.load_config(job, ["tracking.wandb=mine"])


@pytest.mark.parametrize(
    "variables, netrc, settings, says",
    [
        ({}, "", "", "has no key for api.wandb.ai"),
        ({"WANDB_MODE": "offline"}, "", "", ""),
        ({"WANDB_API_KEY": "abc"}, "", "", "has 3 characters"),
        ({"WANDB_API_KEY": "local-" + "a" * 40}, "", "", ""),
        ({}, "machine api.wandb.ai login user password abc", "", ""),
        ({}, "machine example.org login user password abc", "", "has no key"),
        ({}, "machine", "", "has no key"),
        ({}, "", "[default]\nmode = offline\n", ""),
        ({}, "", "[default]\nbase_url = https://wandb.example.org\n", "key for wandb.example.org"),
    ],
)
def test_missing_wandb_key_is_reported_before_the_job_starts(
    job: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    netrc: str,
    settings: str,
    says: str,
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "netrc").write_text(netrc)
    (tmp_path / "settings").write_text(settings)
    places = {"NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path)}
    for name, value in (places | variables).items():
        monkeypatch.setenv(name, value)
    if says:
        with pytest.raises(ConfigError, match=f"tracking.wandb: .*{says}.*wandb login"):
            job_reader.load_config(job, ["tracking.wandb=mine"])
    else:
        job_reader.load_config(job, ["tracking.wandb=mine"])
