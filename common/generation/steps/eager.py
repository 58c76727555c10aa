"""The torch path: the model in eager steps over contiguous slots, for hosts without a compiler.

Known tokens run through the same step as sampled ones, a token at a time beside the others: at
small size a row more costs almost nothing. Long stretches run at once, and what another slot has
just computed is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.generation.batch.adapters import Changes
from common.generation.batch.parts import SHARE_FROM, Rows
from common.generation.batch.slots import Slots
from common.generation.contract import Ints
from common.generation.counter import uniforms
from common.generation.steps.adapters import AdapterBank
from common.generation.steps.cache import Cache
from common.generation.steps.sampling import RowSampling, sample, unmodified
from common.model.architecture.config import ModelConfig
from common.model.network.attention import causal_attention
from common.model.network.decoder import Decoder
from common.model.network.moe import Routing
from common.weights.layout.images import load_tensor

NO_BLOCKS = np.zeros(0, np.int64)


def draw(state: Slots, slots: Rows, logits: Tensor, experts: Tensor | None = None) -> None:
    """Samples the next token of each of `slots` from float32 logits [n, vocab]; `experts` are those
    that the tokens before went to, [n, sparse layers, k], in a mixture of them."""
    how = RowSampling(
        state.temperature[slots], state.top_p[slots], state.top_k[slots], state.min_p[slots]
    )
    drawn = uniforms(state.key[slots], state.known[slots])
    tokens, logprobs = sample(logits, how, drawn)
    asked = state.wants_unmodified[slots]
    plain = logprobs
    if asked.any():
        plain = np.where(asked, unmodified(logits, tokens), np.float32(np.nan))
    if experts is None:
        return state.record(slots, tokens, logprobs, plain)
    went = experts.flatten(1).to(torch.int16).cpu().numpy()
    state.record(slots, tokens, logprobs, plain, went)


def joined_experts(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The experts of a step's rows, [n, sparse layers, k]; None for a dense model."""
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None


def load_into(model: Decoder, state: Mapping[str, Tensor]) -> None:
    """Copies weights by name into the model, in place. KeyError if one is missing."""
    for name, tensor in model.state_dict().items():
        load_tensor(state, name, tensor)


def differing_from(model: Decoder, state: Mapping[str, Tensor]) -> list[str]:
    """Names of the model's weights that are not, bit by bit, those of `state` in its type."""
    odd = []
    for name, tensor in model.state_dict().items():
        wanted = torch.empty_like(tensor)
        load_tensor(state, name, wanted)
        if not torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)):
            odd.append(name)
    return odd


