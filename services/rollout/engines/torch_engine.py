"""The built-in engine: continuous batching over contiguous slots, one eager step for all of them.

Known tokens (prompts, tool results) run through the same step as sampled ones, a token at a time
beside the others: at small size a row more costs almost nothing. Long stretches run at once, and a
prompt that another slot has just computed is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.clock import Clock, SystemClock
from common.errors import ConfigError, Refused
from common.model.attention import causal_attention
from common.model.decoder import Decoder
from services.rollout.engines.base import ABORTED, LENGTH, STOP, Flush, Ints, Request, check
from services.rollout.engines.cache import Cache
from services.rollout.engines.counter import uniforms
from services.rollout.engines.sampling import sample
from services.rollout.engines.slots import Slots

PREFILL_FROM = 32  # known tokens ahead from which one forward of their own is cheaper
PREFILL_TOKENS = 512  # at most this many a step, so that decoding rows do not wait for long
SHARE_FROM = 6  # common tokens from which copying a neighbour's cache is cheaper than computing


class TorchEngine:
    def __init__(
        self,
        model: Decoder,
        slots: int,
        max_length: int,
        *,
        version: int = 0,
        kv_on_update: str = "keep",
        clock: Clock | None = None,
    ) -> None:
        if max_length > len(model.rope):
            raise ConfigError(
                f"slots of {max_length} tokens exceed the model's {len(model.rope)} positions",
                where="rollout.max_tokens",
                fix="lower it, or raise max_position_embeddings",
            )
        if kv_on_update not in ("keep", "recompute"):
            raise ConfigError(
                f"kv_on_update is {kv_on_update!r}",
                where="rollout.kv_on_update",
                fix="use keep or recompute",
            )
        self.model = model.eval().requires_grad_(False)
        self.version = version
        self.tokens_generated = 0
        self.busy_s = 0.0
        self.due_s = 0.0
        self._slots = Slots(slots, max_length)
        self._cache = Cache(model.config, slots, max_length, like=model.embedding)
        self._clock = clock or SystemClock()
        self._recompute = kv_on_update == "recompute"
        self._queue: dict[int, Request] = {}  # waiting for a slot, by id, in order
        self._joining: deque[int] = deque()  # slots that have a long or shared stretch to compute
        self._decoding = np.zeros(slots, bool)
        self._rows: NDArray[np.int64] | None = None  # the decoding slots, ascending; None: changed
        self._swaps = 0
        self._paused = False

    @property
    def running(self) -> int:
        return self._slots.running

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def ended(self) -> bool:
        return self._slots.ended

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            check(request, self.model.config.vocab_size)
        for request in requests:
            if request.id in self._queue or request.id in self._slots:
                continue
            if request.max_new < 1 or len(request.tokens) >= self._slots.max_length:
                self._slots.finish_unplaced(request.id, LENGTH)
            elif self._slots.keeps(request.session):
                self._start(request)
            else:
                self._queue[request.id] = request

    def abort(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            slot = self._slots.slot_of(request_id)
            if slot is not None:
                self._finish(slot, ABORTED)
            elif self._queue.pop(request_id, None):
                self._slots.finish_unplaced(request_id, ABORTED)

    def release(self, sessions: Iterable[int]) -> None:
        self._slots.release(sessions)

    def drain(self, ended_only: bool = False) -> Flush | None:
        return self._slots.drain(ended_only)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    @torch.inference_mode()
    def step(self) -> bool:
        if self._paused:
            return False
        began = self._clock.monotonic()
        while self._queue and self._slots.available():
            self._start(self._queue.pop(next(iter(self._queue))))
        if self._joining:
            self._join()
        if self._rows is None:
            self._rows = np.flatnonzero(self._decoding)
        if len(self._rows):
            self._decode(self._rows)
        elif not self._joining:
            return False
        self.busy_s += self._clock.monotonic() - began
        return True

    @torch.inference_mode()
    def swap(self, state: Mapping[str, Tensor], version: int) -> None:
        """Copies `state` (`Decoder`'s names) into the model.

        What slots have cached stays, unless the engine was told to recompute; where none of a
        slot's tokens was sampled here yet it goes in any case: see `Slots.forget_unsampled`.
        """
        own = self.model.state_dict()
        odd = own.keys() ^ state.keys()
        odd |= {name for name in own.keys() - odd if own[name].shape != state[name].shape}
        if odd:
            raise Refused(
                f"the weights do not fit the model: {min(odd)} is missing, unknown or misshapen",
                where="engine",
                fix="publish all tensors of the model that the engine was started with",
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.version = version
        self._swaps += 1
        if self._recompute:
            self._slots.forget(np.arange(self._slots.count), self._swaps)
        else:
            self._slots.forget_unsampled(self._swaps)
        for slot in np.flatnonzero(self._decoding):
            if self._slots.computed[slot] == 0:
                self._set_decoding(int(slot), False)
                self._joining.append(int(slot))

    @torch.inference_mode()
    def score(self, tokens: Ints) -> NDArray[np.float32]:
        check(Request(-1, np.asarray(tokens), 0, 1.0, (), 0, -1), self.model.config.vocab_size)
        row = self._tensor(np.asarray(tokens, np.int64)).unsqueeze(0)
        positions = torch.arange(row.shape[1], device=row.device).unsqueeze(0)
        logits = self.model.logits(self.model(row, positions, causal_attention)[:, :-1])
        chosen = logits.float().log_softmax(-1).gather(-1, row[:, 1:, None])
        scored: NDArray[np.float32] = chosen.flatten().cpu().numpy()
        return scored

    def _start(self, request: Request) -> None:
        slot = self._slots.place(request, self._swaps)
        ahead = int(self._slots.known[slot] - self._slots.computed[slot]) - 1
        if ahead >= PREFILL_FROM or (ahead >= SHARE_FROM and self._slots.computed[slot] == 0):
            self._joining.append(slot)
        else:
            self._set_decoding(slot, True)

    def _finish(self, slot: int, code: int) -> None:
        if self._decoding[slot]:
            self._set_decoding(slot, False)
        else:
            self._joining.remove(slot)
        self._slots.finish(slot, code)

    def _set_decoding(self, slot: int, decoding: bool) -> None:
        self._decoding[slot] = decoding
        self._rows = None

    def _join(self) -> None:
        """Copies or computes what newly placed slots know; decoding takes them from there."""
        slots, budget = self._slots, PREFILL_TOKENS
        while self._joining and budget > 0:
            slot = self._joining[0]
            if slots.computed[slot] == 0:
                donor, shared = slots.donor(slot, self._swaps)
                if shared >= SHARE_FROM:
                    self._cache.copy(donor, slot, shared)
                    slots.computed[slot] = shared
            start = int(slots.computed[slot])
            ahead = int(slots.known[slot]) - 1 - start
            if ahead >= PREFILL_FROM or (ahead >= SHARE_FROM and self._next_shares(slot)):
                count = min(ahead, budget)
                self._prefill(slot, start, count)
                budget -= count
                if count < ahead:
                    return
            self._joining.popleft()
            self._set_decoding(slot, True)

    def _next_shares(self, slot: int) -> bool:
        """Whether the slot that joins next starts with what this one is about to compute."""
        if len(self._joining) < 2:
            return False
        following, end = self._joining[1], int(self._slots.known[slot]) - 1
        tokens = self._slots.tokens
        return self._slots.computed[following] == 0 and bool(
            (tokens[slot, :end] == tokens[following, :end]).all()
        )

    def _prefill(self, slot: int, start: int, count: int) -> None:
        tokens = self._tensor(self._slots.tokens[slot, start : start + count])
        positions = torch.arange(start, start + count, device=tokens.device)
        self.model(tokens, positions, self._cache.prefill(slot, start, count))
        self._slots.computed[slot] = start + count

    def _decode(self, rows: NDArray[np.int64]) -> None:
        """One token into the cache of each row; those at the end of what they know sample one."""
        slots = self._slots
        positions = slots.computed[rows]
        tokens, places = self._tensor(slots.tokens[rows, positions]), self._tensor(positions)
        hidden = self.model(tokens, places, self._cache.decode(rows, positions))
        at = positions + 1
        slots.computed[rows] = at
        sampling = at == slots.known[rows]
        if not sampling.all():
            places_of = np.flatnonzero(sampling)
            if not len(places_of):
                return
            rows, at, hidden = rows[places_of], at[places_of], hidden[self._tensor(places_of)]
        chosen, logprobs = sample(
            self.model.logits(hidden), slots.heat[rows], uniforms(slots.key[rows], at)
        )
        self.tokens_generated += len(rows)
        over, stopped = slots.record(rows, chosen, logprobs, self.version)
        for slot, stop in zip(over.tolist(), stopped.tolist(), strict=True):
            self._finish(slot, STOP if stop else LENGTH)

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.model.embedding.device)
