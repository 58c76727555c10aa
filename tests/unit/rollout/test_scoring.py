"""What frozen models make of trajectories, asked of the one process that hosts them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from common.config import FrozenModelConfig, JobConfig, JudgeConfig, ModelsConfig, RewardConfig
from common.jobdata import JobData
from common.mesh import Mesh
from common.model.tokenizer import Tokenizer, character_tokenizer
from common.random import Random
from common.simhost import SimulatedHost
from common.state.client import State
from common.transport.memory import MemoryNetwork, MemoryTransport
from common.virtual import VirtualClock, run_virtual
from services.rollout.engines.torch_engine import TorchEngine
from services.rollout.frozen import FrozenModel, FrozenModels
from services.rollout.scoring import Scorer, ScoringFailed, beside
from services.rollout.trajectory import Trajectory
from tests.unit.engines.engines_under_test import built_in

ROOM = 32  # tokens of the models' slots
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .?!"


class Bench:
    """A shard's scorer and the process of the frozen models, which a story lets come and go."""

    def __init__(self, clock: VirtualClock, random: Random, tokenizer: Tokenizer) -> None:
        self.clock, self.random = clock, random
        self.network = MemoryNetwork(clock, random.child("network"))
        self.state = State.simulated(clock)
        self.engines = {role: eager(seed) for seed, role in enumerate(("reference", "teacher"))}
        self.tokenizer = tokenizer
        given = FrozenModelConfig(path="given")
        config = JobConfig(
            models=ModelsConfig(given, given, given),
            reward=RewardConfig(judge=JudgeConfig(use="model", yes="y", no="no")),
        )
        self.shard = self._mesh("rollout/0", "shard")
        self.scorer = Scorer(self.shard, JobData("calc", config, Path(), Path()))

    def _mesh(self, name: str, address: str) -> Mesh:
        return Mesh(
            name=name,
            kind=name.partition("/")[0],
            state=self.state,
            transport=MemoryTransport(self.network, f"mem://{address}"),
            clock=self.clock,
            random=self.random.child(address),
            host=SimulatedHost(self.clock, self.random.child("host " + address)),
        )

    async def models(self, start: int = 0, *, loaded: bool = True) -> FrozenModels:
        """The process, started for the `start`-th time."""
        mesh = self._mesh("scoring/calc", f"scoring-{start}")
        served = FrozenModels(mesh)
        await mesh.join(served)
        if loaded:
            self.load(served)
        return served

    def load(self, served: FrozenModels) -> None:
        models = {role: FrozenModel(engine) for role, engine in self.engines.items()}
        served.serve(models | {"reward": FrozenModel(eager(5), self.tokenizer)})


def eager(seed: int) -> TorchEngine:
    return built_in("eager", 1, ROOM, seed)


@pytest.fixture
def on_bench(tmp_path: Path) -> Callable[[Callable[[Bench], Awaitable[None]]], None]:
    tokenizer = character_tokenizer(CHARACTERS, tmp_path / "tokenizer.json")

    def run(story: Callable[[Bench], Awaitable[None]]) -> None:
        async def main(clock: VirtualClock, random: Random) -> None:
            bench = Bench(clock, random, tokenizer)
            await bench.shard.join(None)
            await story(bench)

        run_virtual(main, limit_s=7200.0)

    return run


Run = Callable[[Callable[[Bench], Awaitable[None]]], None]


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_each_sequence_of_a_batch_is_scored_by_each_model(on_bench: Run) -> None:
    async def story(bench: Bench) -> None:
        await bench.models()
        sequences = [tokens(1, 2, 3), tokens(*range(ROOM)), tokens(7, 7)]
        found = await asyncio.gather(*(bench.scorer.score(s) for s in sequences))
        for sequence, scores in zip(sequences, found, strict=True):
            assert set(scores) == {"reference", "teacher"}
            for role, logprobs in scores.items():
                assert logprobs[0] == 0 and len(logprobs) == len(sequence)
                np.testing.assert_array_equal(logprobs[1:], bench.engines[role].score(sequence))
            assert (scores["reference"][1:] != scores["teacher"][1:]).any()

    on_bench(story)


