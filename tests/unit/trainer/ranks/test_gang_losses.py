"""What a gang makes of errors: a lost rank is waited for, a mistake is not repeated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.api.ranks import (
    Adopt,
    Done,
    LentGradient,
    Meeting,
    Norm,
    Order,
    Ranks,
    RoundPart,
    RoundStats,
    ScorePart,
    Scores,
    Taking,
    Update,
    rank_name,
)
from common.api.role import Drain, Drained
from common.clock import SystemClock
from common.errors import ConfigError, Fenced, MeshError, RankLost, Refused, RemoteFailure
from common.runtime.actor import Actor, call
from common.runtime.mesh import Mesh
from services.trainer.arithmetic.stats import BinStats
from services.trainer.helpers.gradient_transfer import read
from services.trainer.ranks.gang import GangCompute
from services.trainer.ranks.rank import Rank, ShardedLearner, join_group, of_the_group
from sim.state import simulated_state
from tests.meshes import on_sockets
from tests.unit.trainer.ranks.batches_under_test import (
    OPTIMIZER,
    VARIANTS,
    bins_of_step,
    fresh_model,
)

JOB = "job"


class FirstRank(Rank):
    """The rank 0 of two, whose process group has itself alone: the other one only answers."""

    def form(self, meeting: Path, deadline_s: float) -> None:
        self._learner = self._make(join_group(meeting, 0, 1, "cpu", deadline_s))
        self.begin()


class OtherRank(Actor):
    """Answers, or raises what `raises` names for an order."""

    interface = Ranks

    def __init__(self) -> None:
        self.raises: dict[str, Exception] = {}
        self.given: dict[int, np.ndarray[Any, Any]] = {}
        self.adopted: list[tuple[float, float]] = []

    def _done(self, order: str) -> Done:
        if order in self.raises:
            raise self.raises[order]
        return Done()

    @call(Ranks.stand_by)
    def stand_by(self, order: Order) -> Done:
        return self._done("stand_by")

    @call(Ranks.form)
    def form(self, meeting: Meeting) -> Done:
        return self._done("form")

    @call(Ranks.begin)
    def begin(self, order: Order) -> Done:
        return self._done("begin")

    @call(Ranks.compute)
    def compute(self, part: RoundPart) -> RoundStats:
        self._done("compute")
        return RoundStats(asdict(BinStats(tokens=1)))

    @call(Ranks.keep)
    def keep(self, lent: LentGradient) -> Done:
        self.given[lent.index] = np.array(read(lent.path, lent.size))
        return self._done("keep")

    @call(Ranks.adopt)
    def adopt(self, order: Adopt) -> Done:
        self.adopted.append((order.algorithm["clip_high"], order.optimizer["muon_lr"]))
        return self._done("adopt")

    @call(Ranks.apply)
    def apply(self, update: Update) -> Norm:
        self._done("apply")
        return Norm(0.0)

    @call(Ranks.score)
    def score(self, part: ScorePart) -> Scores:
        self._done("score")
        return Scores(np.zeros(len(part.bin["tokens"]), np.float32))

    @call(Ranks.gather)
    def gather(self, taking: Taking) -> Done:
        return self._done("gather")

    @call(Ranks.take)
    def take(self, taking: Taking) -> Done:
        return self._done("take")

    @call(Ranks.drain)
    def drain(self, request: Drain) -> Drained:
        return Drained()


class Gang:
    """A core's gang of two."""

    def __init__(self, mesh: Mesh, other: OtherRank, directory: Path) -> None:
        def make(group: Any) -> ShardedLearner:
            return ShardedLearner(fresh_model(), OPTIMIZER, VARIANTS["plain"].algorithm, mesh=group)

        self.other, self.directory = other, directory
        self.rank = FirstRank(make, 0, 2, "cpu")
        self.compute = GangCompute(mesh, JOB, self.rank, directory, 20.0)

    @property
    def in_a_group(self) -> bool:
        try:
            return self.rank.learner is not None
        except Refused:
            return False


