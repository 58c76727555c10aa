"""What a recorder holds and writes of a run of any length, also where Redis refuses writes."""

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

from meshrl.commands.status import diagnosed
from meshrl.common.base.errors import StorageFull
from meshrl.common.base.files.lines import LineFile, read
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.job.config import JobConfig
from meshrl.common.state.events import Event
from meshrl.common.state.redis import embedded
from meshrl.directory.places import MeshPlace, write_json
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.shape import MeshShape
from meshrl.launch.redis import guard
from meshrl.view.history import news
from meshrl.view.recording.recorded import EVENTS, RECENT, Recorded, evaluated, rare_events, thinned
from meshrl.view.recording.recorder import Recorder
from tests.contract.state.state_bench import Server, running_server

JOB = "j"


def event(kind: str, **fields: Any) -> Event:
    return Event("1-0", 0, kind, {"job": JOB} | fields)


def judged(step: int, value: float, best: bool) -> Event:
    return event("evaluation", tag=f"step-{step}", step=step, value=value, best=best)


def told(known: list[Event]) -> list[tuple[str, bool]]:
    return [(e.fields["tag"], e.fields["best"]) for e in evaluated(known, JOB)]


def test_evaluations_of_abandoned_versions_do_not_stand() -> None:
    before = [judged(4, 0.5, True), judged(8, 0.25, False), judged(12, 0.25, False)]
    back = event("lineage", lineage=1, version=8)
    assert told(before) == [("step-4", True), ("step-8", False), ("step-12", False)]
    assert told([*before, back]) == [("step-4", True), ("step-8", False)]
    assert told([*before, back, judged(12, 0.75, True)])[-1] == ("step-12", True)
    other = Event("1-0", 0, "lineage", {"job": "other", "lineage": 1, "version": 0})
    assert told([*before, other]) == told(before)


def test_no_earlier_version_is_the_best_when_the_best_one_is_abandoned() -> None:
    known = [judged(4, 0.5, True), judged(12, 0.75, True)]
    assert told([*known, event("lineage", lineage=1, version=8)]) == [("step-4", False)]


def test_what_was_evaluated_after_training_is_one_on_the_way_once_the_run_is_extended() -> None:
    after = event("evaluation", tag="after", step=3, best=False)
    changes = {"budget.steps": [3, 6]}
    more = event("changed", lineage=0, version=3, extended=True, changes=changes)
    assert told([after, more]) == [("step-3", False)]
    end = event("evaluation", tag="after", step=6, best=False)
    assert told([after, more, end]) == [("step-3", False), ("after", False)]
    other = event("changed", lineage=0, version=3, extended=False, changes={})
    assert told([after, other]) == [("after", False)]
    assert news.told(more) == "from step 4 on: budget.steps 3 -> 6"


@contextmanager
def no_room() -> Iterator[None]:
    """No file of this process may grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_that_stay_outlive_a_full_disk_when_those_after_them_are_cut_off(
    tmp_path: Path,
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"step": step} for step in (1, 2, 3)]
    LineFile(metrics).append(rows)
    document = JobConfig(name=JOB).document()
    write_json(tmp_path / "job.json", {"job": JOB, "document": document})
    recorder = Recorder(Launcher(MeshPlace(tmp_path), MeshShape()), JOB, tmp_path)
    back = [event("lineage", lineage=1, version=2)]
    with no_room(), pytest.raises(StorageFull):
        recorder._abandon(3, back)
    assert read(metrics).rows == recorder.rows == rows
    recorder._abandon(3, back)
    assert read(metrics).rows == recorder.rows == rows[:2]


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server(embedded.find_server()) as found:
        yield found


def no_memory(client: Any, server: Server) -> None:
    client.config_set("maxmemory", 1)


def no_replica(client: Any, server: Server) -> None:
    client.config_set("min-replicas-to-write", 1)


def no_snapshot(client: Any, server: Server) -> None:
    """It cannot write what it has to disk, as when that is full: a directory is in the way."""
    client.config_set("save", "900 1")
    (server.directory / "dump.rdb" / "in the way").mkdir(parents=True)
    client.bgsave()
    while client.info("persistence")["rdb_last_bgsave_status"] == "ok":
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_memory, "Redis refuses writes: command not allowed when used memory"),
        (no_replica, "Redis refuses writes: NOREPLICAS"),
        (no_snapshot, "Redis refuses writes: MISCONF"),
    ],
)
def test_a_redis_that_takes_no_writes_is_named_in_its_own_words(
    server: Server, tmp_path: Path, spoil: Callable[[Any, Server], None], words: str
) -> None:
    place = MeshPlace(tmp_path)
    place.redis.mkdir(parents=True)
    MeshSettings(redis_url=server.url, run_root=str(tmp_path)).to_file(place.settings)
    assert diagnosed(place)[0] == []
    with redis.Redis.from_url(server.url) as client:
        spoil(client, server)
    ((stall,), _) = diagnosed(place)
    assert (stall.waiter, stall.culprit) == ("everyone", "redis")
    assert words in stall.reason
    assert asyncio.run(guard.answers(server.url)), "it is not killed for what its disk does"


MANY = 3 * RECENT


def rows(n: int) -> list[dict[str, Any]]:
    return [{"step": step, "reward": step / n} for step in range(1, n + 1)]


def test_the_last_rows_are_held_and_all_of_them_are_in_the_file(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, "job")
    for row in rows(MANY):
        recorded.add_rows([row])
    assert RECENT <= len(recorded.rows) <= 2 * RECENT
    assert recorded.rows == rows(MANY)[-len(recorded.rows) :]
    assert list(recorded.every_row()) == rows(MANY)
    again = Recorded(tmp_path, "job")
    assert again.rows == rows(MANY)[-RECENT:]
    again.keep_rows(RECENT // 2)  # a new lineage begins before all that is held
    assert again.rows == list(again.every_row()) == rows(MANY)[: RECENT // 2]
    again.add_rows([{"step": RECENT // 2 + 1, "reward": 0.0}])
    assert [row["step"] for row in again.every_row()] == list(range(1, RECENT // 2 + 2))


def test_a_curve_has_some_of_the_rows_evenly_spaced_and_the_last() -> None:
    assert thinned(rows(7), 10) == rows(7)
    for n in (20, 21, 22, 999, 1000):
        found = [row["step"] for row in thinned(rows(n), 10)]
        assert found[0] == 1
        assert found[-1] == n
        assert 10 <= len(found) <= 22
        gaps = [b - a for a, b in pairwise(found[:-1])]
        assert len(set(gaps)) == 1


def test_the_page_of_a_long_run_reads_no_event_of_each_group(tmp_path: Path) -> None:
    told = [("leader", 1), ("opened", 2), ("ready", 3), ("step", 4), ("opened", 5), ("move", 6)]
    file = LineFile(tmp_path / EVENTS)
    file.append({"id": f"{ms}-0", "ms": ms, "kind": kind, "fields": {}} for kind, ms in told)
    assert [e.ms for e in rare_events(tmp_path)] == [1, 2, 3, 4, 6]
