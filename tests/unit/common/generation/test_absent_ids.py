"""Models whose head is larger than their tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshrl.common.base.errors import ConfigError, Refused
from meshrl.common.generation.sglang_model import to_sglang_config, trim_vocabulary_rows
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import load_model_config
from meshrl.common.job.config import JobConfig
from meshrl.common.model.files.hf_writer import save_model, state_to_hf
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.tokens.tokenizer import find_absent_ids
from meshrl.services.engine.sglang.engine import SGLangEngine
from meshrl.services.scoring.role_process import _read_bundled_model
from meshrl.services.trainer.bins.packing import TrainingSequence, build_bin
from meshrl.services.trainer.models.forward import run_forward
from tests.sglang import counterpart
from tests.sglang.counterpart import Counterpart
from tests.tokenizers import make_tokenizer
from tests.unit.common.generation.engines_under_test import (
    BUILT_IN,
    TINY,
    VOCAB,
    Listener,
    built_in,
    decoder,
    request,
)

# Two gaps, of which one ends the head; the remaining ids are those of TINY, in order.
HOLES = replace(TINY, vocab_size=VOCAB + 20, absent_ids=((17, 20), (VOCAB + 3, VOCAB + 20)))
PADDED = replace(TINY, vocab_size=VOCAB + 20, absent_ids=((VOCAB, VOCAB + 20),))
KNOWN = np.array([i for i in range(VOCAB + 3) if not 17 <= i < 20])
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 3.0, "top_k": 50},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01},
)


def pad_weights(known_ids: np.ndarray) -> dict[str, torch.Tensor]:
    """Return the weights of `decoder()` with its rows at `known` and very likely ids between
    them.
    """
    state = dict(decoder().state_dict())
    for name in ("embedding", "unembedding"):
        rows = torch.full((VOCAB + 20, TINY.hidden_size), 50.0)
        rows[torch.from_numpy(known_ids)] = state[name]
        state[name] = rows
    return state


@pytest.mark.parametrize("path", BUILT_IN)
def test_absent_ids_are_never_sampled(path: str) -> None:
    plain, listener = Listener(built_in(path, 8)), Listener(built_in(path, 8, config=HOLES))
    listener.engine.update_weights(pad_weights(KNOWN), 0)
    for collector, prompt in ((plain, [1, 2, 30]), (listener, KNOWN[[1, 2, 30]].tolist())):
        collector.run(
            *(
                request(i, prompt, max_new=30, wants_raw_logprobs=True, **sampling)
                for i, sampling in enumerate(SAMPLING)
            )
        )
    for i in range(len(SAMPLING)):
        output, expected = listener.outputs[i], plain.outputs[i]
        assert output.tokens == KNOWN[expected.tokens].tolist()
        np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=2e-5)
        np.testing.assert_allclose(output.raw_logprobs, expected.raw_logprobs, atol=2e-5)
    row = np.array(plain.outputs[0].tokens, np.int32)
    np.testing.assert_allclose(
        listener.engine.score(KNOWN[row].astype(np.int32)), plain.engine.score(row), atol=2e-5
    )
    for invalid_call in (
        lambda: listener.engine.submit([request(9, [1, 18])]),
        lambda: listener.engine.score(np.array([1, VOCAB + 3], np.int32)),
    ):
        with pytest.raises(Refused, match="the tokenizer has no token"):
            invalid_call()


@pytest.mark.parametrize("path", BUILT_IN)
def test_trainer_gives_the_probabilities_of_the_engine(path: str) -> None:
    engine = Listener(built_in(path, config=HOLES))
    engine.engine.update_weights(pad_weights(KNOWN), 0)
    output = engine.run(request(1, [0, 5], max_new=40))[1]
    model = Decoder(HOLES)
    model.load_state_dict(pad_weights(KNOWN))
    tokens = np.array([0, 5, *output.tokens], np.int32)
    mask = np.arange(len(tokens)) >= 2
    sequence = TrainingSequence(
        tokens, np.zeros(len(tokens), np.float32), mask, np.zeros_like(tokens)
    )
    forward = run_forward(model, build_bin([sequence]))
    np.testing.assert_allclose(forward.logprobs.detach(), output.logprobs, atol=2e-5)
    forward.logprobs.sum().backward()
    absent = torch.ones(HOLES.vocab_size, dtype=torch.bool)
    absent[torch.from_numpy(KNOWN)] = False
    assert model.unembedding.grad is not None
    assert not model.unembedding.grad[absent].any() and model.unembedding.grad[~absent].any()
    probabilities = model.compute_logits(forward.hidden.detach()).softmax(-1)
    assert not probabilities[:, absent].any()
    entropy = -(probabilities * probabilities.clamp(min=1e-30).log()).sum(-1)
    torch.testing.assert_close(forward.entropy, entropy.detach(), atol=1e-4, rtol=1e-4)


@pytest.fixture
def sglang_engine(tmp_path: Path) -> Iterator[SGLangEngine]:
    server = Counterpart(4, 128)
    engine = counterpart.engine(server, tmp_path, 4, 128, config=PADDED, read_back=True)
    yield engine
    engine.close()
    server.close()


def test_sglang_has_the_vocabulary_of_the_tokenizer(sglang_engine: SGLangEngine) -> None:
    assert to_sglang_config(PADDED, 128).vocab_size == VOCAB
    sglang_engine.update_weights(pad_weights(np.arange(VOCAB)), 1)
    output = Listener(sglang_engine).run(request(1, max_new=20, temperature=0.0))[1]
    reference_engine = built_in("eager", config=PADDED)
    reference_engine.update_weights(pad_weights(np.arange(VOCAB)), 1)
    expected = Listener(reference_engine).run(request(1, max_new=20, temperature=0.0))[1]
    assert output.tokens == expected.tokens
    np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=2e-5)
    with pytest.raises(Refused, match=rf"not all in \[0, {VOCAB}\)"):
        sglang_engine.submit([request(2, [VOCAB])])


def test_rows_for_sglang_are_views_of_the_version() -> None:
    reference = state_to_hf(PADDED, pad_weights(np.arange(VOCAB)))
    for name, tensor in trim_vocabulary_rows(PADDED, reference).items():
        assert tensor.data_ptr() == reference[name].data_ptr() and tensor.is_contiguous()
        assert len(tensor) == (
            VOCAB if len(reference[name]) == VOCAB + 20 else len(reference[name])
        )


def test_tokenizer_with_a_gap_is_rejected_for_sglang() -> None:
    with pytest.raises(ConfigError, match="has no ids 17 to 19, but has higher ones"):
        to_sglang_config(HOLES, 128)


def test_absent_id_ranges_cover_exactly_the_ids_without_a_token() -> None:
    generator = np.random.default_rng(0)
    for rows in (1, 2, 7, 40):
        for ids in (generator.permutation(rows + 5)[:count] for count in range(rows + 1)):
            ranges = find_absent_ids(ids.tolist(), rows)
            absent = [i for first, end in ranges for i in range(first, end)]
            assert absent == sorted(set(range(rows)) - set(ids.tolist()))
            assert all(one[1] < other[0] for one, other in pairwise(ranges))


def test_model_of_a_job_excludes_ids_absent_from_its_tokenizer(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, 60)
    config = JobConfig.from_document({"model": {"config": TINY.to_hf() | {"vocab_size": 64}}})
    shape = load_model_config(JobData("j", config, tmp_path, tmp_path))
    assert shape.absent_ids == ((60, 64),) and shape.token_id_end == 60
    assert shape.to_hf()["vocab_size"] == 64


def test_bundled_models_score_by_the_ids_of_the_tokenizer(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, VOCAB)
    save_model(tmp_path / "other", replace(PADDED, absent_ids=()), pad_weights(np.arange(VOCAB)))
    make_tokenizer(tmp_path / "other", VOCAB)
    document = {
        "model": {"config": TINY.to_hf() | {"vocab_size": 64}},
        "models": {"reference": {"path": "other"}, "reward": {"path": "other"}},
        "rollout": {"max_tokens": 64},
    }
    data = JobData("j", JobConfig.from_document(document), tmp_path, tmp_path)
    tokens = np.arange(20, dtype=np.int32)
    expected = built_in("eager").score(tokens)
    for role in ("reference", "reward"):
        scores = _read_bundled_model(data, role)().engine.score(tokens)
        np.testing.assert_allclose(scores, expected, atol=2e-5)
    with_more = replace(data, bundle=tmp_path / "bundle")
    with_more.bundle.mkdir()
    make_tokenizer(with_more.bundle, VOCAB + 21)
    (with_more.bundle / "other").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"models\.reference has rows for 60 ids"):
        _read_bundled_model(with_more, "reference")()
