"""A model whose head is larger than its tokenizer computes as the model that was cut to it."""

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
from meshrl.services.scoring.role_process import _load_bundled_model
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

# Two holes, of which one ends the head; what is left are TINY's ids in their order.
HOLES = replace(TINY, vocab_size=VOCAB + 20, absent_ids=((17, 20), (VOCAB + 3, VOCAB + 20)))
PADDED = replace(TINY, vocab_size=VOCAB + 20, absent_ids=((VOCAB, VOCAB + 20),))
KNOWN = np.array([i for i in range(VOCAB + 3) if not 17 <= i < 20])
MANNERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 3.0, "top_k": 50},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01},
)


def padded(known: np.ndarray) -> dict[str, torch.Tensor]:
    """The weights of `decoder()` with its rows at `known` and very likely ids between them."""
    state = dict(decoder().state_dict())
    for name in ("embedding", "unembedding"):
        rows = torch.full((VOCAB + 20, TINY.hidden_size), 50.0)
        rows[torch.from_numpy(known)] = state[name]
        state[name] = rows
    return state


@pytest.mark.parametrize("path", BUILT_IN)
def test_an_engine_never_samples_an_id_without_a_token(path: str) -> None:
    plain, listener = Listener(built_in(path, 8)), Listener(built_in(path, 8, config=HOLES))
    listener.engine.update_weights(padded(KNOWN), 0)
    for one, prompt in ((plain, [1, 2, 30]), (listener, KNOWN[[1, 2, 30]].tolist())):
        one.run(
            *(
                request(i, prompt, max_new=30, wants_raw_logprobs=True, **how)
                for i, how in enumerate(MANNERS)
            )
        )
    for i in range(len(MANNERS)):
        mine, theirs = listener.heard[i], plain.heard[i]
        assert mine.tokens == KNOWN[theirs.tokens].tolist()
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=2e-5)
        np.testing.assert_allclose(mine.unmodified, theirs.unmodified, atol=2e-5)
    row = np.array(plain.heard[0].tokens, np.int32)
    np.testing.assert_allclose(
        listener.engine.score(KNOWN[row].astype(np.int32)), plain.engine.score(row), atol=2e-5
    )
    for asked in (
        lambda: listener.engine.submit([request(9, [1, 18])]),
        lambda: listener.engine.score(np.array([1, VOCAB + 3], np.int32)),
    ):
        with pytest.raises(Refused, match="a token id that the tokenizer lacks"):
            asked()


@pytest.mark.parametrize("path", BUILT_IN)
def test_the_trainer_computes_the_probabilities_of_the_engine(path: str) -> None:
    engine = Listener(built_in(path, config=HOLES))
    engine.engine.update_weights(padded(KNOWN), 0)
    heard = engine.run(request(1, [0, 5], max_new=40))[1]
    model = Decoder(HOLES)
    model.load_state_dict(padded(KNOWN))
    tokens = np.array([0, 5, *heard.tokens], np.int32)
    mask = np.arange(len(tokens)) >= 2
    sequence = TrainingSequence(
        tokens, np.zeros(len(tokens), np.float32), mask, np.zeros_like(tokens)
    )
    found = run_forward(model, build_bin([sequence]))
    np.testing.assert_allclose(found.logprobs.detach(), heard.logprobs, atol=2e-5)
    found.logprobs.sum().backward()
    lost = torch.ones(HOLES.vocab_size, dtype=torch.bool)
    lost[torch.from_numpy(KNOWN)] = False
    assert model.unembedding.grad is not None
    assert not model.unembedding.grad[lost].any() and model.unembedding.grad[~lost].any()
    likely = model.compute_logits(found.hidden.detach()).softmax(-1)
    assert not likely[:, lost].any()
    entropy = -(likely * likely.clamp(min=1e-30).log()).sum(-1)
    torch.testing.assert_close(found.entropy, entropy.detach(), atol=1e-4, rtol=1e-4)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[SGLangEngine]:
    server = Counterpart(4, 128)
    engine = counterpart.engine(server, tmp_path, 4, 128, config=PADDED, read_back=True)
    yield engine
    engine.close()
    server.close()


def test_sglang_is_given_the_vocabulary_of_the_tokenizer(served: SGLangEngine) -> None:
    assert to_sglang_config(PADDED, 128).vocab_size == VOCAB
    served.update_weights(padded(np.arange(VOCAB)), 1)
    heard = Listener(served).run(request(1, max_new=20, temperature=0.0))[1]
    mine = built_in("eager", config=PADDED)
    mine.update_weights(padded(np.arange(VOCAB)), 1)
    expected = Listener(mine).run(request(1, max_new=20, temperature=0.0))[1]
    assert heard.tokens == expected.tokens
    np.testing.assert_allclose(heard.logprobs, expected.logprobs, atol=2e-5)
    with pytest.raises(Refused, match=rf"not all in \[0, {VOCAB}\)"):
        served.submit([request(2, [VOCAB])])


def test_the_rows_for_sglang_are_views_of_the_version() -> None:
    theirs = state_to_hf(PADDED, padded(np.arange(VOCAB)))
    for name, tensor in trim_vocabulary_rows(PADDED, theirs).items():
        assert tensor.data_ptr() == theirs[name].data_ptr() and tensor.is_contiguous()
        assert len(tensor) == (VOCAB if len(theirs[name]) == VOCAB + 20 else len(theirs[name]))


def test_a_tokenizer_with_a_hole_is_refused_with_sglang() -> None:
    with pytest.raises(ConfigError, match="lacks ids 17 to 19 and has higher ones"):
        to_sglang_config(HOLES, 128)


def test_ranges_of_absent_ids_are_those_that_no_token_has() -> None:
    draw = np.random.default_rng(0)
    for rows in (1, 2, 7, 40):
        for ids in (draw.permutation(rows + 5)[:kept] for kept in range(rows + 1)):
            ranges = find_absent_ids(ids.tolist(), rows)
            lacking = [i for first, end in ranges for i in range(first, end)]
            assert lacking == sorted(set(range(rows)) - set(ids.tolist()))
            assert all(one[1] < other[0] for one, other in pairwise(ranges))


def test_a_job_computes_without_the_ids_that_its_tokenizer_lacks(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, 60)
    config = JobConfig.from_document({"model": {"config": TINY.to_hf() | {"vocab_size": 64}}})
    shape = load_model_config(JobData("j", config, tmp_path, tmp_path))
    assert shape.absent_ids == ((60, 64),) and shape.token_id_end == 60
    assert shape.to_hf()["vocab_size"] == 64


def test_a_reference_scores_by_the_ids_of_the_jobs_tokenizer(tmp_path: Path) -> None:
    """Its head has other rows than the model's; the judge is read with its own tokenizer."""
    make_tokenizer(tmp_path, VOCAB)
    save_model(tmp_path / "other", replace(PADDED, absent_ids=()), padded(np.arange(VOCAB)))
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
        found = _load_bundled_model(data, role).engine.score(tokens)
        np.testing.assert_allclose(found, expected, atol=2e-5)
    with_more = replace(data, bundle=tmp_path / "bundle")
    with_more.bundle.mkdir()
    make_tokenizer(with_more.bundle, VOCAB + 21)
    (with_more.bundle / "other").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"models\.reference has rows for 60 ids"):
        _load_bundled_model(with_more, "reference")