@pytest.fixture
async def gang(tmp_path: Path) -> AsyncIterator[Gang]:
    clock = SystemClock()
    state = simulated_state(clock)

    def mesh(name: str) -> Mesh:
        return on_sockets(name, state, clock)

    core, elsewhere = mesh(f"trainer/{JOB}"), mesh(rank_name(JOB, 1))
    other = OtherRank()
    await elsewhere.join(other)
    await core.join(None)
    made = Gang(core, other, tmp_path)
    await made.compute.form()
    yield made
    made.rank.leave()
    await core.leave()
    await elsewhere.leave()
    await state.close()


def a_round() -> list[Any]:
    return bins_of_step(0)[:2]


async def test_a_lost_rank_ends_the_group_and_a_new_one_goes_on(gang: Gang) -> None:
    for lost in (Fenced("an order of an earlier generation"), RankLost("a collective failed")):
        gang.other.raises["compute"] = lost
        with pytest.raises(RankLost, match=str(lost)):
            await gang.compute.compute(0, a_round())
        assert not gang.in_a_group
        with pytest.raises(RankLost, match=str(lost)):  # until it is formed again
            await gang.compute.begin()
        gang.other.raises.clear()
        await gang.compute.form()
        await gang.compute.begin()
        stats = await gang.compute.compute(0, a_round())
        assert stats.tokens == a_round()[0].mask.sum() + 1


async def test_another_ranks_mistake_is_raised_as_what_it_is(gang: Gang) -> None:
    gang.other.raises["compute"] = TypeError("not a tensor")
    with pytest.raises(RemoteFailure, match="TypeError: not a tensor"):
        await gang.compute.compute(0, a_round())
    assert not gang.in_a_group
    gang.other.raises = {"form": TypeError("not a path")}
    with pytest.raises(RemoteFailure, match="not a path"):  # at once, and not once more
        await gang.compute.form()


async def test_this_ranks_mistake_is_raised_as_what_it_is(gang: Gang) -> None:
    first, second = a_round()
    wrong = replace(first, tokens=first.tokens + 10_000)  # in no vocabulary
    with pytest.raises(IndexError):
        await gang.compute.compute(0, [wrong, second])
    assert not gang.in_a_group


async def test_an_error_in_the_job_leaves_the_group_as_it_is(gang: Gang) -> None:
    gang.other.raises["compute"] = ConfigError("the job cannot be")
    with pytest.raises(ConfigError):
        await gang.compute.compute(0, a_round())
    assert gang.in_a_group


async def test_all_ranks_are_lent_a_hybrids_gradient(gang: Gang) -> None:
    gradient = np.arange(gang.compute.size, dtype=np.float32)
    await gang.compute.keep(0, gradient)
    norm = await gang.compute.apply(1, 1.0, 1.0)
    assert norm == pytest.approx(float(np.linalg.norm(gradient.astype(np.float64))))
    assert gang.other.given[0].tobytes() == gradient.tobytes()
    assert not [path for path in (gang.directory / "lent").rglob("*") if path.is_file()]


async def test_all_ranks_compute_with_other_settings_until_the_gang_is_formed_anew(
    gang: Gang,
) -> None:
    algorithm = replace(VARIANTS["plain"].algorithm, clip_high=0.5)
    await gang.compute.adopt(algorithm, replace(OPTIMIZER, muon_lr=0.25))
    assert gang.other.adopted == [(0.5, 0.25)] and gang.in_a_group


@pytest.mark.parametrize(
    ("raised", "told"),
    [(Fenced("another generation"), RankLost), (TypeError("no rows"), RemoteFailure)],
)
async def test_a_gradient_that_a_rank_cannot_take_ends_the_group_and_is_told(
    gang: Gang, raised: Exception, told: type[MeshError]
) -> None:
    gang.other.raises["keep"] = raised
    size = gang.compute.size
    for index in (0, 1):  # the failure of one breaks the other one off
        await gang.compute.keep(index, np.ones(size, np.float32))
    with pytest.raises(told, match=str(raised)):
        await gang.compute.apply(2, 1.0, 1.0)
    assert not gang.in_a_group
    gang.other.raises.clear()
    await gang.compute.form()
    assert gang.in_a_group


def test_only_what_collectives_raise_tells_of_a_lost_rank() -> None:
    assert of_the_group(RuntimeError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed"))
    assert not of_the_group(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
