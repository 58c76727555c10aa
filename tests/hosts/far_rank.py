"""One of two ranks on separate hosts, with a deadline for each rendezvous and collective.

Usage:

    python -m tests.hosts.far_rank RANK SECONDS ADDRESS ADDRESS

The addresses are those of the hosts in rank order. The ranks train until the network fails, and
report it. Once a file `mended` exists, they meet again and repeat the first step. Each event is
printed as a line of JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshrl.common.api.ranks import Rendezvous
from meshrl.common.base.errors import RankLost
from meshrl.common.base.host.interfaces import find_address
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.weights.transports.rendezvous import open_listener
from meshrl.services.trainer.ranks import network_interface
from meshrl.services.trainer.ranks.group_failures import is_collective_error
from meshrl.services.trainer.ranks.rank import Rank
from tests.unit.trainer.ranks.batches_under_test import (
    bins_of_step,
    given_weights,
)
from tests.unit.trainer.ranks.rows_under_test import sharded_learner

PORT = 7100


def print_event(what: str, value: Any) -> None:
    print(json.dumps([what, value]), flush=True)


def join_rendezvous(rank: Rank, generation: int, addresses: list[str], deadline_s: float) -> None:
    """Join the rendezvous and print its seconds."""
    own = addresses[rank.rank]
    interface = network_interface.find_rank_interface(MeshSettings("", "", bind=f"tcp://{own}:*"))
    assert find_address(interface) == own, interface
    where = f"tcp://{addresses[0]}:{PORT + generation}/{generation}"
    listener = (
        open_listener(own, range(PORT + generation, PORT + generation + 1))
        if rank.rank == 0
        else None
    )
    with listener or contextlib.nullcontext():
        started_s = time.monotonic()
        rendezvous = Rendezvous(generation, where, deadline_s, addresses, deadline_s)
        rank.join(rendezvous, interface, listener)
        rank.create_model()
    print_event("met", time.monotonic() - started_s)
    names = list(rank.learner.get_meta_tensors(False))
    rank.learner.scatter_weights(names, given_weights("plain") if rank.rank == 0 else None)


def run_step(rank: Rank, step: int) -> str:
    """Return a digest of the weights after a step."""
    rank.begin_step()
    rank.compute_round(0, [bins_of_step(step)[rank.rank]])
    rank.apply_gradient(1, 100.0, 1.0)
    whole = [p.full_tensor() for p in rank.learner.get_weights().values()]  # type: ignore[attr-defined]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in whole)).hexdigest()


def await_loss(rank: Rank, step: int) -> float:
    """Return the seconds until a collective that the other rank does not join fails."""
    while True:
        step, started_s = step + 1, time.monotonic()
        try:
            run_step(rank, step)
        except RuntimeError as error:
            if is_collective_error(error):
                return time.monotonic() - started_s
            raise


def main(number: int, deadline_s: float, addresses: list[str]) -> None:
    torch.set_num_threads(1)
    rank = Rank(partial(sharded_learner, "plain"), number, 2, "cpu")
    join_rendezvous(rank, 1, addresses, deadline_s)
    print_event("step", run_step(rank, 0))
    print_event("lost", await_loss(rank, 0))
    rank.leave()
    try:  # no connection to the other host
        join_rendezvous(rank, 2, addresses, deadline_s)
    except RankLost as error:
        print_event("apart", str(error))
    rank.leave()
    while not Path("mended").exists():
        time.sleep(0.02)
    join_rendezvous(rank, 3, addresses, deadline_s)
    print_event("step", run_step(rank, 0))
    rank.leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
