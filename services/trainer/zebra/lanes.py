"""The two lanes of a zebra gang, in which rows go to experts and back: each is a thread with a
process group of its own, so that both directions move while the rank computes.

A lane takes its exchanges one by one, in an order that all ranks know. On a GPU it has a stream of
its own, and whoever uses what has come waits for an event of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import RankLost
from meshrl.services.trainer.zebra.pace import ZebraPace

LEAST_S = 1e-6  # of a transfer that is paced
WAKES_S = 3e-4  # in which a thread that slept is awake again


class ExchangeKey(NamedTuple):
    backward: bool
    mixture: int  # number of the mixture layer
    micro: int


@dataclass
class Exchange:
    """What goes from this rank to others in one step of a lane, and what comes from them.

    `counts` [experts that lie there], int64, go before rows where the other end cannot know how
    many come; else `sizes` says how many rows come from whom, by the time that they do.
    """

    key: ExchangeKey
    waits: bool  # until `Lane.give` or `Lane.ready`
    counted: bool  # whether counts go first
    sources: Mapping[int, int]  # ranks that give something to this one: the length of their counts
    width: int  # of a row
    dtype: torch.dtype
    sizes: Callable[[], Mapping[int, int]] = dict
    rows: Mapping[int, Tensor] = field(default_factory=dict)  # that go, by rank
    counts: Mapping[int, Tensor] = field(default_factory=dict)
    came: dict[int, Tensor] = field(default_factory=dict)  # until they are taken
    came_counts: dict[int, Tensor] = field(default_factory=dict)


class Shared:
    """What both lanes and the arithmetic of a rank wait at: who fails ends it for all."""

    def __init__(self, clock: Clock, deadline_s: float) -> None:
        self.condition = threading.Condition()
        self.now = clock.monotonic
        self._deadline_s = deadline_s
        self._failed: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Nobody waits any more in this round."""
        with self.condition:
            self._failed = self._failed or error
            self.condition.notify_all()

    def wait(self, there: Callable[[], bool], what: str) -> None:
        """Until it is there, with the condition held; what another part has raised, or RankLost."""
        found = self.condition.wait_for(lambda: bool(self._failed) or there(), self._deadline_s)
        if self._failed is not None:
            raise self._failed
        if not found:
            raise RankLost(f"{what} took over {self._deadline_s:g} s")

    def rest(self, until_s: float) -> None:
        """Do nothing until then (monotonic); the very end is not slept through."""
        with self.condition:
            while not self._failed and (left_s := until_s - WAKES_S - self.now()) > 0:
                self.condition.wait(left_s)
        while not self._failed and self.now() < until_s:
            pass


