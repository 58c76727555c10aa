"""One rank of a gang without a mesh: `python rank_program.py RANK RANKS MEETING OUT`.

It trains the batches of `batches_under_test` for a few steps. Some rounds are computed as a hybrid
would, by a plain learner; halfway the whole state moves to new ranks. Rank 0 writes the weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from batches_under_test import ALGORITHM, OPTIMIZER, STEPS, bins_of_step, fresh_model
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh

from services.trainer.learner import Learner
from services.trainer.ranks import Rank, ShardedLearner, filler


def make(mesh: DeviceMesh) -> ShardedLearner:
    return ShardedLearner(fresh_model(), OPTIMIZER, ALGORITHM, mesh=mesh)


def main(number: int, ranks: int, meeting: Path, out: Path) -> None:
    torch.set_num_threads(1)
    rank = Rank(make, number, ranks, "cpu")
    rank.form(meeting / "first", 30.0)
    norms = []
    for step in range(STEPS):
        if step == STEPS // 2:
            weights, state = rank.gather(optimizer=False), rank.gather(optimizer=True)
            rank.leave()
            rank.form(meeting / "second", 30.0)
            rank.take(weights or None, state or None, all=True)
        norms.append(train(rank, step))
    weights = rank.gather(optimizer=False)
    scores = rank.score(bins_of_step(0)[number], "logprobs")
    save_file({"scores": torch.from_numpy(scores)}, out / f"scores{number}.safetensors")
    if number == 0:
        save_file({**weights, "norms": torch.tensor(norms)}, out / "weights.safetensors")
    rank.leave()


def train(rank: Rank, step: int) -> float:
    bins = bins_of_step(step)
    rounds = [bins[i : i + rank.ranks] for i in range(0, len(bins), rank.ranks)]
    weights = {name: p.full_tensor() for name, p in rank.learner.model.named_parameters()}
    rank.begin()
    for index, bins_of_round in enumerate(rounds):
        if index == 1:  # as if a hybrid had computed it
            hybrid = Learner(fresh_model(), OPTIMIZER, ALGORITHM)
            hybrid.load_weights(weights)
            gradient, _ = hybrid.round_gradient(bins_of_round)
            rank.keep(index, rank.learner.own_part(gradient.numpy(), rank.rank))
        else:
            bins_of_round += [filler(bins_of_round[0])] * (rank.ranks - len(bins_of_round))
            rank.compute(index, bins_of_round[rank.rank])
    return rank.apply(len(rounds), 100.0, 1.0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
