"""Published statistics, with deprecated keys beside the current ones."""

from __future__ import annotations

from dataclasses import fields

from meshrl.common.api import stats
from meshrl.common.api.stats import EngineStats, InstanceStats, KVStats, NodeStats, WorkerStats


def test_deprecated_keys_repeat_published_values_also_in_nested_stats() -> None:
    cache = KVStats(recomputed_tokens=3, loaded_tokens={"disk": 7})
    found = EngineStats(backend="native", kv=cache, late_count=1).encode()
    assert (found["path"], found["late"], found["kv"]["again"]) == ("native", 1, 3)
    assert found["kv"]["loaded"] == found["kv"]["loaded_tokens"] == {"disk": 7}
    assert "decode_curve" not in found and "curve" not in found  # None is not published
    one = InstanceStats("g0.0", "job", "rollout", "ready", "accelerator", 7, 0)
    worker = WorkerStats(slice_holders=("g0.0",), instances=[one]).encode()
    assert worker["turn_of"] == ["g0.0"] and worker["residents"] == worker["instances"]
    assert worker["instances"][0]["resident"] == worker["instances"][0]["instance"] == "g0.0"


def test_published_stats_are_read_back() -> None:
    sent = NodeStats(accepted_services=["shards"], redis_round_trip_ms=0.5, workers=2)
    assert NodeStats.decode(sent.encode()) == sent


def test_deprecated_keys_belong_to_fields() -> None:
    kinds = [one for one in vars(stats).values() if isinstance(one, type)]
    for kind in kinds:
        if issubclass(kind, stats.Stats) and kind is not stats.Stats:
            names = {one.name for one in fields(kind)}  # type: ignore[arg-type]
            assert kind.deprecated_keys.keys() <= names
            assert not names & set(kind.deprecated_keys.values())