def test_what_a_model_cannot_read_fails_alone_and_by_type(on_bench: Run) -> None:
    async def story(bench: Bench) -> None:
        await bench.models()
        sequences = [tokens(1, 2), tokens(*([1] * (ROOM + 1))), tokens(3, 99), tokens(3, 4)]
        found = await asyncio.gather(
            *(bench.scorer.score(s) for s in sequences), return_exceptions=True
        )
        assert [isinstance(one, ScoringFailed) for one in found] == [False, True, True, False]
        assert "reference: " in str(found[1]) and "teacher: " in str(found[1])

    on_bench(story)


def test_models_that_are_away_are_waited_for_by_name(on_bench: Run) -> None:
    async def story(bench: Bench) -> None:
        asked = asyncio.ensure_future(bench.scorer.score(tokens(1, 2, 3)))
        await bench.clock.sleep(300.0)
        assert not asked.done()
        waits = bench.shard.waits.published([])
        assert ("scoring/calc", "score by frozen models") in [(w["on"], w["what"]) for w in waits]
        await bench.models()
        assert set(await asked) == {"reference", "teacher"}
        assert bench.shard.waits.published([]) == []

    on_bench(story)


def test_a_successor_answers_what_its_predecessor_was_asked(on_bench: Run) -> None:
    async def story(bench: Bench) -> None:
        first = await bench.models(loaded=False)
        asked = asyncio.ensure_future(bench.scorer.score(tokens(1, 2, 3)))
        await bench.clock.sleep(45.0)  # longer than one call waits for models that are loaded
        assert not asked.done()
        await first.mesh.leave()
        await bench.models(1)
        found = await asked
        np.testing.assert_array_equal(
            found["teacher"][1:], bench.engines["teacher"].score(tokens(1, 2, 3))
        )

    on_bench(story)


def test_a_draining_process_sends_those_who_ask_to_its_successor(on_bench: Run) -> None:
    async def story(bench: Bench) -> None:
        first = await bench.models()
        first.draining = True
        asked = asyncio.ensure_future(bench.scorer.score(tokens(1, 2, 3)))
        await bench.clock.sleep(5.0)
        await first.mesh.leave()
        await bench.models(1)
        assert set(await asked) == {"reference", "teacher"}

    on_bench(story)


def test_models_that_never_come_fail_the_trajectory_by_type(on_bench: Run) -> None:
    async def story(bench: Bench) -> None:
        with pytest.raises(ScoringFailed, match="scoring/calc"):
            await bench.scorer.score(tokens(1, 2, 3))

    on_bench(story)


def test_a_verdict_is_the_probability_of_yes_against_no(on_bench: Run) -> None:
    async def story(bench: Bench) -> None:
        await bench.models()
        engine = eager(5)

        def likelihood(text: str, ending: str) -> float:
            ids = bench.tokenizer.encode(text + ending)
            return float(engine.score(np.array(ids, np.int32))[-len(ending) :].sum())

        texts = ["is 1 a number?", "why?"]
        found = await asyncio.gather(*(bench.scorer.verdict(text) for text in texts))
        for text, verdict in zip(texts, found, strict=True):
            yes, no = (np.exp(likelihood(text, ending)) for ending in ("y", "no"))
            assert verdict == pytest.approx(yes / (yes + no), rel=1e-4)
            assert 0 < verdict < 1

    on_bench(story)


def test_a_question_that_the_judge_cannot_read_fails_by_type(on_bench: Run) -> None:
    async def story(bench: Bench) -> None:
        await bench.models()
        texts = ["fine?", "Ω", "long" * ROOM]
        found = await asyncio.gather(
            *(bench.scorer.verdict(text) for text in texts), return_exceptions=True
        )
        assert [isinstance(one, ScoringFailed) for one in found] == [False, True, True]

    on_bench(story)


def test_members_that_nobody_read_are_zeros_beside_the_others() -> None:
    members = [Trajectory(0, i, 0, 0, 0) for i in range(2)]
    for t in members:
        t.begin([1, 2, 3])
    members[0].scores = {"teacher": np.array([0, -1, -2], np.float32)}
    assert beside(members, "teacher").tolist() == [0, -1, -2, 0, 0, 0]
