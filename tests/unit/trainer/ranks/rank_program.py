"""The ranks of a gang, without a mesh: `python rank_program.py RANKS DIRECTORY`.

They are forks of one process, because importing PyTorch costs more than all that they do. Each
trains the batches of `batches_under_test` for a few steps, in each variant. Some rounds are
computed as a hybrid would, by a plain learner; halfway the whole state moves to new ranks. Rank 0
writes weights and the optimizer's state.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # which FSDP imports in each process, for two CPU-seconds
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh

from services.trainer.ranks.rank import Rank, ShardedLearner, filler
from tests.unit.trainer.ranks.batches_under_test import (
    OPTIMIZER,
    STEPS,
    VARIANTS,
    bins_of_step,
    fresh_learner,
    fresh_model,
    given_weights,
)


def make(variant: str, mesh: DeviceMesh) -> ShardedLearner:
    chosen = VARIANTS[variant]
    return ShardedLearner(
        fresh_model(variant),
        OPTIMIZER,
        chosen.algorithm,
        dtype=chosen.dtype,
        mesh=mesh,
        adapters=chosen.adapters,
        seed=3,
    )


def train_all(number: int, ranks: int, directory: Path) -> None:
    torch.set_num_threads(1)
    for variant in VARIANTS:
        rank = Rank(partial(make, variant), number, ranks, "cpu")
        rank.form(directory / f"{variant}-first", 60.0)
        rank.take(given_weights(variant) if number == 0 else None, None, all=False)
        norms = []
        for step in range(STEPS):
            if step == STEPS // 2:
                weights, state = rank.gather(optimizer=False), rank.gather(optimizer=True)
                rank.leave()
                rank.form(directory / f"{variant}-second", 60.0)
                rank.take(weights or None, state or None, all=True)
            norms.append(train(rank, step, variant))
        weights, state = rank.gather(optimizer=False), rank.gather(optimizer=True)
        what = "values" if variant == "critic" else "logprobs"
        scores = torch.from_numpy(rank.score(bins_of_step(0)[number], what))
        save_file({"scores": scores}, directory / f"{variant}{number}.safetensors")
        if number == 0:
            save_file({**weights, "norms": torch.tensor(norms)}, directory / f"{variant}.weights")
            save_file(state, directory / f"{variant}.state")
        rank.leave()


def train(rank: Rank, step: int, variant: str) -> float:
    bins = bins_of_step(step)
    rounds = [bins[i : i + rank.ranks] for i in range(0, len(bins), rank.ranks)]
    weights = {
        name: getattr(p, "full_tensor", lambda p=p: p)()
        for name, p in rank.learner.weights().items()
    }
    rank.begin()
    for index, of_round in enumerate(rounds):
        if index == 1 and variant != "critic":  # a critic's weights are nowhere but in the core
            hybrid = fresh_learner(variant)
            hybrid.load_weights(weights)
            gradient, _ = hybrid.round_gradient(of_round)
            rank.keeping()(index, gradient.numpy())
        else:
            of_round += [filler(of_round[0])] * (rank.ranks - len(of_round))
            rank.compute(index, of_round[rank.rank])
    return rank.apply(len(rounds), 100.0, 1.0)


def fork(number: int, ranks: int, directory: Path) -> int:
    """The process of a rank."""
    pid = os.fork()
    if pid:
        return pid
    try:
        train_all(number, ranks, directory)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(ranks: int, directory: Path) -> int:
    """Ends the other ranks when one of them fails; its exit status."""
    running = {fork(number, ranks, directory) for number in range(ranks)}
    failed = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        failed = failed or status
        for other in running if failed else ():
            os.kill(other, signal.SIGKILL)
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
