"""Properties of the scheduler over caches of random size, with a model that checks its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.api.engine import FinishReason
from meshrl.common.generation.batch.adapter_deltas import AdapterDeltas
from meshrl.common.generation.batch.cache_size import CachePlan
from meshrl.common.generation.batch.paged_cache import PagedCache
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.batch.step_compute import SlotIndices
from meshrl.common.generation.builtin.engine import BuiltinEngine, EngineOptions
from meshrl.common.generation.builtin.loaded_weights import get_tensor_shapes
from meshrl.common.generation.engine_contract import IntArray
from meshrl.common.job.memory.cache_blocks import BLOCK_TOKENS
from tests.unit.common.generation.engines_under_test import (
    TINY,
    VOCAB,
    ManualClock,
    request,
)

LENGTH, LEAST = 6 * BLOCK_TOKENS, 7  # tokens of a slot, and blocks of the smallest cache
WEIGHTS = {name: torch.zeros(shape) for name, shape in get_tensor_shapes(TINY).items()}


def choose_next(tokens: NDArray[np.int64]) -> int:
    """Return the next token of a sequence, which depends on all of it."""
    weights = np.arange(1, len(tokens) + 1)
    return int((tokens * weights).sum() * 7 + len(tokens)) % VOCAB


class CheckedCompute:
    """Model whose cache holds tokens: a token is sampled only over a complete, correct cache."""

    vocab_size, cache_layout, cache_bytes_per_token, weights_bytes = VOCAB, "tokens", 8, 0

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.block_table = np.zeros((0, 0), np.int32)
        self.cache = np.zeros((0, BLOCK_TOKENS), np.int64)

    def run_steps(
        self, slots: SlotIndices, counts: SlotIndices, max_steps: int, budget_s: float
    ) -> int:
        sampled = 0
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            begin = int(self.slots.num_computed_tokens[slot])
            for position in range(begin, begin + count):
                block = self.block_table[slot, position // BLOCK_TOKENS]
                token = self.slots.tokens[slot, position]
                self.cache[block, position % BLOCK_TOKENS] = token
        # After all writes, so that two slots with one block show.
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            self.slots.num_computed_tokens[slot] += count
            end = int(self.slots.num_computed_tokens[slot])
            positions = np.arange(end)
            blocks = self.block_table[slot, positions // BLOCK_TOKENS]
            cached = self.cache[blocks, positions % BLOCK_TOKENS]
            assert np.array_equal(cached, self.slots.tokens[slot, :end])
            if end == self.slots.num_tokens[slot]:
                one, none = np.array([slot]), np.zeros(1, np.float32)
                self.slots.append_sampled(one, np.array([choose_next(cached)]), none, none)
                sampled += 1
        return sampled

    def copy_block(self, source: int, target: int) -> None:
        self.cache[target] = self.cache[source]

    def wake(self, num_blocks: int) -> None:
        self.cache = np.full((num_blocks, BLOCK_TOKENS), -1)

    def sleep(self) -> None:
        self.cache = self.cache[:0]

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Load nothing, because the next token depends on the tokens alone."""

    def find_differing_weights(self, state: Mapping[str, Tensor]) -> list[str]:
        return []

    def load_adapter(self, adapter_index: int, deltas: AdapterDeltas) -> None:
        raise NotImplementedError

    def drop_adapter(self, adapter_index: int) -> None:
        raise NotImplementedError

    def score(
        self, tokens: IntArray, blocks: IntArray, adapter_index: int = 0
    ) -> NDArray[np.float32]:
        self.cache[blocks] = -1  # which a slot with one of the blocks would notice
        return np.zeros(len(tokens) - 1, np.float32)

    def span_bytes(self, start: int, end: int) -> int:
        raise NotImplementedError

    def read_cache(self, slot: int, start: int, end: int) -> NDArray[np.uint8]:
        raise NotImplementedError

    def write_cache(self, slot: int, start: int, end: int, content: NDArray[np.uint8]) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Submission:
    """Request of the workload, submitted after some steps of the earlier ones."""

    prompt: int  # tokens; the first ones are shared by all requests with the same `family`
    new: int
    family: int
    session: int
    steps_before: int
    scores: bool  # True: the engine also scores a sequence then, which borrows blocks


submissions = st.builds(
    Submission,
    prompt=st.integers(1, LENGTH - 1),
    new=st.integers(1, LENGTH),
    family=st.integers(0, 2),
    session=st.integers(-1, 2),
    steps_before=st.integers(0, 6),
    scores=st.booleans(),
)


