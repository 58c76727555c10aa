"""Round of a zebra gang on one rank: its tasks in order, and the exchanges between them.

Every attention rank has `micro_batches` bins. Rows are sorted by expert before dispatch, so that
the rows of each expert rank are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshrl.common.base.clock import SystemClock
from meshrl.common.hardware.zebra.schedule import (
    LaneKind,
    ScheduledTask,
    TaskKind,
    order_attention_tasks,
    order_exchanges,
    order_expert_tasks,
)
from meshrl.common.model.network.moe import invert_permutation
from meshrl.services.trainer.models.forward import DeviceBin
from meshrl.services.trainer.zebra import expert_passes as of_experts
from meshrl.services.trainer.zebra.decoder_pieces import (
    DecoderPieces,
    PieceInputs,
    PieceOutputs,
    PiecePass,
)
from meshrl.services.trainer.zebra.exchange_lanes import (
    Exchange,
    ExchangeKey,
    ExchangeLane,
    RoundSync,
)
from meshrl.services.trainer.zebra.expert_passes import ExpertPass
from meshrl.services.trainer.zebra.zebra_emulation import ZebraEmulation
from meshrl.services.trainer.zebra.zebra_ownership import ZebraOwnership

# Micro-batch, its bin and the last piece's inputs; returns the gradients of these inputs.
RunHead = Callable[[int, DeviceBin, PieceInputs], PieceInputs | None]


@dataclass(frozen=True)
class SortedRouting:
    """Order of a micro-batch's rows for the experts of one layer."""

    order: Tensor  # int64 [n * k]: choices, sorted by expert
    inverse: Tensor  # int64 [n * k]: its inverse
    expert_counts: dict[int, Tensor]  # int64 [experts of the rank] in host memory, by rank
    row_counts: dict[int, int]  # rows, by rank


@dataclass
class ComputedSpan:
    """Time span in which a task was computed, on the monotonic clock."""

    task: ScheduledTask
    start_s: float
    end_s: float


@dataclass
class MicroBatch:
    """State of one micro-batch between its tasks."""

    device_bin: DeviceBin
    lengths: Sequence[int]  # of its sequences
    balance_weight: Tensor  # scalar: weight of a layer's balance loss
    piece_passes: dict[int, PiecePass] = field(default_factory=dict)  # by piece
    routings: dict[int, SortedRouting] = field(default_factory=dict)  # by MoE layer
    gradient: PieceInputs | None = None  # from the next piece


