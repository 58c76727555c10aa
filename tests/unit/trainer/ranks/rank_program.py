"""Ranks of a gang, without a mesh: `python -m MODULE RANKS DIRECTORY VARIANT..`.

They are forks of one process, because the import of PyTorch is most of their cost. Each trains the
batches of `batches_under_test` for a few steps, in each variant. A plain learner computes some
rounds as a hybrid would. After a step the whole state moves to new ranks, which rendezvous as on
several hosts. Rank 0 writes weights and the optimizer's state.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # DTensor's import by FSDP costs each process two CPU-seconds
import torch.distributed as dist
from safetensors.torch import save_file

from meshrl.common.api.ranks import Rendezvous
from meshrl.common.base.files import offloaded_tensors
from meshrl.common.base.files.offload_media import OffloadFile
from meshrl.common.model.files.tensor_source import batch_by_bytes
from meshrl.common.weights.transports.rendezvous import format_rendezvous_url, open_listener
from meshrl.services.trainer.compute.gradient_transfer import cut_pieces
from meshrl.services.trainer.ranks.rank import Rank, make_filler_bin
from meshrl.services.trainer.ranks.row_tasks import write_rows
from meshrl.services.trainer.rows.saved_rows import MASTER_PREFIX, SavedRows
from tests.load import scaled
from tests.unit.trainer.forking import fork_all
from tests.unit.trainer.ranks.batches_under_test import (
    STEPS,
    bins_of_step,
    fresh_learner,
    fresh_model,
    given_weights,
    has_critic,
)
from tests.unit.trainer.ranks.rows_under_test import sharded_learner
from tests.unit.trainer.state_transfer import load_state

STEPS_BEFORE_MOVE = 1
SOME_BYTES = 4096  # of tensors that are gathered together


def assert_begins_whole(rank: Rank, variant: str, place: Path) -> None:
    """Assert that rows drawn rank by rank equal those of a model drawn as a whole, bit for bit. A
    critic starts from them.
    """
    save_rows_of(rank, place)
    if rank.rank:
        return
    found, plain = load_whole_state(rank, place), fresh_learner(variant)
    expected = named(plain.get_weights()) | plain.copy_optimizer_state()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    decoder = rank.learner.model
    assert torch.equal(decoder.rope, fresh_model(variant).rope)


def named(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights by their names in a checkpoint."""
    return {MASTER_PREFIX + name: tensor for name, tensor in weights.items()}


def get_meta_tensors(rank: Rank) -> dict[str, torch.Tensor]:
    return named(rank.learner.get_meta_tensors(False)) | dict(rank.learner.get_meta_tensors(True))


def save_rows_of(rank: Rank, place: Path) -> None:
    """Save each rank's rows, some tensors to a file; return when all ranks have."""
    for number, names in enumerate(batch_by_bytes(get_meta_tensors(rank), SOME_BYTES)):
        write_rows(rank, place, names, number, include_masters=True)
    dist.barrier()


def load_whole_state(rank: Rank, place: Path) -> dict[str, torch.Tensor]:
    """Return what all ranks have saved."""
    state = {n: torch.empty_like(t, device="cpu") for n, t in get_meta_tensors(rank).items()}
    load_state(place, state)
    return state


def weights_of(rank: Rank, place: Path) -> dict[str, torch.Tensor]:
    """Return all weights, which every rank gathers."""
    save_rows_of(rank, place)
    found = load_whole_state(rank, place)
    return {name: found[MASTER_PREFIX + name] for name in rank.learner.get_meta_tensors(False)}


def restore(rank: Rank, place: Path) -> None:
    """Load this rank's rows of the saved state, whichever rank saved them."""
    saved = SavedRows(place)
    rank.learner.restore(saved, lambda name, part: saved.fill(MASTER_PREFIX + name, part))


def load_received_weights(rank: Rank, given: dict[str, torch.Tensor]) -> None:
    """Load the weights that rank 0 received."""
    rank.learner.scatter_weights(
        list(rank.learner.get_meta_tensors(False)), None if rank.rank else given
    )


