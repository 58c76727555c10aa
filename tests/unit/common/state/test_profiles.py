"""Statistics of profiles against brute force over weighted samples."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.state.pool.demand.profiles import (
    BINS_PER_OCTAVE,
    HALF_LIFE,
    MIN_WEIGHT,
    FunctionProfile,
    Profile,
    ProfileKey,
    ProfileRecorder,
    TimeStatistics,
    decode_profile,
    encode_profile,
    find_bin,
    merge_profiles,
)

seconds = st.floats(1e-3, 3600.0)
batches = st.lists(st.lists(seconds, min_size=1, max_size=30), min_size=1, max_size=6)
RATIO = 2.0 ** (1 / BINS_PER_OCTAVE)


def make_statistics(samples: list[float]) -> TimeStatistics:
    found = TimeStatistics()
    for sample in samples:
        found.add(sample)
    return found


def weigh(drawn: list[list[float]]) -> list[tuple[float, float]]:
    """Return (sample, weight): a sample halves with `HALF_LIFE` samples of later batches."""
    later, weighted = 0, list[tuple[float, float]]()
    for batch in reversed(drawn):
        weighted += [(sample, 0.5 ** (later / HALF_LIFE)) for sample in batch]
        later += len(batch)
    return sorted(weighted)


@given(batches)
def test_merged_statistics_equal_those_of_weighted_samples(drawn: list[list[float]]) -> None:
    merged = TimeStatistics()
    for batch in drawn:
        merged = merged.merge(make_statistics(batch))
    weighted = weigh(drawn)
    total = sum(weight for _, weight in weighted)
    assert merged.count == pytest.approx(total)
    assert merged.mean_s == pytest.approx(sum(s * w for s, w in weighted) / total)
    assert merged.max_s == pytest.approx(max(s * w for s, w in weighted))


@given(st.lists(seconds, min_size=1, max_size=60), st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_quantile_is_at_most_one_bin_above_the_exact_one(
    samples: list[float], share: float
) -> None:
    found = make_statistics(samples).compute_quantile_s(share)
    rank = next(n for n in range(1, len(samples) + 1) if n >= share * len(samples) - 1e-9)
    exact = sorted(samples)[rank - 1]
    assert exact * (1 - 1e-9) <= found <= exact * RATIO * (1 + 1e-9)


def test_bins_of_forgotten_samples_are_removed() -> None:
    found = make_statistics([3000.0])
    for _ in range(9):
        found = found.merge(make_statistics([0.1] * int(HALF_LIFE)))
    assert set(found.bins) == {find_bin(0.1)}
    assert all(weight >= MIN_WEIGHT for weight in found.bins.values())
    assert found.max_s < 3000.0 / 2**8


def test_statistics_without_samples_are_zero() -> None:
    empty = TimeStatistics()
    assert (empty.mean_s, empty.compute_quantile_s(0.9), empty.max_s) == (0.0, 0.0, 0.0)


def make_profile(**samples: list[float]) -> Profile:
    return {
        name: FunctionProfile(make_statistics(found), make_statistics(found[1:]), {"parameters": 7})
        for name, found in samples.items()
    }


@given(
    st.dictionaries(st.sampled_from(["generate", "sync", "save"]), st.lists(seconds, min_size=1))
)
def test_encoded_profile_is_read_back(drawn: dict[str, list[float]]) -> None:
    profile = make_profile(**drawn)
    read = decode_profile(encode_profile(profile))
    assert read.keys() == profile.keys()
    for name, one in profile.items():
        assert read[name].durations.bins == one.durations.bins
        assert read[name].durations.total_s == pytest.approx(one.durations.total_s, abs=1e-5)
        assert read[name].bytes_by_kind == {"parameters": 7}


def test_merged_profiles_have_the_functions_of_both_and_the_newer_bytes() -> None:
    older, newer = make_profile(sync=[1.0], save=[2.0]), make_profile(save=[4.0, 4.0])
    newer["save"].bytes_by_kind = {"parameters": 9}
    merged = merge_profiles(older, newer)
    assert set(merged) == {"save", "sync"}
    assert merged["save"].bytes_by_kind == {"parameters": 9}
    assert merged["sync"].bytes_by_kind == {"parameters": 7}
    assert older["save"].durations.count == 1.0


def test_keys_differ_by_every_field() -> None:
    key = ProfileKey("engine", "llama 2x64 9", "grpo", "ab", 320, "cpu", 1)
    assert ProfileKey.decode(key.encode()) == key
    assert (
        key.encode() != ProfileKey("engine", "llama 2x64 9", "grpo", "ab", 320, "cpu", 2).encode()
    )


def test_recorder_measures_gaps_and_returns_a_batch_once() -> None:
    recorder = ProfileRecorder()
    recorder.add("generate", 10.0, 0.5, 11.0)
    recorder.add("sync", 14.0, 1.0, 16.0)
    batch = recorder.take_batch()
    assert batch["generate"].gaps.count == 0.0
    assert (batch["sync"].gaps.mean_s, batch["sync"].durations.mean_s) == (3.0, 1.0)
    assert recorder.take_batch() == {}
    recorder.add("sync", 16.0, 3.0, 19.0)
    recorder.restore_batch(batch)
    assert recorder.take_batch()["sync"].durations.max_s == 3.0


def test_gap_of_a_repeated_function_is_known_if_most_of_its_pieces_repeat_it() -> None:
    recorder, now = ProfileRecorder(), 0.0
    for function in ["generate"] * 5 + ["save", "sync"] + ["generate"] * 5 + ["sync"]:
        gap_s = 0.25 if function == "generate" else 3.0
        recorder.add(function, now + gap_s, 1.0, now + gap_s + 1.0)
        now += gap_s + 1.0
    profile = merge_profiles({}, decode_profile(encode_profile(recorder.take_batch())))
    assert math.isinf(recorder.find_repeat_gap_s("generate"))
    recorder.set_stored(profile)
    assert recorder.find_repeat_gap_s("generate") == 0.25
    assert math.isinf(recorder.find_repeat_gap_s("sync"))
    newer = {"generate": FunctionProfile(make_statistics([1.0] * int(HALF_LIFE)))}
    merged = merge_profiles(profile, newer)["generate"]  # none of the newer pieces repeats it
    assert merged.repeats == profile["generate"].repeats / 2
    text = encode_profile(profile)
    older = {name: stored[:3] for name, stored in json.loads(text).items()}
    assert decode_profile(json.dumps(older))["generate"].repeats == 0.0


def test_recorder_estimates_from_the_stored_profile() -> None:
    recorder = ProfileRecorder()
    assert recorder.estimate_s("generate") == 0.0
    recorder.set_stored(make_profile(generate=[0.2, 0.4]))
    assert recorder.estimate_s("generate") == 0.4
