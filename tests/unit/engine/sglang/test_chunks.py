"""What SGLang's answers mean, where they do not say it plainly; no server is needed for these."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshrl.common.api.engine import Finish
from meshrl.common.base.errors import RemoteFailure
from meshrl.services.engine.sglang.requests import SentRequest
from meshrl.services.engine.sglang.v0_5 import StreamChunk, chunk, generate, plain
from tests.unit.common.generation.engines_under_test import VOCAB, request, text_of


def event(tokens: list[int], total: int, **more: Any) -> dict[str, Any]:
    meta = {
        "completion_tokens": total,
        "output_token_logprobs": [[-0.1 * t, t, None] for t in tokens],
        "weight_version": "3",
        "finish_reason": None,
        "prompt_tokens": 7,
        "cached_tokens": 5,
        **more,
    }
    return {"output_ids": tokens, "meta_info": meta}


def test_a_chunk_brings_what_had_not_come() -> None:
    first = chunk(event([4, 5], 2), 0, True)
    assert (first.tokens, first.version, first.computed) == ([4, 5], 3, 2)
    assert first.finish == Finish.RUNNING
    assert first.logprobs == first.unmodified == [-0.4, -0.5]
    last = chunk(event([6], 3, finish_reason={"type": "length", "length": 3}), 2, True)
    assert (last.tokens, last.finish, last.computed) == ([6], Finish.LENGTH, 0)


def test_an_abort_that_says_its_last_token_again_brings_nothing() -> None:
    over = {"type": "abort", "message": "Abort in waiting queue"}
    echo = event([4, 5], 2, finish_reason=over)  # all log-probabilities come once more
    echo["output_ids"] = [5]
    for own in (True, False):
        again = chunk(echo, 2, own)
        assert again.tokens == [] and again.finish == Finish.ABORTED
    # In one piece with the token before, as a server says it that is behind.
    joined = event([5, 4, 5], 2, finish_reason=over)
    joined["output_ids"] = [5, 5]
    assert chunk(joined, 1, True).tokens == [5]


def test_what_was_sampled_from_is_told_apart_from_the_models_own() -> None:
    both = chunk(event([4, 5], 2, output_token_sampling_logprobs=[-1.0, -2.0]), 0, False)
    assert both.logprobs == [-1.0, -2.0] and both.unmodified == [-0.4, -0.5]


@pytest.mark.parametrize("told", [{}, {"output_token_sampling_logprobs": [-0.5]}], ids=str)
def test_probabilities_of_another_distribution_are_not_taken_for_those_sampled_from(
    told: dict[str, Any],
) -> None:
    with pytest.raises(RemoteFailure, match="of 2 tokens"):
        chunk(event([4, 5], 2, **told), 0, False)


def test_an_error_ends_the_request_with_its_reason() -> None:
    refused = chunk({"error": {"message": "too long", "code": 400}}, 0, True)
    assert refused.finish == Finish.ABORTED and refused.reason == "too long"


def test_the_spans_at_the_end_settle_versions_and_count_what_is_out_already() -> None:
    sent = SentRequest(request(1), "r", 10)
    sent.add(StreamChunk(tokens=[1, 2, 3, 4], logprobs=[0.0] * 4, unmodified=[0.0] * 4, version=2))
    piece = sent.take()
    assert piece is not None and piece.versions.tolist() == [2] * 4
    sent.add(StreamChunk(tokens=[5], logprobs=[0.0], unmodified=[0.0], version=2))
    assert sent.settle_versions([(1, 0, 2), (2, 2, 4), (3, 4, 9)]) == 2
    assert sent.versions == [1, 1, 2, 2, 3]


def test_a_request_that_samples_otherwise_asks_for_what_it_sampled_from() -> None:
    body = generate(request(1, top_p=0.9, seed=2**64 - 1), 5, "r", "w:1.0", VOCAB)
    assert body["return_sampling_mask"] and body["sampling_params"]["top_k"] == VOCAB
    assert 0 <= body["sampling_params"]["sampling_seed"] < 2**63
    for model_s_own in (request(1), request(1, temperature=0.0, top_p=0.9)):
        assert plain(model_s_own)
        assert "return_sampling_mask" not in generate(model_s_own, 5, "r", "w:1.0", VOCAB)


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@given(given_=tokens, turn=tokens, sizes=st.lists(st.integers(1, 5), min_size=12), data=st.data())
def test_a_stop_text_ends_it_at_the_same_token_however_tokens_come(
    given_: list[int], turn: list[int], sizes: list[int], data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, len(given_)))
    whole = text_of([*given_[begin:], *turn])
    start = data.draw(st.integers(0, len(whole)))
    text = whole[start : start + data.draw(st.integers(1, 5))] or "nowhere"
    assume(text not in text_of(given_[begin:]))  # it would have ended before it came here
    sent = SentRequest(request(1, [*given_, 0], stop_text=(text,), begin=begin), "r", 99)
    sent.request.tokens = sent.request.tokens[:-1]
    came, over = 0, False
    for size in sizes:
        part = turn[came : came + size]
        if over or not part:
            break
        came += len(part)
        none = [0.0] * len(part)
        sent.add(StreamChunk(tokens=part, logprobs=none, unmodified=none))
        over = sent.cut_at_text(text_of, len(part))
    ends = [n for n in range(1, len(turn) + 1) if text in text_of([*given_[begin:], *turn[:n]])]
    assert sent.tokens == turn[: ends[0] if ends else len(turn)]
    assert over == bool(ends)
    assert len(sent.tokens) == len(sent.logprobs) == len(sent.versions)
