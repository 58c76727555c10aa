"""Lanes of a zebra gang, which carry rows to experts and back.

Each lane is a thread with its own process group, so that both directions transfer while the rank
computes. A lane runs its exchanges one by one. All ranks launch the exchanges of both lanes in one
order (`order_exchanges`), because NCCL may deadlock otherwise. On a GPU a lane has its own stream,
and consumers of received rows wait for an event of that stream. Numbers of rows travel through the
host's memory (gloo), so that no rank synchronizes with its GPU to learn the size of a transfer.
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
from meshrl.services.trainer.zebra.zebra_emulation import ZebraEmulation

MIN_TRANSFER_S = 1e-6  # of an emulated transfer
COUNTS_TAG = 1  # of messages with counts; rows have 0
POLL_S = 1e-4  # between two queries of a transfer on a GPU
WAKE_UP_S = 3e-4  # time that a sleeping thread takes to wake up


class ExchangeKey(NamedTuple):
    is_backward: bool
    moe_layer: int  # index among the MoE layers
    micro_batch: int


@dataclass
class Exchange:
    """Rows that this rank sends and receives in one step of a lane.

    Counts (int64 [experts of the receiver]) precede the rows if the receiver cannot know their
    number. Otherwise `get_receive_sizes` returns the rows per sender before they arrive.
    """

    key: ExchangeKey
    turn: int  # number of exchanges that this rank launches before it, in both lanes
    needs_input: bool  # until `ExchangeLane.send` or `ExchangeLane.mark_ready`
    sends_counts: bool  # whether counts precede rows
    source_ranks: Mapping[int, int]  # ranks that send to this one: the length of their counts
    row_width: int  # elements of a row
    dtype: torch.dtype
    get_receive_sizes: Callable[[], Mapping[int, int]] = dict
    sent_rows: Mapping[int, Tensor] = field(default_factory=dict)  # by rank
    received_rows: dict[int, Tensor] = field(default_factory=dict)  # until the caller takes them
    received_counts: dict[int, Tensor] = field(default_factory=dict)


class RoundSync:
    """Condition that both lanes and the arithmetic wait at; one failure ends all waits."""

    def __init__(self, clock: Clock, deadline_s: float) -> None:
        self.condition = threading.Condition()
        self.now = clock.monotonic
        self._deadline_s = deadline_s
        self._failure: BaseException | None = None
        self._launched = 0  # exchanges of both lanes in this round

    def fail(self, error: BaseException) -> None:
        """Record a failure and end all waits of this round."""
        with self.condition:
            self._failure = self._failure or error
            self.condition.notify_all()

    def wait(self, is_ready: Callable[[], bool], description: str) -> None:
        """Wait with the condition held; raise the round's failure, or RankLost at the deadline."""
        found = self.condition.wait_for(lambda: bool(self._failure) or is_ready(), self._deadline_s)
        if self._failure is not None:
            raise self._failure
        if not found:
            raise RankLost(f"{description} took longer than {self._deadline_s:g} s")

    @contextmanager
    def take_turn(self, turn: int, description: str) -> Iterator[None]:
        """Launch an exchange within the block, after the exchanges with earlier turns."""
        with self.condition:
            self.wait(lambda: self._launched == turn, f"the turn of {description}")
        yield
        with self.condition:
            self._launched += 1
            self.condition.notify_all()

    def poll(self, is_done: Callable[[], bool], description: str) -> None:
        """Wait for an event of a GPU; raise as `wait` does."""
        until_s = self.now() + self._deadline_s
        while not is_done():
            with self.condition:
                if self._failure is not None:
                    raise self._failure
                if self.now() > until_s:
                    raise RankLost(f"{description} took longer than {self._deadline_s:g} s")
                self.condition.wait(POLL_S)

    def sleep_until(self, until_s: float) -> None:
        """Sleep until a monotonic time; the last moments are a busy wait."""
        with self.condition:
            while not self._failure and (left_s := until_s - WAKE_UP_S - self.now()) > 0:
                self.condition.wait(left_s)
        while not self._failure and self.now() < until_s:
            pass