class ZebraRound:
    """Executor of a rank's tasks in a round; it blocks, and the lanes are threads."""

    def __init__(
        self,
        ownership: ZebraOwnership,
        rank: int,
        pieces: DecoderPieces,
        lanes: tuple[ExchangeLane, ExchangeLane],
        deadline_s: float,
        recompute: bool,
        emulation: ZebraEmulation | None = None,
    ) -> None:
        """Create an executor of rounds.

        Args:
            lanes: Dispatch and combine.
            deadline_s: Maximum wait for another rank's rows, seconds.
            recompute: Compute a task's activations again in the backward pass.
        """
        self._ownership, self._rank, self._pieces = ownership, rank, pieces
        self._dispatch, self._combine = lanes
        self._clock, self._deadline_s = SystemClock(), deadline_s
        self._sync = RoundSync(self._clock, deadline_s)
        self._recompute, self._emulation = recompute, emulation
        self._hidden_size, self._dtype = pieces.hidden_size, pieces.dtype
        self._has_attention = rank < ownership.attention_ranks
        self._moe_layer_count = len(ownership.moe_layers)
        self._micro_batches: list[MicroBatch] = []
        # by MoE layer and micro-batch
        self._expert_passes: dict[tuple[int, int], ExpertPass] = {}
        # Rows, and counts, that stay on this rank.
        self._own_rows: dict[ExchangeKey, tuple[Tensor, Tensor | None]] = {}
        self._own_outputs: dict[ExchangeKey, Tensor] = {}
        self._keep_graphs = True
        self.spans: list[ComputedSpan] = []

    def run_tasks(
        self,
        own_micro_batches: Sequence[MicroBatch],
        micro_batch_count: int,
        head: RunHead,
        forward_only: bool,
    ) -> None:
        """Run all tasks of this rank; an expert rank has no `own_micro_batches`."""
        self._micro_batches, self._keep_graphs = list(own_micro_batches), not forward_only
        self._expert_passes, self._own_rows, self._own_outputs = {}, {}, {}
        self.spans = []
        self._sync = shared = RoundSync(self._clock, self._deadline_s)
        exchanges = self._make_exchanges(micro_batch_count, forward_only)
        here = [
            own.stop > own.start for own in map(self._get_own_experts, range(self._moe_layer_count))
        ]
        if self._has_attention:
            order = order_attention_tasks(self._moe_layer_count, micro_batch_count, here)
        else:
            order = [
                task
                for task in order_expert_tasks(self._moe_layer_count, micro_batch_count)
                if here[task.layer]
            ]
        with (
            self._dispatch.run_round(exchanges[LaneKind.DISPATCH], shared),
            self._combine.run_round(exchanges[LaneKind.COMBINE], shared),
        ):
            for task in order:
                if forward_only and task.backward:
                    continue
                if task.kind is not TaskKind.ATTENTION:
                    self._run_experts(task)
                elif task.backward:
                    self._run_attention_backward(task)
                else:
                    self._run_attention(task, head)
        self._micro_batches = []

    def fail(self, error: BaseException) -> None:
        """Fail a round that another thread computes."""
        self._sync.fail(error)

    @property
    def transfers(self) -> list[tuple[float, float]]:
        """Spans in which this rank sent rows in the last round, on the monotonic clock."""
        return self._dispatch.transfers + self._combine.transfers

    @contextmanager
    def _time_task(self, task: ScheduledTask, sizes: Sequence[float]) -> Iterator[None]:
        """Time a task of sequences of these lengths, or of this many rows per expert, and pad
        it.
        """
        began_s, pace = self._sync.now(), self._emulation
        yield
        if pace is not None:
            if task.kind is TaskKind.ATTENTION and task.layer == self._moe_layer_count:
                wanted_s = pace.predict_head_s(sum(sizes), self._keep_graphs)
            else:
                wanted_s = pace.predict_task_s(task.kind, task.backward, sizes)
            self._sync.sleep_until(began_s + wanted_s)
            pace.record(wanted_s, self._sync.now() - began_s)
        self.spans.append(ComputedSpan(task, began_s, self._sync.now()))

    # -- attention -------------------------------------------------------------------------------

    def _run_attention(self, task: ScheduledTask, head: RunHead) -> None:
        passed, number, j = self._micro_batches[task.micro_batch], task.layer, task.micro_batch
        coming = self._receive_inputs(number, j) if number else None
        with self._time_task(task, passed.lengths):
            if number == self._moe_layer_count:
                assert coming is not None
                passed.gradient = head(j, passed.device_bin, coming)
            else:
                self._run_piece(passed, number, coming)
        if number < self._moe_layer_count:
            cut = passed.piece_passes[number]
            chosen, x = cut.expert_ids, PieceOutputs(*cut.outputs).expert_inputs
            passed.routings[number] = found = self._sort_routing(number, chosen)
            rows = x.index_select(0, found.order // chosen.shape[1])
            self._send_rows(ExchangeKey(False, number, j), found, rows)
        if not self._keep_graphs:
            passed.piece_passes.pop(number - 1, None)

    def _run_piece(self, micro_batch: MicroBatch, number: int, inputs: PieceInputs | None) -> None:
        given, pieces = micro_batch.device_bin, self._pieces

        def run(coming: PieceInputs | None) -> tuple[tuple[Tensor, ...], Tensor]:
            if coming is None:
                return pieces.run_first(given)
            return pieces.run_next(number, given, coming)

        with torch.set_grad_enabled(self._keep_graphs):
            micro_batch.piece_passes[number] = PiecePass(
                run, inputs, self._recompute or not self._keep_graphs
            )

    def _run_attention_backward(self, task: ScheduledTask) -> None:
        passed, number, j = self._micro_batches[task.micro_batch], task.layer, task.micro_batch
        if number == self._moe_layer_count:  # its backward pass ran with the forward pass
            self._send_back(number - 1, j)
            return
        slope = passed.gradient
        assert slope is not None
        returned = self._receive_combined(True, number, j, passed.routings[number])
        with self._time_task(task, passed.lengths):
            k = self._pieces.get_moe_layer(number).experts.config.num_experts_per_token
            x = returned.view(-1, k, self._hidden_size).sum(1)
            gradients = PieceOutputs(
                slope.residual, slope.routing_weights, x, passed.balance_weight
            )
            passed.gradient = passed.piece_passes.pop(number).backward(gradients)
        if number:
            self._send_back(number - 1, j)

    def _receive_inputs(self, number: int, micro_batch_index: int) -> PieceInputs:
        passed = self._micro_batches[micro_batch_index]
        ends = PieceOutputs(*passed.piece_passes[number - 1].outputs)
        apart = self._receive_combined(
            False, number - 1, micro_batch_index, passed.routings[number - 1]
        )
        k = self._pieces.get_moe_layer(number - 1).experts.config.num_experts_per_token
        return PieceInputs(
            ends.residual, ends.routing_weights, apart.view(-1, k, self._hidden_size)
        )

    def _send_back(self, moe_layer: int, micro_batch_index: int) -> None:
        passed = self._micro_batches[micro_batch_index]
        assert passed.gradient is not None
        slope = passed.gradient.expert_outputs.reshape(-1, self._hidden_size)
        found = passed.routings[moe_layer]
        self._send_rows(
            ExchangeKey(True, moe_layer, micro_batch_index),
            found,
            slope.index_select(0, found.order),
        )

    def _send_rows(self, key: ExchangeKey, routing: SortedRouting, rows: Tensor) -> None:
        parts = dict(
            zip(
                routing.row_counts,
                torch.split(rows, list(routing.row_counts.values())),
                strict=True,
            )
        )
        counts = {} if key.is_backward else dict(routing.expert_counts)
        if self._rank in parts:
            self._own_rows[key] = parts.pop(self._rank), counts.pop(self._rank, None)
        if parts:
            self._dispatch.send(key, parts, counts)
            if not self._has_other_receivers(key.moe_layer):
                self._combine.mark_ready(key)

    def _sort_routing(self, moe_layer: int, expert_ids: Tensor) -> SortedRouting:
        """Return the order by expert of choices [n, k]."""
        flat = expert_ids.flatten()
        order = flat.argsort(stable=True)
        owners = self._ownership
        # Copied once: it synchronizes with the GPU.
        every = torch.bincount(flat, minlength=owners.experts_per_layer).cpu()
        own = {rank: owners.get_experts(moe_layer, rank) for rank in owners.list_owners(moe_layer)}
        counts = {rank: every[experts] for rank, experts in own.items()}
        sizes = {rank: int(some.sum()) for rank, some in counts.items()}
        return SortedRouting(order, invert_permutation(order), counts, sizes)

    def _receive_combined(
        self, backward: bool, moe_layer: int, micro_batch_index: int, routing: SortedRouting
    ) -> Tensor:
        """Return [n * k, width]: the rows that all ranks returned, in the order of the choices."""
        key = ExchangeKey(backward, moe_layer, micro_batch_index)
        came = self._combine.receive(key)[0] if set(routing.row_counts) - {self._rank} else {}
        if self._rank in routing.row_counts:
            came[self._rank] = self._own_outputs.pop(key)
        return torch.cat([came[rank] for rank in routing.row_counts]).index_select(
            0, routing.inverse
        )

    # -- experts ---------------------------------------------------------------------------------

    def _run_experts(self, task: ScheduledTask) -> None:
        key, place = (
            ExchangeKey(task.backward, task.layer, task.micro_batch),
            (task.layer, task.micro_batch),
        )
        rows, counts = self._receive_rows(key)
        sizes: list[float] = []  # rows of each expert here
        if self._emulation is not None and counts:
            sizes = torch.stack(list(counts.values())).sum(0).tolist()
        elif self._emulation is not None:
            ends = self._expert_passes[place].expert_ends
            sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        with self._time_task(task, sizes):
            if task.backward:
                found = of_experts.run_backward(self._expert_passes.pop(place), rows)
            else:
                found, expert_pass = of_experts.run_forward(
                    self._pieces.get_moe_layer(task.layer).experts,
                    counts,
                    rows,
                    self._keep_graphs,
                    self._recompute,
                )
                if self._keep_graphs:
                    self._expert_passes[place] = expert_pass
        if self._rank in found:
            self._own_outputs[key] = found.pop(self._rank)
        if self._has_other_receivers(task.layer):
            self._combine.send(key, found)

    def _receive_rows(self, key: ExchangeKey) -> tuple[dict[int, Tensor], Mapping[int, Tensor]]:
        """Return the rows of each attention rank, and the number of them for each expert."""
        rows: dict[int, Tensor] = {}
        counts: dict[int, Tensor] = {}
        if self._list_other_attention_ranks():
            rows, counts = self._dispatch.receive(key)
        if self._has_attention:
            own, own_counts = self._own_rows.pop(key)
            rows[self._rank] = own
            if own_counts is not None:
                counts[self._rank] = own_counts
        return rows, counts

    # -- exchanges -------------------------------------------------------------------------------

    def _get_own_experts(self, moe_layer: int) -> slice:
        return self._ownership.get_experts(moe_layer, self._rank)

    def _list_other_attention_ranks(self) -> list[int]:
        return [rank for rank in range(self._ownership.attention_ranks) if rank != self._rank]

    def _has_other_receivers(self, moe_layer: int) -> bool:
        own = self._get_own_experts(moe_layer)
        return own.stop > own.start and bool(self._list_other_attention_ranks())

    def _make_exchanges(
        self, micro_batch_count: int, forward_only: bool
    ) -> dict[LaneKind, list[Exchange]]:
        """Return the exchanges in which this rank takes part, by lane, in the order of launches."""
        hosted = [count > 0 for count in self._ownership.hosted_experts]
        make = {LaneKind.DISPATCH: self._make_dispatch, LaneKind.COMBINE: self._make_combine}
        found: dict[LaneKind, list[Exchange]] = {lane: [] for lane in LaneKind}
        turn = 0
        for one in order_exchanges(self._moe_layer_count, micro_batch_count, hosted):
            lane, key = one.lane, ExchangeKey(one.backward, one.layer, one.micro_batch)
            if forward_only and key.is_backward:
                continue
            if (exchange := make[lane](key, turn)) is not None:
                found[lane].append(exchange)
                turn += 1
        return found

    def _make_dispatch(self, key: ExchangeKey, turn: int) -> Exchange | None:
        """Return the dispatch exchange, or None if this rank takes no part."""
        mixture = key.moe_layer
        here = self._get_own_experts(mixture)
        length = here.stop - here.start
        sources = {rank: length for rank in self._list_other_attention_ranks()} if length else {}
        others = set(self._ownership.list_owners(mixture)) - {self._rank}
        if not sources and not (self._has_attention and others):
            return None

        def sizes() -> dict[int, int]:
            return self._dispatch.count_received(key._replace(is_backward=False))

        known = sizes if key.is_backward else dict
        about = sources, self._hidden_size, self._dtype, known
        return Exchange(key, turn, self._has_attention, not key.is_backward, *about)

    def _make_combine(self, key: ExchangeKey, turn: int) -> Exchange | None:
        _, mixture, j = key
        others = [rank for rank in self._ownership.list_owners(mixture) if rank != self._rank]
        sources = dict.fromkeys(others, 0) if self._has_attention else {}
        sends = self._has_other_receivers(mixture)
        if not sources and not sends:
            return None

        def sizes() -> dict[int, int]:
            return {
                rank: self._micro_batches[j].routings[mixture].row_counts[rank] for rank in sources
            }

        about = sources, self._hidden_size, self._dtype, sizes
        return Exchange(key, turn, True, False, *about)
