"""Records of runs of any length, also while Redis rejects writes."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis

from meshrl.commands.status import diagnose_run_stalls
from meshrl.common.base.errors import StorageFull
from meshrl.common.base.files.json_lines import LineFile, read_lines
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.job.config import JobConfig
from meshrl.common.state.events import Event
from meshrl.common.state.redis import embedded_server
from meshrl.directory.directory_paths import MeshPaths, write_json
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.mesh_shape import MeshShape
from meshrl.launch.redis import redis_watchdog
from meshrl.view.history import event_text
from meshrl.view.recording.recorder import Recorder
from meshrl.view.recording.run_record import (
    EVENTS_FILE,
    MAX_ROWS_IN_MEMORY,
    RunRecordWriter,
    read_rare_events,
    select_evaluations,
    thin_rows,
)
from tests.contract.state.state_bench import Server, running_server

JOB = "j"


def event(kind: str, **fields: Any) -> Event:
    return Event("1-0", 0, kind, {"job": JOB} | fields)


def make_evaluation(step: int, value: float, best: bool) -> Event:
    return event("evaluation", tag=f"step-{step}", step=step, value=value, best=best)


def list_tags(known: list[Event]) -> list[tuple[str, bool]]:
    return [(e.fields["tag"], e.fields["best"]) for e in select_evaluations(known, JOB)]


def test_evaluations_of_abandoned_versions_are_removed() -> None:
    before = [
        make_evaluation(4, 0.5, True),
        make_evaluation(8, 0.25, False),
        make_evaluation(12, 0.25, False),
    ]
    back = event("lineage", lineage=1, version=8)
    assert list_tags(before) == [("step-4", True), ("step-8", False), ("step-12", False)]
    assert list_tags([*before, back]) == [("step-4", True), ("step-8", False)]
    assert list_tags([*before, back, make_evaluation(12, 0.75, True)])[-1] == ("step-12", True)
    other = Event("1-0", 0, "lineage", {"job": "other", "lineage": 1, "version": 0})
    assert list_tags([*before, other]) == list_tags(before)


def test_no_earlier_version_becomes_best_when_the_best_is_abandoned() -> None:
    known = [make_evaluation(4, 0.5, True), make_evaluation(12, 0.75, True)]
    assert list_tags([*known, event("lineage", lineage=1, version=8)]) == [("step-4", False)]


def test_final_evaluation_becomes_an_intermediate_one_when_the_run_is_extended() -> None:
    after = event("evaluation", tag="after", step=3, best=False)
    changes = {"budget.steps": [3, 6]}
    more = event("changed", lineage=0, version=3, extended=True, changes=changes)
    assert list_tags([after, more]) == [("step-3", False)]
    end = event("evaluation", tag="after", step=6, best=False)
    assert list_tags([after, more, end]) == [("step-3", False), ("after", False)]
    other = event("changed", lineage=0, version=3, extended=False, changes={})
    assert list_tags([after, other]) == [("after", False)]
    assert event_text.format_event(more) == "from step 4 on: budget.steps 3 -> 6"


@contextmanager
def no_room() -> Iterator[None]:
    """Limit the file size so that no file of this process can grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_kept_rows_survive_truncation_on_a_full_disk(
    tmp_path: Path,
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"step": step} for step in (1, 2, 3)]
    LineFile(metrics).append(rows)
    document = JobConfig(name=JOB).to_document()
    write_json(tmp_path / "job.json", {"job": JOB, "document": document})
    recorder = Recorder(Launcher(MeshPaths(tmp_path), MeshShape()), JOB, tmp_path)
    back = [event("lineage", lineage=1, version=2)]
    with no_room(), pytest.raises(StorageFull):
        recorder._drop_abandoned_rows(3, back)
    assert read_lines(metrics).rows == recorder.rows == rows
    recorder._drop_abandoned_rows(3, back)
    assert read_lines(metrics).rows == recorder.rows == rows[:2]


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server(embedded_server.find_server()) as found:
        yield found