class Lane:
    """One direction. With `pace`, what a rank gives takes what a transfer does at least."""

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        device: torch.device,
        pace: ZebraPace | None = None,
    ) -> None:
        """All ranks of the group make it together, as NCCL wants for its first call."""
        self._name, self._group, self._device = name, group, device
        self._pace = pace
        self._stream: Any = None  # of its own on a GPU; elsewhere there are none
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._shared: Shared
        self._given: dict[ExchangeKey, Any] = {}  # events after which what is given is there
        self._done: dict[ExchangeKey, Any] = {}
        self._exchanges: dict[ExchangeKey, Exchange] = {}
        self.transfers: list[tuple[float, float]] = []  # what this rank gave in the last round
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    @contextmanager
    def round(self, exchanges: Sequence[Exchange], shared: Shared) -> Iterator[None]:
        """Runs these exchanges, in this order, within the block, whose end waits for them."""
        self._shared, self.transfers = shared, []
        self._given, self._done = {}, {}
        self._exchanges = {one.key: one for one in exchanges}
        about = list(exchanges), shared
        thread = threading.Thread(target=self._run, args=about, name=self._name, daemon=True)
        thread.start()
        try:
            yield
            with shared.condition:
                shared.wait(lambda: len(self._done) == len(exchanges), self._name)
        except BaseException as error:
            shared.fail(error)  # a thread that waits in the group ends with that
            raise
        thread.join()
        self._exchanges = {}

    def give(
        self,
        key: ExchangeKey,
        rows: Mapping[int, Tensor],
        counts: Mapping[int, Tensor] | None = None,
    ) -> None:
        """What this rank has to give in an exchange, by rank."""
        exchange = self._exchanges[key]
        exchange.rows, exchange.counts = rows, counts or {}
        self.ready(key)

    def ready(self, key: ExchangeKey) -> None:
        """It is known from now on how much comes in an exchange."""
        with self._shared.condition:
            self._given[key] = self._now()
            self._shared.condition.notify_all()

    def take(self, key: ExchangeKey) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Wait for an exchange: the rows that came, by rank, now the caller's, and counts."""
        with self._shared.condition:
            self._shared.wait(lambda: key in self._done, f"{self._name} of {key}")
            event = self._done[key]
        exchange = self._exchanges[key]
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            for tensor in (*exchange.came.values(), *exchange.came_counts.values()):
                tensor.record_stream(stream)
        rows, exchange.came = exchange.came, {}
        return rows, exchange.came_counts

    def came(self, key: ExchangeKey) -> dict[int, int]:
        """How many rows came in an exchange that was counted, by rank."""
        counts = self._exchanges[key].came_counts
        return {rank: int(some.sum()) for rank, some in counts.items()}

    def _now(self) -> Any:
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def _run(self, exchanges: Sequence[Exchange], shared: Shared) -> None:
        stream: Any = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        try:
            with torch.no_grad(), stream:
                for exchange in exchanges:
                    self._next(exchange, shared)
        except BaseException as error:
            shared.fail(error)

    def _next(self, one: Exchange, shared: Shared) -> None:
        if one.waits:
            with shared.condition:
                shared.wait(lambda: one.key in self._given, f"what goes to {self._name}")
            if self._stream is not None:
                self._stream.wait_event(self._given[one.key])
        began_s = shared.now()
        wanted_s = 0.0
        if self._pace is not None and one.rows:
            wanted_s = self._pace.transfer_s(sum(map(len, one.rows.values())))
        if self._pace is not None and wanted_s > LEAST_S:
            shared.rest(began_s + wanted_s)
            self._pace.took(wanted_s, shared.now() - began_s)
            self.transfers.append((began_s, shared.now()))
        self._exchange(one)
        with shared.condition:
            self._done[one.key] = self._now()
            shared.condition.notify_all()

    def _exchange(self, one: Exchange) -> None:
        sizes = one.sizes()
        if one.counted:
            lengths = {rank: (n,) for rank, n in one.sources.items()}
            one.came_counts = self._moved(one.counts, lengths, torch.int64)
            sizes = {rank: int(counts.sum()) for rank, counts in one.came_counts.items()}
        shapes = {rank: (sizes[rank], one.width) for rank in one.sources}
        one.came = self._moved(one.rows, shapes, one.dtype)
        one.rows, one.counts = {}, {}

    def _moved(
        self, going: Mapping[int, Tensor], shapes: Mapping[int, tuple[int, ...]], dtype: torch.dtype
    ) -> dict[int, Tensor]:
        """What comes of sending some tensors and receiving others, all of them at once."""
        came = {
            rank: torch.empty(shape, dtype=dtype, device=self._device)
            for rank, shape in shapes.items()
        }
        group, rank_of = self._group, dist.get_global_rank
        sent = {rank: tensor.contiguous() for rank, tensor in going.items()}
        ops = [
            dist.P2POp(operation, tensor, rank_of(group, rank), group)
            for operation, tensors in ((dist.isend, sent), (dist.irecv, came))
            for rank, tensor in sorted(tensors.items())
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        if self._stream is not None:
            for tensor in going.values():
                tensor.record_stream(self._stream)
        return came
