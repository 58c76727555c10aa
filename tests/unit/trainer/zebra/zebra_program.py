"""Ranks of a zebra gang, without a mesh: `python -m MODULE DIRECTORY CASE`.

They are forks of one process. Each computes the rounds of a case of `cases` twice, and writes
its rows of the gradients, the statistics of its bins and, after a step, its rows of the weights.
It also writes the order in which it launched transfers with each other rank. One lane of some ranks
is slow to launch.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch._dynamo  # DTensor's import costs each process two CPU-seconds
import torch.distributed as dist
from safetensors.torch import save_file

from meshrl.common.api.ranks import Rendezvous
from meshrl.common.model.files.initial_parameters import RandomParameters
from meshrl.common.model.network.decoder import Decoder
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.learner.learner import LearnerSettings
from meshrl.services.trainer.ranks.rank import join_group, leave_group
from meshrl.services.trainer.sharding.learners import RankContext
from meshrl.services.trainer.zebra.zebra_learner import ZebraLearner
from tests.load import scaled
from tests.unit.trainer.forking import fork_all
from tests.unit.trainer.zebra.cases import ALGORITHM, CASES, OPTIMIZER, SEED, Case, bins

RANKS = 4
ROUNDS = 2
DEADLINE_S = 60.0


SLOW_LAUNCH_S = 0.005


class LaunchRecorder:
    """Wrapper of point-to-point launches that records them in order, and delays those of a lane."""

    def __init__(self, rank: int) -> None:
        names = dist.distributed_c10d._world.pg_names
        self._lanes = sorted(names, key=names.__getitem__)[-2:]  # dispatch, combine
        self._slow_lane, self._launch = rank % 2, dist.batch_isend_irecv
        self._launches: list[tuple[int, int]] = []  # peer, lane
        vars(dist)["batch_isend_irecv"] = self

    def __call__(self, ops: list[dist.P2POp]) -> list[dist.Work]:
        lane = self._lanes.index(ops[0].group)
        if lane == self._slow_lane:
            time.sleep(SLOW_LAUNCH_S)
        self._launches += sorted({(op.peer, lane) for op in ops})
        return self._launch(ops)

    def list_lanes(self, peer: int) -> torch.Tensor:
        """Return the lanes of all launches with a peer, in order."""
        return torch.tensor([lane for other, lane in self._launches if other == peer])


def run_case(rank: int, directory: Path, name: str) -> None:
    torch.set_num_threads(1)
    case = CASES[name]
    place = str(directory / f"{name}-meeting")
    rendezvous = Rendezvous(1, place, scaled(DEADLINE_S), form_timeout_s=scaled(DEADLINE_S))
    mesh = join_group(rendezvous, rank, RANKS, "cpu")
    with torch.device("meta"):
        model = Decoder(case.config)
    settings = LearnerSettings(OPTIMIZER, ALGORITHM, dtype=case.dtype)
    gang = RankContext(mesh, RandomParameters(case.config, SEED), scaled(DEADLINE_S))
    learner = ZebraLearner(model, settings, gang, case.shape, case.again)
    recorder = LaunchRecorder(rank)
    made = compute_case(learner, case, rank)
    made |= {f"launches.{peer}": recorder.list_lanes(peer) for peer in range(RANKS)}
    save_file(made, directory / f"{name}-{rank}.safetensors")
    leave_group()


def compute_case(learner: ZebraLearner, case: Case, rank: int) -> dict[str, torch.Tensor]:
    """Return gradients, statistics, scores, and weights after a step."""
    made: dict[str, torch.Tensor] = {}
    total = None
    for number in range(ROUNDS):
        own = own_bins(case, number, rank)
        gradient, stats = learner.compute_local_gradient(own)
        again, _ = learner.compute_local_gradient(own)
        assert torch.equal(gradient, again), "a repeated round has other bits"
        made[f"gradient.{number}"] = gradient.clone()
        made[f"loss.{number}"] = torch.tensor([asdict(one)["loss_sum"] for one in stats])
        total = gradient if total is None else total.add_(gradient)
    like = bins(case, 0)
    scored = like[rank * case.shape.micro_batches] if learner.has_attention else like[0]
    made["scores"] = torch.from_numpy(learner.score(scored))
    assert total is not None
    made["norm"] = torch.tensor(learner.apply_gradient(total, 50.0, 1.0))
    made |= {
        f"weights.{name}": part.rows.clone()
        for name, part in learner.get_rows(learner.get_weights()).items()
    }
    gradient, _ = learner.compute_local_gradient(own_bins(case, 0, rank))
    made["gradient.after"] = gradient
    return made


def own_bins(case: Case, number: int, rank: int) -> list[Bin]:
    micros = case.shape.micro_batches
    return bins(case, number)[rank * micros : (rank + 1) * micros]


if __name__ == "__main__":
    sys.exit(fork_all(lambda rank: run_case(rank, Path(sys.argv[1]), sys.argv[2]), RANKS))
