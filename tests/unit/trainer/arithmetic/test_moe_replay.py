"""A group that a mixture of experts has sampled is trained on with the routing of its engine."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from meshrl.common.api.weights import Group
from meshrl.common.base.encoding import blob
from meshrl.common.base.experts import laid_out
from meshrl.common.model.network.decoder import Decoder, SparseLayer
from meshrl.services.rollout.trajectories.trajectory import Trajectory
from meshrl.services.trainer.bins.packing import Bin, make_bins
from meshrl.services.trainer.models.forward import forward
from meshrl.services.trainer.steps.batch import members_of
from tests.unit.common.generation.engines_under_test import (
    VOCAB,
    Listener,
    built_in,
    request,
)
from tests.unit.common.generation.test_moe_engine import THREE, paired

paths = pytest.mark.parametrize(
    "path", [pytest.param("native", marks=pytest.mark.needs("compiler")), "eager", "graphs"]
)


def sampled(path: str, model: Decoder, prompts: list[list[int]], tokens: int = 90) -> Group:
    """A finished group as a shard stores it, of turns that the engine sampled."""
    engine = built_in(path, slots=8, config=THREE)
    engine.swap(model.state_dict(), 4)
    heard = Listener(engine).run(
        *(request(i, prompt, max_new=tokens - 7 * i) for i, prompt in enumerate(prompts))
    )
    members = []
    for i, prompt in enumerate(prompts):
        t = Trajectory(3, i, 0, 4, 0)
        t.begin(prompt)
        columns: Any = (
            np.array(heard[i].tokens, np.int32),
            np.array(heard[i].logprobs, np.float32),
            np.array(heard[i].versions, np.int32),
            np.array(heard[i].experts, np.int16),
        )
        t.sampled(*columns)
        t.appended([1, 2])  # what a tool answers, and nobody sampled
        members.append(t)
    group = Group(
        group=3,
        prompt=0,
        lengths=np.array([t.length for t in members], np.int32),
        tokens=np.concatenate([t.tokens for t in members]),
        logprobs=np.concatenate([t.logprobs for t in members]),
        versions=np.concatenate([t.versions for t in members]),
        rewards=np.arange(len(members), dtype=np.float32),
        experts=laid_out((t.experts, t.length) for t in members),
        expert_shape=list(THREE.expert_shape),
    )
    return blob.unpack(Group, blob.pack(group))


def bins_of(group: Group, *, replayed: bool) -> list[Bin]:
    sequences = members_of(group)
    assert all(s.experts is not None for s in sequences)
    if not replayed:
        for sequence in sequences:
            sequence.experts = None
    return [Bin.from_arrays(made.to_arrays()) for made in make_bins(sequences, 150)]


def gap(model: Decoder, bins: list[Bin]) -> float:
    """The largest difference to the engine's log-probabilities, of all trained tokens."""
    worst = 0.0
    for made in bins:
        with torch.no_grad():
            out = forward(model, made)
        difference = out.logprobs.numpy() - made.behaviour[out.places.numpy()]
        worst = max(worst, float(np.abs(difference).max()))
    return worst


@pytest.mark.rotating(3)
@paths
def test_log_probabilities_are_the_engines_though_the_router_has_changed(path: str) -> None:
    group = sampled(path, paired(1e-6, seed=1), [[first] for first in range(5)])
    later = paired(1e-6, seed=2)
    assert gap(later, bins_of(group, replayed=False)) > 0.1
    assert gap(later, bins_of(group, replayed=True)) < 1e-4


@paths
def test_log_probabilities_are_the_engines_behind_any_prompt(path: str) -> None:
    prompts = [np.random.default_rng(n).integers(0, VOCAB, 1 + 9 * n).tolist() for n in range(4)]
    model = paired(0.5, seed=1)  # no pair is near a tie
    group = sampled(path, model, prompts, tokens=60)
    assert gap(model, bins_of(group, replayed=True)) < 1e-4
    assert gap(model, bins_of(group, replayed=False)) < 1e-4


def test_what_keeps_experts_busy_adds_up_over_trained_places_and_reaches_the_router() -> None:
    model = paired(0.5, seed=1)
    model.config = THREE
    group = sampled("eager", model, [[first] for first in range(5)])
    total, trained = torch.zeros(()), 0
    for made in bins_of(group, replayed=True):
        out = forward(model, made)
        assert out.aux_loss is not None
        total, trained = total + out.aux_loss, trained + len(out.places)
    each = total.item() / trained / THREE.balance_coefficient
    assert THREE.experts_per_token <= each < 2 * THREE.experts_per_token
    total.backward()
    gradient = cast(SparseLayer, model.layers[0]).experts.router.grad
    assert gradient is not None and gradient.abs().max() > 0