def limit_memory(client: Any, server: Server) -> None:
    client.config_set("maxmemory", 1)


def require_replica(client: Any, server: Server) -> None:
    client.config_set("min-replicas-to-write", 1)


def break_snapshots(client: Any, server: Server) -> None:
    """Make snapshots of the server fail, as on a full disk: a directory is in the way."""
    client.config_set("save", "900 1")
    (server.directory / "dump.rdb" / "in the way").mkdir(parents=True)
    client.bgsave()
    while client.info("persistence")["rdb_last_bgsave_status"] == "ok":
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (limit_memory, "Redis rejects writes: command not allowed when used memory"),
        (require_replica, "Redis rejects writes: NOREPLICAS"),
        (break_snapshots, "Redis rejects writes: MISCONF"),
    ],
)
def test_redis_that_rejects_writes_is_reported_in_its_own_words(
    server: Server, tmp_path: Path, spoil: Callable[[Any, Server], None], words: str
) -> None:
    place = MeshPaths(tmp_path)
    place.redis_directory.mkdir(parents=True)
    MeshSettings(redis_url=server.url, run_root=str(tmp_path)).to_file(place.settings)
    assert diagnose_run_stalls(place)[0] == []
    with redis.Redis.from_url(server.url) as client:
        spoil(client, server)
    ((stall,), _) = diagnose_run_stalls(place)
    assert (stall.waiter, stall.culprit) == ("all processes", "redis")
    assert words in stall.reason
    assert asyncio.run(redis_watchdog.is_answering(server.url)), (
        "it is not killed for what its disk does"
    )


MANY = 3 * MAX_ROWS_IN_MEMORY


def rows(n: int) -> list[dict[str, Any]]:
    return [{"step": step, "reward": step / n} for step in range(1, n + 1)]


def test_recent_rows_stay_in_memory_and_all_rows_in_the_file(tmp_path: Path) -> None:
    recorded = RunRecordWriter(tmp_path, "job")
    for row in rows(MANY):
        recorded.add_rows([row])
    assert MAX_ROWS_IN_MEMORY <= len(recorded.recent_rows) <= 2 * MAX_ROWS_IN_MEMORY
    assert recorded.recent_rows == rows(MANY)[-len(recorded.recent_rows) :]
    assert list(recorded.iterate_rows()) == rows(MANY)
    again = RunRecordWriter(tmp_path, "job")
    assert again.recent_rows == rows(MANY)[-MAX_ROWS_IN_MEMORY:]
    again.truncate_rows(MAX_ROWS_IN_MEMORY // 2)  # the new lineage begins before all rows in memory
    assert again.recent_rows == list(again.iterate_rows()) == rows(MANY)[: MAX_ROWS_IN_MEMORY // 2]
    again.add_rows([{"step": MAX_ROWS_IN_MEMORY // 2 + 1, "reward": 0.0}])
    assert [row["step"] for row in again.iterate_rows()] == list(
        range(1, MAX_ROWS_IN_MEMORY // 2 + 2)
    )


def test_thinned_curve_has_evenly_spaced_rows_and_the_last() -> None:
    assert thin_rows(rows(7), 10) == rows(7)
    for n in (20, 21, 22, 999, 1000):
        found = [row["step"] for row in thin_rows(rows(n), 10)]
        assert found[0] == 1
        assert found[-1] == n
        assert 10 <= len(found) <= 22
        gaps = [b - a for a, b in pairwise(found[:-1])]
        assert len(set(gaps)) == 1


def test_page_of_a_long_run_skips_events_of_single_groups(tmp_path: Path) -> None:
    kinds = [
        ("leader", 1),
        ("opened", 2),
        ("ready", 3),
        ("step", 4),
        ("opened", 5),
        ("move", 6),
    ]
    file = LineFile(tmp_path / EVENTS_FILE)
    file.append({"id": f"{ms}-0", "ms": ms, "kind": kind, "fields": {}} for kind, ms in kinds)
    assert [e.ms for e in read_rare_events(tmp_path)] == [1, 2, 3, 4, 6]