def train_all(
    number: int, ranks: int, directory: Path, listeners: dict[str, socket.socket]
) -> None:
    torch.set_num_threads(1)
    for variant in listeners:
        rank = Rank(partial(sharded_learner, variant), number, ranks, "cpu")
        first = str(directory / f"{variant}-first")
        rank.join(Rendezvous(1, first, scaled(60.0), form_timeout_s=scaled(60.0)))
        rank.create_model()
        assert_begins_whole(rank, variant, directory / f"{variant}-begun")
        load_received_weights(rank, given_weights(variant))
        norms = []
        for step in range(STEPS):
            if step == STEPS_BEFORE_MOVE:
                halfway = directory / f"{variant}-halfway"
                save_rows_of(rank, halfway)
                rank.leave()
                listener = listeners[variant]
                where, within_s = format_rendezvous_url(listener, variant), scaled(60.0)
                second = Rendezvous(2, where, within_s, form_timeout_s=within_s)
                rank.join(second, "lo", listener if number == 0 else None)
                rank.create_model()
                restore(rank, halfway)
            norms.append(train(rank, step, variant, directory))
        exit_file = directory / f"{variant}-ended"
        save_rows_of(rank, exit_file)
        what = "values" if has_critic(variant) else "logprobs"
        scores = torch.from_numpy(rank.score(bins_of_step(0)[number], what))
        save_file({"scores": scores}, directory / f"{variant}{number}.safetensors")
        if number == 0:
            found = load_whole_state(rank, exit_file)
            weights = {
                n: found.pop(MASTER_PREFIX + n) for n in rank.learner.get_meta_tensors(False)
            }
            save_file({**weights, "norms": torch.tensor(norms)}, directory / f"{variant}.weights")
            save_file(found, directory / f"{variant}.state")
        rank.leave()


def train(rank: Rank, step: int, variant: str, directory: Path) -> float:
    bins = bins_of_step(step)
    rounds = [bins[i : i + rank.ranks] for i in range(0, len(bins), rank.ranks)]
    weights = weights_of(rank, directory / f"{variant}-{step}")
    rank.begin_step()
    for index, of_round in enumerate(rounds):
        if index == 1 and not has_critic(variant):  # a critic's weights exist only in the core
            hybrid = fresh_learner(variant)
            hybrid.load_weights(weights)
            gradient, _ = hybrid.compute_round_gradient(of_round)
            own = rank.learner.list_owned_ranges(rank.rank)
            rank.make_gradient_adder()(index, np.concatenate(list(cut_pieces(gradient, own))))
        else:
            of_round += [make_filler_bin(of_round[0])] * (rank.ranks - len(of_round))
            rank.compute_round(index, [of_round[rank.rank]])
        offload_and_restore(rank, directory / f"{rank.rank}.kept")
    return rank.apply_gradient(len(rounds), 100.0, 1.0)


def offload_and_restore(rank: Rank, place: Path) -> None:
    """Offload this rank's rows and the step's gradient to a file, and restore them."""
    kinds = [source.collect() for source in rank.make_kinds().values()]
    tensors = rank.learner.get_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for number, memory in enumerate(kinds):
        file = OffloadFile(place.with_suffix(f".{number}"), create=True)
        offloaded_tensors.offload(file, {}, memory)
        memory.release()
        file.commit()
        file.close()
    unreleased = [n for n, t in tensors.items() if t.untyped_storage().nbytes()]
    assert not unreleased, unreleased
    for number, memory in enumerate(kinds):
        memory.reallocate()
        for name, size in memory.sizes_bytes.items():
            memory.write(name, 0, np.full(size, 255, np.uint8))
        file = OffloadFile(place.with_suffix(f".{number}"))
        offloaded_tensors.restore(file, offloaded_tensors.read_header(file), memory)
        memory.refresh()
        file.close()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())


def main(ranks: int, directory: Path, variants: Sequence[str]) -> int:
    listeners = {variant: open_listener("127.0.0.1", range(1)) for variant in variants}
    return fork_all(lambda number: train_all(number, ranks, directory, listeners), ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