class ExchangeLane:
    """One direction of the exchange. Emulated transfers are padded to the declared link's speed."""

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        device: torch.device,
        emulation: ZebraEmulation | None = None,
    ) -> None:
        """Create the lane together with all ranks of the group: NCCL's first call is collective."""
        self._name, self._group, self._device = name, group, device
        self._emulation = emulation
        self._stream: Any = None  # one per lane on a GPU; none elsewhere
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._sync: RoundSync
        # events after which the rows to send are ready
        self._ready_events: dict[ExchangeKey, Any] = {}
        self._done_events: dict[ExchangeKey, Any] = {}
        self._exchanges: dict[ExchangeKey, Exchange] = {}
        self._count_sends: list[Any] = []  # works that hold the counts
        self.transfers: list[tuple[float, float]] = []  # when this rank sent
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    @contextmanager
    def run_round(self, exchanges: Sequence[Exchange], sync: RoundSync) -> Iterator[None]:
        """Run these exchanges in order within the block; leaving it waits for them."""
        self._sync, self.transfers = sync, []
        self._ready_events, self._done_events = {}, {}
        self._exchanges = {one.key: one for one in exchanges}
        about = list(exchanges), sync
        thread = threading.Thread(
            target=self._run_exchanges, args=about, name=self._name, daemon=True
        )
        thread.start()
        try:
            yield
            with sync.condition:
                sync.wait(lambda: len(self._done_events) == len(exchanges), self._name)
        except BaseException as error:
            sync.fail(error)  # a thread that waits in the group ends with this
            raise
        thread.join()
        for work in self._count_sends:
            work.wait()
        self._exchanges, self._count_sends = {}, []

    def send(
        self,
        key: ExchangeKey,
        rows: Mapping[int, Tensor],
        counts: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Provide the rows that this rank sends in an exchange, by rank; send their counts."""
        for rank, some in sorted((counts or {}).items()):
            about = dist.get_global_rank(self._group, rank), self._group, COUNTS_TAG
            self._count_sends.append(dist.isend(some, *about))
        self._exchanges[key].sent_rows = rows
        self.mark_ready(key)

    def mark_ready(self, key: ExchangeKey) -> None:
        """Mark the sizes of an exchange's incoming rows as known."""
        with self._sync.condition:
            self._ready_events[key] = self._record_event()
            self._sync.condition.notify_all()

    def receive(self, key: ExchangeKey) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Wait for an exchange; return its rows by rank, which the caller then owns, and counts."""
        with self._sync.condition:
            self._sync.wait(lambda: key in self._done_events, f"{self._name} of {key}")
            event = self._done_events[key]
        exchange = self._exchanges[key]
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            for tensor in exchange.received_rows.values():
                tensor.record_stream(stream)
        rows, exchange.received_rows = exchange.received_rows, {}
        return rows, exchange.received_counts

    def count_received(self, key: ExchangeKey) -> dict[int, int]:
        """Return the number of rows received in an exchange with counts, by rank."""
        counts = self._exchanges[key].received_counts
        return {rank: int(some.sum()) for rank, some in counts.items()}

    def _record_event(self) -> Any:
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def _run_exchanges(self, exchanges: Sequence[Exchange], sync: RoundSync) -> None:
        stream: Any = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        try:
            with torch.no_grad(), stream:
                for exchange in exchanges:
                    self._run_exchange(exchange, sync)
        except BaseException as error:
            sync.fail(error)

    def _run_exchange(self, exchange: Exchange, sync: RoundSync) -> None:
        if exchange.needs_input:
            with sync.condition:
                sync.wait(lambda: exchange.key in self._ready_events, f"input of {self._name}")
            if self._stream is not None:
                self._stream.wait_event(self._ready_events[exchange.key])
        if exchange.sends_counts:
            exchange.received_counts = self._receive_counts(exchange.source_ranks)
        wanted_s = 0.0
        if self._emulation is not None and exchange.sent_rows:
            rows = sum(map(len, exchange.sent_rows.values()))
            wanted_s = self._emulation.predict_transfer_s(rows)
        with sync.take_turn(exchange.turn, f"{self._name} of {exchange.key}"):
            works = [] if wanted_s > MIN_TRANSFER_S else self._launch(exchange)
        if self._emulation is not None and wanted_s > MIN_TRANSFER_S:
            # The declared link is busy from the turn on; the real transfer takes no time.
            began_s = sync.now()
            sync.sleep_until(began_s + wanted_s)
            self._emulation.record(wanted_s, sync.now() - began_s)
            self.transfers.append((began_s, sync.now()))
            works = self._launch(exchange)
        for work in works:
            work.wait()  # on a GPU only the stream waits
        event = self._record_event()
        with sync.condition:
            self._done_events[exchange.key] = event
            sync.condition.notify_all()
        if event is not None:
            sync.poll(event.query, f"{self._name} of {exchange.key}")

    def _receive_counts(self, lengths: Mapping[int, int]) -> dict[int, Tensor]:
        """Return the counts of an exchange's incoming rows, by rank, in host memory."""
        came = {rank: torch.empty(n, dtype=torch.int64) for rank, n in lengths.items()}
        group = self._group
        works = [
            dist.irecv(counts, dist.get_global_rank(group, rank), group, COUNTS_TAG)
            for rank, counts in came.items()
        ]
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()  # up to the group's deadline
        return came

    def _launch(self, exchange: Exchange) -> list[Any]:
        """Start to send and receive the rows, all at once; return the works to wait for."""
        sizes = exchange.get_receive_sizes()
        if exchange.sends_counts:
            sizes = {rank: int(counts.sum()) for rank, counts in exchange.received_counts.items()}
        exchange.received_rows = came = {
            rank: torch.empty(
                (sizes[rank], exchange.row_width), dtype=exchange.dtype, device=self._device
            )
            for rank in exchange.source_ranks
        }
        group, rank_of = self._group, dist.get_global_rank
        sent = {rank: tensor.contiguous() for rank, tensor in exchange.sent_rows.items()}
        ops = [
            dist.P2POp(operation, tensor, rank_of(group, rank), group)
            for operation, tensors in ((dist.isend, sent), (dist.irecv, came))
            for rank, tensor in sorted(tensors.items())
            if tensor.numel()
        ]
        works = dist.batch_isend_irecv(ops) if ops else []
        if self._stream is not None:
            for tensor in exchange.sent_rows.values():
                tensor.record_stream(self._stream)
        exchange.sent_rows = {}
        return works