@dataclass
class Run:
    """Engine over a cache of `num_blocks` blocks, and what its requests have received."""

    num_slots: int
    num_blocks: int
    received: dict[int, list[int]] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = Slots(self.num_slots, LENGTH)
        compute = CheckedCompute(self.slots)
        self.memory = PagedCache(self.slots, compute.copy_block)
        compute.block_table = self.memory.block_table
        plan = CachePlan(self.num_blocks, self.num_slots * LENGTH // BLOCK_TOKENS, 1)
        options = EngineOptions(clock=ManualClock())
        self.engine = BuiltinEngine(
            self.slots,
            compute,  # type: ignore[arg-type]  # it checks the steps, and computes nothing
            self.memory,
            TINY,
            "checked",
            options,
            lambda: plan,
        )
        self.engine.wake(WEIGHTS, 0)

    def step(self) -> bool:
        """Run a step; check that the oldest request advances and that blocks are accounted for."""
        before = self._measure_oldest()
        worked = self.engine.step()
        if worked and before is not None:
            oldest, progress = before
            slot = self.slots.find_slot(oldest)
            assert slot is None or self._count_progress(slot) > progress
        self.drain()
        in_use = int((self.memory.block_pool.ref_counts > 0).sum())
        assert in_use + self.memory.block_pool.num_free == self.num_blocks
        return worked

    def drain(self) -> None:
        output = self.engine.drain_outputs()
        if output is None:
            return
        ends = np.cumsum(output.counts)
        for i, id in enumerate(output.ids.tolist()):
            tokens = output.tokens[ends[i] - output.counts[i] : ends[i]].tolist()
            self.received.setdefault(id, []).extend(tokens)
            if output.finish_reasons[i] != FinishReason.RUNNING:
                self.finished.append(id)

    def _measure_oldest(self) -> tuple[int, int] | None:
        """Return the id and the progress of the request that started first; None if none runs."""
        running = self.slots.list_running_slots()
        if not running:
            return None
        slot = min(running, key=lambda i: self.engine.scheduler._start_order[i])
        return int(self.slots.request_id[slot]), self._count_progress(slot)

    def _count_progress(self, slot: int) -> int:
        return int(self.slots.num_computed_tokens[slot] + self.slots.num_tokens[slot])


def run_workload(num_slots: int, num_blocks: int, workload: list[Submission]) -> Run:
    """Run a workload to its end; compare each request's tokens with the model's."""
    run = Run(num_slots, num_blocks)
    prompts: dict[int, list[int]] = {}
    # Each step advances the oldest request, so this many steps finish all of them.
    most_steps = sum(one.prompt + one.new + one.steps_before for one in workload) + 10
    for id, one in enumerate(workload):
        generator = np.random.default_rng(one.family)
        prompts[id] = generator.integers(0, VOCAB, one.prompt).tolist()
        session = one.session if one.session >= 0 else -1
        run.engine.submit([request(id, prompts[id], max_new=one.new, session=session)])
        if one.scores:
            assert len(run.engine.score(np.array(prompts[id]))) == one.prompt - 1
        for _ in range(one.steps_before):
            run.step()
    for _ in range(most_steps):
        if not run.step():
            break
    assert sorted(run.finished) == list(range(len(workload)))
    for id, one in enumerate(workload):
        expected = list(prompts[id])
        while len(expected) < min(one.prompt + one.new, LENGTH):
            expected.append(choose_next(np.array(expected)))
        assert run.received.get(id, []) == expected[one.prompt :]
    return run


small_caches = given(
    num_slots=st.integers(1, 5),
    more_blocks=st.integers(0, 12),
    workload=st.lists(submissions, min_size=1, max_size=8),
)


@settings(max_examples=6)
@small_caches
def test_all_requests_finish_with_the_same_tokens_in_any_cache(
    num_slots: int, more_blocks: int, workload: list[Submission]
) -> None:
    run_workload(num_slots, LEAST + more_blocks, workload)


@pytest.mark.deep
@settings(max_examples=300)
@small_caches
def test_all_requests_finish_with_the_same_tokens_in_any_cache_at_length(
    num_slots: int, more_blocks: int, workload: list[Submission]
) -> None:
    run_workload(num_slots, LEAST + more_blocks, workload)


def test_requests_beyond_the_smallest_cache_are_preempted_and_finish_in_order() -> None:
    workload = [Submission(30, LENGTH, 10 + i, -1, 0, False) for i in range(5)]
    run = run_workload(5, LEAST, workload)
    assert run.engine.num_preempted > 0 and run.finished == list(range(5))
