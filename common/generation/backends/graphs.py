"""Torch backend: the model over the paged cache, with decode steps as CUDA graphs on a GPU.

A decode step is divided into buckets (`buckets.py`). Each has buffers and a graph of its own,
captured at its first use. Known tokens are prefilled as packed sequences beside them. On a CPU the
same code runs without graphs, through the operators' CPU implementations.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meshrl.common.generation.backends.adapter_bank import AdapterBank
from meshrl.common.generation.backends.buckets import GraphBucket, GraphBuckets
from meshrl.common.generation.backends.sampling import compute_raw_logprobs, sample_slots
from meshrl.common.generation.batch.adapter_deltas import AdapterDeltas
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.batch.step_compute import SlotIndices, out_of_memory_error
from meshrl.common.generation.engine_contract import NO_FLOATS, IntArray
from meshrl.common.job.memory.cache_blocks import count_blocks
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.tensor_storages import TensorStorages
from meshrl.common.model.network.attention import AttentionFunction, build_causal_mask
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.network.moe import Routing, can_group_experts
from meshrl.common.weights.layout.version_image import load_tensor
from meshrl.kernels.backends.cache_layout import unpack_cache
from meshrl.kernels.ops import (
    BLOCK_TOKENS,
    bucket_pack,
    bucket_scatter,
    can_capture_cuda_graph,
    get_cache_shapes,
    paged_decode,
    paged_write,
    varlen_prefill,
)

EMPTY_LANE = -1  # a lane without a row
SCORE_CHUNK_TOKENS = 512  # tokens with logits in memory at once


@dataclass
class CapturedBucket:
    """Buffers of a bucket, and the call that computes `logits` from the other buffers."""

    tokens: Tensor  # int64 [lanes]
    adapters: Tensor  # int64 [lanes], 0: none
    positions: Tensor  # int64 [lanes], EMPTY where there is no row
    block_table: Tensor  # int32 [lanes, context / BLOCK]
    logits: Tensor  # float32 [lanes, vocab], overwritten by the next bucket
    experts: Tensor  # int64 [lanes, sparse layers, k]
    replay: Callable[[], None]


class GraphCompute:
    """Model in PyTorch over the paged cache, with decode steps captured as CUDA graphs."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        slots: Slots,
        device: torch.device,
    ) -> None:
        self.vocab_size = config.vocab_size
        self._config, self._dtype, self._slots = config, dtype, slots
        self._device = device
        self._adapters = AdapterBank(config, dtype, device)
        self._scale = config.head_dim**-0.5
        heads, width = config.num_kv_heads, config.head_dim
        self.cache_layout = (
            f"graphs {dtype} [2, {config.num_layers}, blocks, {heads}, {BLOCK_TOKENS} x {width}]"
        )
        self.cache_bytes_per_token = 2 * config.num_layers * heads * width * dtype.itemsize
        self.weights_bytes = dtype.itemsize * config.num_parameters
        self._buckets = GraphBuckets(slots.num_slots, slots.max_length)
        self._block_table: NDArray[np.int32] | None = None
        self._captured: dict[GraphBucket, CapturedBucket] = {}
        self._graph_memory_pool: Any = None  # memory pool of the graphs, set with the first graph
        self._logits: Tensor | None = None  # float32 [lanes, vocab], which all buckets share

    def attach_block_table(self, table: NDArray[np.int32]) -> None:
        """Attach the block table that steps read."""
        self._block_table = table
        width = max(table.shape[1], self._buckets.contexts[-1] // BLOCK_TOKENS)
        self._host_table = np.zeros((len(table), width), np.int32)
        self._device_table = torch.from_numpy(self._host_table).to(self._device)

    @torch.inference_mode()
    def run_steps(
        self, slots: SlotIndices, counts: SlotIndices, max_steps: int, budget_s: float
    ) -> int:
        """Compute `counts[i]` known tokens of each slot and sample a token where none is left.

        Return the number of sampled tokens. `max_steps` and `budget_s` are not used: a call makes
        one step.
        """
        assert self._block_table is not None
        shadow = self._host_table[:, : self._block_table.shape[1]]
        if not np.array_equal(shadow, self._block_table):
            shadow[:] = self._block_table
            self._device_table.copy_(torch.from_numpy(self._host_table))
        single = counts == 1
        parts = []
        if not single.all():
            parts.append(self._prefill(slots[~single], counts[~single]))
        if single.any():
            parts.append(self._decode(slots[single]))
        there = [experts for _, experts in parts if experts is not None]
        went = torch.cat(there) if there else None
        order = np.concatenate((slots[~single], slots[single]))
        self._slots.num_computed_tokens[slots] += counts
        known = self._slots.num_tokens[order] == self._slots.num_computed_tokens[order]
        sampling = np.flatnonzero(known)
        if len(sampling):
            chosen = self._to_device(sampling)
            logits = torch.cat([logits for logits, _ in parts])[chosen]
            went = went[chosen] if went is not None else None
            sample_slots(self._slots, order[sampling], logits, went)
        return len(sampling)

    def _decode(self, rows: SlotIndices) -> tuple[Tensor, Tensor | None]:
        """Return logits [n, vocab] of the next token of each row, and the experts of the last
        token.
        """
        slots = self._slots
        logits = torch.empty(len(rows), self.vocab_size, dtype=torch.float32, device=self._device)
        went = torch.empty(
            len(rows), *self._config.routing_shape, dtype=torch.int64, device=self._device
        )
        for bucket, chosen in self._buckets.split(slots.num_computed_tokens[rows] + 1):
            captured = self._captured.get(bucket) or self._capture(bucket)
            index = np.full(bucket.lanes, EMPTY_LANE)
            index[: len(chosen)] = chosen
            lanes = np.where(index >= 0, rows[index], EMPTY_LANE)
            positions = np.where(lanes >= 0, slots.num_computed_tokens[lanes], EMPTY_LANE)
            captured.tokens.copy_(self._to_device(slots.tokens[lanes, positions]))
            captured.positions.copy_(self._to_device(positions))
            if self._adapters.has_adapters:
                own = np.where(lanes >= 0, slots.adapter_index[lanes], 0)
                captured.adapters.copy_(self._to_device(own))
            width = captured.block_table.shape[1]
            captured.block_table.copy_(
                bucket_pack(self._device_table[:, :width].contiguous(), self._to_device(lanes))
            )
            captured.replay()
            bucket_scatter(captured.logits, self._to_device(index), logits)
            if self._config.num_experts:
                went[self._to_device(chosen)] = captured.experts[: len(chosen)]
        return logits, went if self._config.num_experts else None

    def _capture(self, bucket: GraphBucket) -> CapturedBucket:
        """Allocate a bucket's buffers, all lanes empty, and capture its graph on a GPU."""
        tokens = torch.zeros(bucket.lanes, dtype=torch.int64, device=self._device)
        table = torch.zeros(
            bucket.lanes, bucket.context // BLOCK_TOKENS, dtype=torch.int32, device=self._device
        )
        if self._logits is None:
            self._logits = torch.zeros(
                self._buckets.lanes[-1], self.vocab_size, dtype=torch.float32, device=self._device
            )
        captured = CapturedBucket(
            tokens=tokens,
            adapters=torch.zeros_like(tokens),
            positions=torch.full_like(tokens, EMPTY_LANE),
            block_table=table,
            logits=self._logits[: bucket.lanes],
            experts=torch.zeros(
                bucket.lanes, *self._config.routing_shape, dtype=torch.int64, device=self._device
            ),
            replay=lambda: self._run_bucket(captured),
        )
        groups = not self._config.num_experts or can_group_experts(
            self._config, self.model.embedding
        )
        if self._device.type == "cuda" and can_capture_cuda_graph() and groups:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._run_bucket(captured)  # builds and loads kernels before the capture
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._graph_memory_pool):
                self._run_bucket(captured)
            # graphs run one after another and share their memory
            self._graph_memory_pool = graph.pool()
            captured.replay = graph.replay
        self._captured[bucket] = captured
        return captured

    def _run_bucket(self, made: CapturedBucket) -> None:
        lengths = (made.positions + 1).to(torch.int32)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            paged_write(keys, values, k, v, made.block_table, made.positions)
            arguments = q, keys, values, made.block_table, lengths, self._scale, window
            mixed: Tensor = paged_decode(*arguments)
            return mixed

        routing = Routing()
        self._adapters.set_row_adapter_tensor(made.adapters)
        hidden = self.model(made.tokens, made.positions.clamp(min=0), attend, routing=routing)
        made.logits.copy_(self.model.compute_logits(hidden))
        if routing.experts is not None:
            made.experts.copy_(routing.experts)

    def _prefill(self, slots: SlotIndices, counts: SlotIndices) -> tuple[Tensor, Tensor | None]:
        """Prefill the next `counts[i]` tokens of each of `slots`.

        Return logits [n, vocab] after them, and the experts that their last tokens were routed to.
        """
        state = self._slots
        starts = state.num_computed_tokens[slots]
        order = np.argsort(starts > 0, kind="stable")  # sequences that start at 0 come first
        rows = np.repeat(slots[order], counts[order])
        ends = np.cumsum(counts[order])
        positions = np.arange(ends[-1]) - np.repeat(
            ends - counts[order] - starts[order], counts[order]
        )
        tokens, places = self._to_device(state.tokens[rows, positions]), self._to_device(positions)
        fresh = int((starts == 0).sum())
        attention = self._prefill_attention(slots[order], starts[order], ends, fresh, rows, places)
        routing = Routing()
        self._adapters.set_row_adapters(state.adapter_index[rows])
        hidden = self.model(tokens, places, attention, routing=routing)
        last = np.empty_like(order)
        last[order] = ends - 1
        chosen = self._to_device(last)
        logits: Tensor = self.model.compute_logits(hidden[chosen]).float()
        return logits, routing.experts[chosen] if routing.experts is not None else None

    def _prefill_attention(
        self,
        slots: SlotIndices,
        starts: SlotIndices,
        ends: SlotIndices,
        fresh: int,
        rows: SlotIndices,
        places: Tensor,
    ) -> AttentionFunction:
        """Build the attention of packed rows.

        The first `fresh` sequences start at 0 and attend within themselves. Each of the others also
        attends to its cached tokens.
        """
        table = self._device_table[self._to_device(rows)]
        borders = torch.from_numpy(np.concatenate(([0], ends[:fresh])).astype(np.int32))
        borders = borders.to(self._device)
        num_fresh_tokens = int(ends[fresh - 1]) if fresh else 0

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            paged_write(keys, values, k, v, table, places)
            parts = []
            if fresh:
                packed = (x[:num_fresh_tokens].contiguous() for x in (q, k, v))
                parts.append(varlen_prefill(*packed, borders, self._scale, window))
            at = num_fresh_tokens
            for i in range(fresh, len(slots)):
                end = int(ends[i])
                context_length = int(starts[i]) + end - at
                block_ids = self._device_table[int(slots[i]), : -(-context_length // BLOCK_TOKENS)]
                parts.append(
                    self._attend_cached(
                        q[at:end], keys[block_ids], values[block_ids], context_length, window
                    )
                )
                at = end
            return torch.cat(parts)

        return attend

    def _attend_cached(
        self, q: Tensor, keys: Tensor, values: Tensor, seen: int, window: int
    ) -> Tensor:
        """Compute attention of the last rows of a sequence [n, heads, width] to its blocks."""
        k, v = (x.transpose(0, 1).flatten(1, 2)[:, :seen] for x in unpack_cache(keys, values))
        mask = build_causal_mask(len(q), seen, window, q.device)
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    @torch.inference_mode()
    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Copy weights into the model, at the addresses that captured graphs read.

        Raise KeyError if one is missing.
        """
        for name, tensor in self.model.state_dict().items():
            load_tensor(state, name, tensor)

    @torch.inference_mode()
    def find_differing_weights(self, state: Mapping[str, Tensor]) -> list[str]:
        """Return names of weights that differ in any bit from `state` in the model's type."""
        odd = []
        for name, tensor in self.model.state_dict().items():
            expected = torch.empty_like(tensor)
            load_tensor(state, name, expected)
            if not torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)):
                odd.append(name)
        return odd

    @torch.inference_mode()
    def load_adapter(self, adapter_index: int, deltas: AdapterDeltas) -> None:
        """Load an adapter beside the base; capture graphs again if its shape is new to them."""
        if self._adapters.load(adapter_index, deltas):
            self._clear_graphs()

    def drop_adapter(self, adapter_index: int) -> None:
        """Remove an adapter that no slot uses."""
        self._adapters.unload(adapter_index)
        self._clear_graphs()

    def _clear_graphs(self) -> None:
        self._captured.clear()
        self._graph_memory_pool = self._logits = None

    @torch.inference_mode()
    def score(
        self, tokens: IntArray, blocks: IntArray, adapter_index: int = 0
    ) -> NDArray[np.float32]:
        """Score all tokens but the first with the adapter at `adapter_index`.

        Return log-probabilities at temperature 1, float32 [n - 1].
        """
        self._adapters.set_row_adapters(np.array([adapter_index]))
        row = self._to_device(np.asarray(tokens, np.int64))
        borders = torch.tensor([0, len(row)], dtype=torch.int32, device=self._device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
            packed = (x.contiguous() for x in (q, k, v))
            mixed: Tensor = varlen_prefill(*packed, borders, self._scale, window)
            return mixed

        hidden = self.model(row, torch.arange(len(row), device=self._device), attend)[:-1]
        targets = np.asarray(tokens[1:], np.int64)
        parts = [
            compute_raw_logprobs(
                self.model.compute_logits(hidden[i : i + SCORE_CHUNK_TOKENS]).float(),
                targets[i : i + SCORE_CHUNK_TOKENS],
            )
            for i in range(0, len(targets), SCORE_CHUNK_TOKENS)
        ]
        return np.concatenate([NO_FLOATS, *parts])

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's keys and values of all layers into another block."""
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    def span_bytes(self, start: int, end: int) -> int:
        """Return the bytes of the blocks of tokens [start, end); `start` begins a block."""
        return (
            (count_blocks(end) - start // BLOCK_TOKENS) * BLOCK_TOKENS * self.cache_bytes_per_token
        )

    @torch.inference_mode()
    def read_cache(self, slot: int, start: int, end: int) -> NDArray[np.uint8]:
        """Copy a slot's blocks of tokens [start, end), uint8: all keys, then all values."""
        return self.read_blocks(self._get_block_ids(slot, start, end))

    @torch.inference_mode()
    def write_cache(self, slot: int, start: int, end: int, content: NDArray[np.uint8]) -> None:
        """Write the result of `read_cache` into the slot's blocks."""
        self.write_blocks(self._get_block_ids(slot, start, end), content)

    @torch.inference_mode()
    def read_blocks(self, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy blocks, uint8: all keys, then all values."""
        content = np.empty(len(blocks) * BLOCK_TOKENS * self.cache_bytes_per_token, np.uint8)
        block_ids = self._to_device(blocks.astype(np.int64))
        for part, there in zip(
            self._split_keys_values(content), (self.keys, self.values), strict=True
        ):
            part.copy_(there[:, block_ids].flatten())
        return content

    @torch.inference_mode()
    def write_blocks(self, blocks: NDArray[np.int32], content: NDArray[np.uint8]) -> None:
        """Write the result of `read_blocks`."""
        block_ids = self._to_device(blocks.astype(np.int64))
        # Copy a read-only array, because torch requires a writable one.
        writable = np.require(content, requirements=("C", "W", "A"))
        for part, there in zip(
            self._split_keys_values(writable), (self.keys, self.values), strict=True
        ):
            shape = (len(there), len(block_ids), *there.shape[2:])
            there[:, block_ids] = part.view(shape).to(self._device)

    def _split_keys_values(self, content: NDArray[np.uint8]) -> tuple[Tensor, ...]:
        return torch.from_numpy(content).view(self._dtype).chunk(2)

    def release_cache(self) -> None:
        """Free the memory of the cache; graphs have its address, so they are captured again."""
        self._clear_graphs()
        self._cache_storages = TensorStorages({"keys": self.keys, "values": self.values})
        self._cache_storages.release()

    def reallocate_cache(self) -> None:
        """Allocate the cache again, with undefined content; raise MemoryError without enough."""
        self._cache_storages.reallocate()

    def collect_weights(self) -> TensorStorages:
        """Return the memory of the weights; graphs have its address, so none is left."""
        self._clear_graphs()
        return TensorStorages(dict(self.model.named_parameters()))

    def _get_block_ids(self, slot: int, start: int, end: int) -> NDArray[np.int32]:
        assert self._block_table is not None
        return self._block_table[slot, start // BLOCK_TOKENS : count_blocks(end)]

    def sleep(self) -> None:
        """Free the memory of weights, cache and captured graphs."""
        del self.model, self.keys, self.values
        self._clear_graphs()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self, num_blocks: int) -> None:
        """Allocate weights and cache; graphs are captured again on demand.

        Raise MeshError, with nothing allocated, if memory runs out.
        """
        try:
            model, keys, values = self._allocate(num_blocks)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # they refer to what was allocated
            torch.cuda.empty_cache()
            raise out_of_memory_error(str(error).partition("\n")[0]) from error
        self.model, self.keys, self.values = model, keys, values
        self._adapters.attach_model(model)

    def _allocate(self, num_blocks: int) -> tuple[Decoder, Tensor, Tensor]:
        config = self._config
        with torch.device("meta"):  # weights come from the store: the host never holds all of them
            model = Decoder(config, self._dtype, max_positions=self._slots.max_length)
        model = model.to_empty(device=self._device).eval().requires_grad_(False)
        model.reset_buffers()
        shapes = get_cache_shapes(num_blocks, config.num_kv_heads, config.head_dim, self._dtype)
        keys, values = (
            torch.zeros(config.num_layers, *shape, dtype=self._dtype, device=self._device)
            for shape in shapes
        )
        return model, keys, values

    def _to_device(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
