"""Which versions a job's table `[weights]` keeps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshrl.services.weights.keeping.retention import Number, chain, lasting

LINEAR = {f"0.{n}": Number(0, n) for n in range(13)}


def test_the_newest_and_each_kth_stay() -> None:
    kept = lasting(LINEAR, Number(0, 11), {"keep": 2, "keep_every": 4})
    assert kept == {"0.10": "keep", "0.11": "keep", "0.4": "keep_every", "0.8": "keep_every"}


def test_without_the_table_the_current_one_stays() -> None:
    assert lasting(LINEAR, Number(0, 5), {}) == {"0.5": "keep"}
    assert lasting({}, Number(0, -1), {"keep": 3}) == {}


def test_what_a_new_lineage_has_left_behind_counts_no_more() -> None:
    versions = LINEAR | {"1.5": Number(1, 5), "1.6": Number(1, 6)}
    kept = lasting(versions, Number(1, 6), {"keep": 3, "keep_every": 4})
    assert set(kept) == {"0.4", "1.5", "1.6"}, "8 and 12 of the lineage before lead nowhere"


def test_a_version_that_was_staged_twice_stays_twice() -> None:
    versions = {"a": Number(0, 1), "b": Number(0, 1)}
    assert chain(versions, Number(0, 1)) == {1: ["a", "b"]}


numbers = st.builds(Number, st.integers(0, 3), st.integers(0, 20))


@given(st.dictionaries(st.text(min_size=1, max_size=3), numbers), numbers, st.integers(1, 6))
def test_of_each_number_up_to_the_current_one_the_last_lineage_counts(
    versions: dict[str, Number], current: Number, keep: int
) -> None:
    led = chain(versions, current)
    reachable = {
        m: n
        for m, n in versions.items()
        if n.version <= current.version and n.lineage <= current.lineage
    }
    assert sorted(led) == sorted({n.version for n in reachable.values()})
    for number, manifests in led.items():
        best = max(n.lineage for n in reachable.values() if n.version == number)
        assert set(manifests) == {m for m, n in reachable.items() if n == Number(best, number)}
    kept = lasting(versions, current, {"keep": keep})
    assert {versions[m].version for m in kept} == set(sorted(led)[-keep:])
