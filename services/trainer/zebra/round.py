"""One rank's part in a round of a zebra gang: its tasks in their order, and what goes between them.

Every attention rank has `micros` bins. What its tokens are sent to is sorted by expert, so that the
rows of each rank that has experts lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.model.moe import Experts
from common.zebra.schedule import Task, Work, attention_order, expert_order
from services.trainer.arithmetic.forward import Placed
from services.trainer.zebra import experts as of_experts
from services.trainer.zebra.experts import Made
from services.trainer.zebra.lanes import Exchange, Key, Lane, Shared
from services.trainer.zebra.owners import ZebraOwners
from services.trainer.zebra.pieces import Coming, Cut, Going, Pieces

Head = Callable[[int, Placed, Coming], Coming | None]  # micro-batch, ..; the gradients of what came
Pace = Callable[[Task], float]  # seconds that a task is to take at least


@dataclass(frozen=True)
class Sorted:
    """How the rows of a micro-batch that go to the experts of a layer are ordered."""

    order: Tensor  # int64 [n * k]: choices, by expert
    back: Tensor  # int64 [n * k]: its inverse
    counts: dict[int, Tensor]  # int64 [experts there], by rank
    sizes: dict[int, int]  # rows, by rank


@dataclass
class Span:
    """When a task was computed, on the monotonic clock."""

    task: Task
    began_s: float
    ended_s: float


@dataclass
class Passed:
    """What a rank remembers of one micro-batch between its tasks."""

    given: Placed
    balance: Tensor  # scalar: weight of a layer's balance loss
    cuts: dict[int, Cut] = field(default_factory=dict)  # by piece
    sent: dict[int, Sorted] = field(default_factory=dict)  # by mixture layer
    slope: Coming | None = None  # the gradients that the next piece has given


class Round:
    """It blocks: lanes are threads, and whoever needs something waits for it."""

    def __init__(
        self,
        owners: ZebraOwners,
        rank: int,
        pieces: Pieces,
        lanes: tuple[Lane, Lane],
        shared: Shared,
        width: int,
        dtype: torch.dtype,
        again: bool,
        pace: Pace = lambda _: 0.0,
    ) -> None:
        """`lanes`: dispatch and combine. `again`: what a task computed is computed again on the way
        back. `width`: of a row.
        """
        self._owners, self._rank, self._pieces = owners, rank, pieces
        self._dispatch, self._combine = lanes
        self._shared, self._again, self._pace = shared, again, pace
        self._width, self._dtype = width, dtype
        self._attends = rank < owners.attention
        self._layers = len(owners.mixture_layers)
        self._micros: list[Passed] = []
        self._made: dict[tuple[int, int], Made] = {}  # by mixture layer and micro-batch
        self._own: dict[Key, tuple[Tensor, Tensor | None]] = {}  # rows that stay here, and counts
        self._own_made: dict[Key, Tensor] = {}
        self._keeps = True
        self.spans: list[Span] = []

    def run(self, given: Sequence[Passed], micros: int, head: Head, forward_only: bool) -> None:
        """All tasks of this rank. `given`: its micro-batches, of an expert rank none."""
        self._micros, self._keeps = list(given), not forward_only
        self._made, self._own, self._own_made = {}, {}, {}
        self.spans = []
        keys = [(t.backward, t.layer, t.micro) for t in expert_order(self._layers, micros)]
        keys = [key for key in keys if not (forward_only and key[0])]
        if self._attends:
            hosts = [own.stop > own.start for own in map(self._experts_here, range(self._layers))]
            order = attention_order(self._layers, micros, hosts)
        else:
            order = expert_order(self._layers, micros)
        self._shared.begin()
        with (
            self._dispatch.round([one for key in keys if (one := self._dispatched(key))]),
            self._combine.round([one for key in keys if (one := self._combined(key))]),
        ):
            for task in order:
                if forward_only and task.backward:
                    continue
                self._do(task, head)

    def _do(self, task: Task, head: Head) -> None:
        if task.work is not Work.ATTENTION:
            self._experts(task)
        elif task.backward:
            self._attention_backward(task)
        else:
            self._attention(task, head)

    @contextmanager
    def _timed(self, task: Task) -> Iterator[None]:
        began_s = self._shared.now()
        yield
        self._shared.rest(began_s + self._pace(task))
        self.spans.append(Span(task, began_s, self._shared.now()))

    # -- attention -------------------------------------------------------------------------------

    def _attention(self, task: Task, head: Head) -> None:
        passed, number, j = self._micros[task.micro], task.layer, task.micro
        coming = self._coming(number, j) if number else None
        with self._timed(task):
            if number == self._layers:
                assert coming is not None
                passed.slope = head(j, passed.given, coming)
            else:
                self._piece(passed, number, coming)
        if number < self._layers:
            self._send(number, j, passed.cuts[number])
        if not self._keeps:
            passed.cuts.pop(number - 1, None)

    def _piece(self, passed: Passed, number: int, coming: Coming | None) -> None:
        given, pieces = passed.given, self._pieces

        def run(coming: Coming | None) -> tuple[tuple[Tensor, ...], Tensor]:
            if coming is None:
                return pieces.first(given)
            return pieces.next(number, given, coming)

        with torch.set_grad_enabled(self._keeps):
            passed.cuts[number] = Cut(run, coming, self._again or not self._keeps)

    def _attention_backward(self, task: Task) -> None:
        passed, number, j = self._micros[task.micro], task.layer, task.micro
        if number == self._layers:  # its forward pass went back at once
            self._send_back(number - 1, j)
            return
        slope = passed.slope
        assert slope is not None
        returned = self._joined(True, number, j, passed.sent[number])
        with self._timed(task):
            k = self._pieces.layer(number).experts.config.experts_per_token
            x = returned.view(-1, k, self._width).sum(1)
            gradients = Going(slope.residual, slope.shares, x, passed.balance)
            passed.slope = passed.cuts.pop(number).backward(gradients)
        if number:
            self._send_back(number - 1, j)

    def _coming(self, number: int, j: int) -> Coming:
        """What piece `number` begins with: the experts' answer, and what the piece before kept."""
        passed = self._micros[j]
        ends = Going(*passed.cuts[number - 1].ends)
        apart = self._joined(False, number - 1, j, passed.sent[number - 1])
        k = self._pieces.layer(number - 1).experts.config.experts_per_token
        return Coming(ends.residual, ends.shares, apart.view(-1, k, self._width))

    def _send(self, mixture: int, j: int, cut: Cut) -> None:
        chosen, x = cut.told, Going(*cut.ends).x
        self._micros[j].sent[mixture] = found = self._sorted(mixture, chosen)
        rows = x.index_select(0, found.order // chosen.shape[1])
        self._give((False, mixture, j), found, rows)

    def _send_back(self, mixture: int, j: int) -> None:
        """The gradients of what the experts of a layer made."""
        passed = self._micros[j]
        assert passed.slope is not None
        slope = passed.slope.apart.reshape(-1, self._width)
        found = passed.sent[mixture]
        self._give((True, mixture, j), found, slope.index_select(0, found.order))

    def _give(self, key: Key, found: Sorted, rows: Tensor) -> None:
        parts = dict(zip(found.sizes, torch.split(rows, list(found.sizes.values())), strict=True))
        counts = dict(found.counts)
        if self._rank in parts:
            self._own[key] = parts.pop(self._rank), counts.pop(self._rank)
        if parts:
            self._dispatch.give(key, parts, {} if key[0] else counts)
            if not self._to_others(key[1]):
                self._combine.give(key, {})  # how much comes back is known from now on

    def _sorted(self, mixture: int, chosen: Tensor) -> Sorted:
        """How choices [n, k] lie by expert."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        every = torch.bincount(flat, minlength=self._owners.experts_per_layer)
        owners = self._owners
        counts = {rank: every[owners.experts_of(mixture, rank)] for rank in owners.owners(mixture)}
        return Sorted(order, back, counts, {rank: int(c.sum()) for rank, c in counts.items()})

    def _joined(self, backward: bool, mixture: int, j: int, found: Sorted) -> Tensor:
        """[n * k, width]: what came back from all ranks, in the order of the choices."""
        key = backward, mixture, j
        came = dict(self._combine.take(key).came) if set(found.sizes) - {self._rank} else {}
        if self._rank in found.sizes:
            came[self._rank] = self._own_made.pop(key)
        return torch.cat([came[rank] for rank in found.sizes]).index_select(0, found.back)

    # -- experts ---------------------------------------------------------------------------------

    def _experts(self, task: Task) -> None:
        key, place = (task.backward, task.layer, task.micro), (task.layer, task.micro)
        rows, counts = self._came(key)
        with self._timed(task):
            if task.backward:
                found = of_experts.backward(self._made.pop(place), rows)
            else:
                found, made = of_experts.forward(
                    self._module(task.layer), counts, rows, self._keeps, self._again
                )
                if self._keeps:
                    self._made[place] = made
        if self._rank in found:
            self._own_made[key] = found.pop(self._rank)
        if self._to_others(task.layer):
            self._combine.give(key, found)

    def _came(self, key: Key) -> tuple[dict[int, Tensor], Mapping[int, Tensor]]:
        """The rows of each attention rank, and how many of them are each expert's."""
        rows: dict[int, Tensor] = {}
        counts: dict[int, Tensor] = {}
        if self._from_others():
            exchange = self._dispatch.take(key)
            rows, counts = dict(exchange.came), dict(exchange.came_counts)
        if self._attends:
            own, own_counts = self._own.pop(key)
            rows[self._rank] = own
            if own_counts is not None:
                counts[self._rank] = own_counts
        return rows, counts

    def _module(self, mixture: int) -> Experts:
        return self._pieces.layer(mixture).experts

    # -- exchanges -------------------------------------------------------------------------------

    def _experts_here(self, mixture: int) -> slice:
        return self._owners.experts_of(mixture, self._rank)

    def _from_others(self) -> list[int]:
        """The other attention ranks."""
        return [rank for rank in range(self._owners.attention) if rank != self._rank]

    def _to_others(self, mixture: int) -> bool:
        own = self._experts_here(mixture)
        return own.stop > own.start and bool(self._from_others())

    def _dispatched(self, key: Key) -> Exchange | None:
        """What goes out to experts, as far as this rank has part in it."""
        backward, mixture, j = key
        here = self._experts_here(mixture)
        length = here.stop - here.start
        sources = {rank: length for rank in self._from_others()} if length else {}
        others = set(self._owners.owners(mixture)) - {self._rank}
        if not sources and not (self._attends and others):
            return None

        def sizes() -> dict[int, int]:
            forward = self._dispatch.exchanges[False, mixture, j]
            return {rank: int(counts.sum()) for rank, counts in forward.came_counts.items()}

        return Exchange(
            key,
            waits=self._attends,
            counted=not backward,
            sources=sources,
            width=self._width,
            dtype=self._dtype,
            sizes=sizes if backward else dict,
        )

    def _combined(self, key: Key) -> Exchange | None:
        """What comes back from them."""
        _, mixture, j = key
        others = [rank for rank in self._owners.owners(mixture) if rank != self._rank]
        sources = dict.fromkeys(others, 0) if self._attends else {}
        sends = self._to_others(mixture)
        if not sources and not sends:
            return None

        def sizes() -> dict[int, int]:
            return {rank: self._micros[j].sent[mixture].sizes[rank] for rank in sources}

        return Exchange(
            key,
            waits=True,
            counted=False,
            sources=sources,
            width=self._width,
            dtype=self._dtype,
            sizes=sizes,
        )