class EagerCompute:
    """The model in eager PyTorch, with a cache that holds each slot contiguously."""

    prefill_from = 32

    model: Decoder
    cache: Cache

    def __init__(self, config: ModelConfig, dtype: torch.dtype, slots: Slots) -> None:
        self.vocab_size = config.vocab_size
        self._config, self._dtype, self._slots = config, dtype, slots
        self._adapters = AdapterBank(config, dtype, torch.device("cpu"))
        heads, width = config.kv_heads, config.head_dim
        self.layout = f"eager {dtype} [2, {config.layers}, {heads}, {width} x tokens]"
        self.cache_bytes_per_token = 2 * config.layers * heads * width * dtype.itemsize

    @torch.inference_mode()
    def run(self, slots: Rows, counts: Rows, steps: int, budget_s: float) -> int:
        """Runs `counts[i]` known tokens of each slot, samples one token where none is left, and
        returns the number sampled. `steps` and `budget_s` are not used: it makes one step.
        """
        single = counts == 1
        parts = [
            self._prefill(slot, count)
            for slot, count in zip(slots[~single].tolist(), counts[~single].tolist(), strict=True)
        ]
        rows = np.sort(slots[single])
        if len(rows):
            parts.append(self._decode(rows))
        order = np.concatenate((slots[~single], rows))
        state = self._slots
        sampling = np.flatnonzero(state.computed[order] == state.known[order])
        if not len(sampling):
            return 0
        last = torch.cat([hidden for hidden, _ in parts])
        went = joined_experts([experts for _, experts in parts])
        if len(sampling) < len(order):
            chosen = self._tensor(sampling)
            last, went = last[chosen], went[chosen] if went is not None else None
        draw(state, order[sampling], self.model.logits(last).float(), went)
        return len(sampling)

    def _prefill(self, slot: int, count: int) -> tuple[Tensor, Tensor | None]:
        """The hidden state of the last of the slot's next `count` tokens, [1, hidden_size], and the
        experts that it went to."""
        start = int(self._slots.computed[slot])
        tokens = self._tensor(self._slots.tokens[slot, start : start + count])
        positions = torch.arange(start, start + count, device=tokens.device)
        attention, routing = self.cache.prefill(slot, start, count), Routing()
        self._adapters.use_for(self._slots.adapter[slot : slot + 1])
        hidden: Tensor = self.model(tokens, positions, attention, routing=routing)
        self._slots.computed[slot] = start + count
        return hidden[-1:], routing.experts[-1:] if routing.experts is not None else None

    def _decode(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        positions = self._slots.computed[rows]
        tokens = self._tensor(self._slots.tokens[rows, positions])
        attention, routing = self.cache.decode(rows, positions), Routing()
        self._adapters.use_for(self._slots.adapter[rows])
        hidden: Tensor = self.model(tokens, self._tensor(positions), attention, routing=routing)
        self._slots.computed[rows] = positions + 1
        return hidden, routing.experts

    @torch.inference_mode()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copies weights into the model."""
        load_into(self.model, state)

    @torch.inference_mode()
    def differing(self, state: Mapping[str, Tensor]) -> list[str]:
        """Names of the weights that it computes with otherwise than `state` has them."""
        return differing_from(self.model, state)

    @torch.inference_mode()
    def load_adapter(self, place: int, changes: Changes) -> None:
        """Puts an adapter beside the base."""
        self._adapters.put(place, changes)

    def drop_adapter(self, place: int) -> None:
        """Frees an adapter that no slot computes with."""
        self._adapters.drop(place)

    @torch.inference_mode()
    def score(self, tokens: Ints, blocks: Ints, place: int = 0) -> NDArray[np.float32]:
        """Log-probabilities at temperature 1 of all tokens but the first, with the adapter in
        `place`: float32 [n - 1]. The cache is not used.
        """
        self._adapters.use_for(np.array([place]))
        row = self._tensor(np.asarray(tokens, np.int64)).unsqueeze(0)
        positions = torch.arange(row.shape[1], device=row.device).unsqueeze(0)
        logits = self.model.logits(self.model(row, positions, causal_attention)[:, :-1])
        chosen = logits.float().log_softmax(-1).gather(-1, row[:, 1:, None])
        scored: NDArray[np.float32] = chosen.flatten().cpu().numpy()
        return scored

    def span_bytes(self, start: int, end: int) -> int:
        """Bytes of the keys and values of tokens [start, end)."""
        return (end - start) * self.cache_bytes_per_token

    @torch.inference_mode()
    def read(self, slot: int, start: int, end: int) -> NDArray[np.uint8]:
        """A copy of a slot's keys and values of tokens [start, end), uint8."""
        content = np.empty(self.span_bytes(start, end), np.uint8)
        for part, there in self._parts(slot, start, end, content):
            part.copy_(there)
        return content

    @torch.inference_mode()
    def write(self, slot: int, start: int, end: int, content: NDArray[np.uint8]) -> None:
        """Puts what `read` gave into the cache of a slot."""
        whole = np.require(
            content, requirements=("C", "W", "A")
        )  # a copy, if it may not be written
        for part, there in self._parts(slot, start, end, whole):
            there.copy_(part)

    def _parts(
        self, slot: int, start: int, end: int, content: NDArray[np.uint8]
    ) -> list[tuple[Tensor, Tensor]]:
        """(in `content`, in the cache) of the keys and of the values of a stretch of a slot."""
        keys = self.cache.keys[:, slot, :, :, start:end]
        values = self.cache.values[:, slot, :, start:end]
        first, second = torch.from_numpy(content).view(self._dtype).chunk(2)
        return [(first.view(keys.shape), keys), (second.view(values.shape), values)]

    def sleep(self) -> None:
        """Frees the memory of weights and cache."""
        del self.model, self.cache

    def wake(self) -> None:
        """Allocates weights and cache again, without content."""
        slots = self._slots
        model = Decoder(self._config, self._dtype, max_positions=slots.max_length)
        self.model = model.eval().requires_grad_(False)
        self._adapters.attach(self.model)
        self.cache = Cache(self._config, slots.count, slots.max_length, like=model.embedding)

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.model.embedding.device)


class ContiguousMemory:
    """Each slot has a stretch of the cache of its own, so there is always room."""

    def __init__(self, slots: Slots, compute: EagerCompute) -> None:
        self._slots, self._compute = slots, compute

    def share(self, slot: int) -> None:
        """Copies what a neighbour has computed of the slot's first tokens, where that beats
        computing them.
        """
        if self._slots.computed[slot]:
            return
        donor, shared = self._slots.donor(slot)
        if shared >= SHARE_FROM:
            self._compute.cache.copy(donor, slot, shared)
            self._slots.computed[slot] = shared
            self._slots.weights[slot] = self._slots.current(slot)

    def grow(self, slot: int, tokens: int, spare: int = 0) -> bool:
        """True: each slot has room for its full length."""
        return True

    def short(self, slots: Rows, tokens: Rows) -> Rows:
        """No slot: each has room for its full length."""
        return slots[:0]

    def free(self, slot: int) -> None:
        """A freed slot still serves as a donor."""

    def place(self, slot: int) -> None:
        """Nothing to do: a slot's room is always its own."""

    def publish(self, slot: int, tail: bool) -> None:
        """Nothing to do: `share` looks at the slots themselves."""

    def forget(self) -> None:
        """Nothing to do: `share` compares the weights of slots."""

    def borrow(self, tokens: int) -> NDArray[np.int64] | None:
        """No blocks, as `score` needs none here."""
        return NO_BLOCKS

    def give_back(self, blocks: NDArray[np.int64]) -> None:
        """Nothing to do."""
