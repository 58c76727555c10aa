"""Native backend: a whole step of the batch in one call of `kernels/csrc/decoder.cpp`.

The library works in place on the arrays of `Slots` and on the block table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from operator import is_not
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from meshrl.common.generation.batch.adapter_deltas import ADAPTER_TARGETS, AdapterDeltas
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.batch.step_compute import SlotIndices, out_of_memory_error
from meshrl.common.generation.engine_contract import IntArray
from meshrl.common.generation.engine_memory import MappedMemory
from meshrl.common.job.memory.cache_blocks import BLOCK_TOKENS, count_blocks
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.rope import build_rope_table
from meshrl.common.weights.layout.version_image import list_tensor_parts
from meshrl.kernels.library_build import Library, build_library

HEAD_WIDTHS = (32, 64, 128)  # head widths with kernels; others are padded with zeros
SCORE_CHUNK_TOKENS = 512  # tokens of one call
DTYPE_DEFINES = {"float32": "", "bfloat16": "MESHRL_STORAGE=bf16"}
WEIGHT_PARTS = (  # order of enum Part in decoder.cpp
    "embedding",
    "unembedding",
    "final_norm",
    "attention_norm",
    "qkv",
    "qkv_bias",
    "query_norm",
    "key_norm",
    "output",
    "output_bias",
    "mlp_norm",
    "gate_up",
    "down",
    "experts.router",
    "experts.gate_up",
    "experts.down",
    "experts.shared_gate",
    "experts.shared_gate_up",
    "experts.shared_down",
)

# Parts in float32; the other parts have the library's storage type.
FLOAT32_PARTS = {"embedding", *(part for part in WEIGHT_PARTS if part.endswith(("norm", "bias")))}

_SHAPE_FIELDS = (
    *("vocab", "hidden", "layers", "heads", "kv_heads", "head_width", "rotary_width", "ffn"),
    *("positions", "experts", "experts_per_token", "expert_ffn", "normalise_routing"),
    "shared_ffn",
)


class _ShapeStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _SHAPE_FIELDS),
        ("norm_epsilon", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
    )


class _TensorPieceStruct(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("is_bf16", ctypes.c_int64),
    )


_SLOT_ARRAYS = {
    "tokens": np.int64,
    "logprobs": np.float32,
    "raw_logprobs": np.float32,
    "versions": np.int32,
    "num_tokens": np.int64,
    "num_computed_tokens": np.int64,
    "max_tokens": np.int64,
    "stop_ids": np.int64,
    "table": np.int32,
    "rng_key": np.uint64,
    "temperature": np.float32,
    "top_p": np.float32,
    "min_p": np.float32,
    "top_k": np.int64,
    "wants_raw_logprobs": np.bool_,
    "is_adjusted": np.bool_,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "output_start": np.int64,
    "stop_start": np.int64,
    "biased_ids": np.int64,
    "biases": np.float32,
    "finish_reason": np.int8,
    "experts": np.int16,
    "adapter_index": np.int32,
    "adapter_versions": np.int32,
}


class _SlotsStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _SLOT_ARRAYS),
        *((name, ctypes.c_int64) for name in ("length", "table_width", "stop_width", "bias_width")),
    )


_ADDRESS, _NUMBER, _STATUS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    "decoder_new": (*[_ADDRESS] * 4, _NUMBER),
    "decoder_delete": (_ADDRESS,),
    "decoder_wake": (_ADDRESS, _NUMBER),
    "decoder_sleep": (_ADDRESS,),
    "decoder_copy_block": (_ADDRESS, _NUMBER, _NUMBER),
    "decoder_discard_cache": (_ADDRESS,),
    "decoder_weights_memory": (_ADDRESS, ctypes.c_int, _ADDRESS),
    "decoder_item_bytes": (),
    "decoder_read_blocks": (_ADDRESS, _ADDRESS, _NUMBER, _ADDRESS),
    "decoder_write_blocks": (_ADDRESS, _ADDRESS, _NUMBER, _ADDRESS),
    "decoder_load": (_ADDRESS, ctypes.c_int, _NUMBER, _ADDRESS, _NUMBER),
    "decoder_read": (_ADDRESS, ctypes.c_int, _NUMBER, _ADDRESS),
    "decoder_adapter_begin": (_ADDRESS, _ADDRESS),
    "decoder_adapter_set": (_ADDRESS, _NUMBER, ctypes.c_int, _NUMBER, _ADDRESS, _ADDRESS),
    "decoder_adapter_commit": (_ADDRESS, _NUMBER),
    "decoder_adapter_drop": (_ADDRESS, _NUMBER),
    "decoder_score": (_ADDRESS, _ADDRESS, _NUMBER, _NUMBER, _ADDRESS),
    "decoder_run": (*[_ADDRESS] * 4, _NUMBER, _NUMBER, ctypes.c_double),
}
_RESULTS = {
    "decoder_new": _ADDRESS,
    "decoder_item_bytes": _NUMBER,
    "decoder_weights_memory": _NUMBER,
    "decoder_run": _NUMBER,
    **dict.fromkeys(("decoder_wake", "decoder_load", "decoder_score"), _STATUS),
    **dict.fromkeys(("decoder_adapter_begin", "decoder_adapter_commit"), _STATUS),
}


def build_native_library(config: ModelConfig, dtype: str = "float32") -> Library:
    """Build the C++ library for models of this shape, or return the reason why that failed."""
    if dtype not in DTYPE_DEFINES:
        return Library(None, f"there is no native decoder for dtype {dtype}")
    if config.head_dim > HEAD_WIDTHS[-1]:
        return Library(None, f"there is no native attention for heads of width {config.head_dim}")
    return build_library("decoder", DTYPE_DEFINES[dtype])


class NativeCompute:
    """Model in C++, over a paged cache of its own."""

    def __init__(self, library: Library, config: ModelConfig, slots: Slots) -> None:
        """Create the model.

        Raise FileNotFoundError, with the reason, if the library could not be built, and MeshError
        if memory runs out.
        """
        self.vocab_size = config.vocab_size
        self._config, self._slots = config, slots
        self._width = next(width for width in HEAD_WIDTHS if width >= config.head_dim)
        self._block_table: NDArray[np.int32] | None = None
        self._slots_struct: _SlotsStruct | None = None
        # Keep references, because the slots struct points to these arrays.
        self._widening_arrays: tuple[NDArray[Any], ...] = ()
        self._lib = library.load_with_signatures(_SIGNATURES, None, _RESULTS)
        heads, item = config.num_kv_heads, self._lib.decoder_item_bytes()
        self._rounds_weights = item < torch.float32.itemsize
        shape = f"{config.num_layers}, 2, blocks, {heads}, {BLOCK_TOKENS} x {self._width}"
        self.cache_layout = f"native, {item} bytes an item [{shape}]"
        self.cache_bytes_per_token: int = 2 * config.num_layers * heads * self._width * item
        # The embedding is in float32, beside an unembedding of its own even if they are tied.
        embedding = config.vocab_size * config.hidden_size
        rest = config.num_parameters - (0 if config.tie_embeddings else embedding)
        self.weights_bytes = item * rest + 4 * embedding
        positions = slots.max_length
        rope = build_rope_table(config, positions).contiguous()
        shape_struct = _ShapeStruct(
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_width=self._width,
            rotary_width=config.head_dim,
            ffn=config.ffn_size,
            positions=positions,
            experts=config.num_experts,
            experts_per_token=config.num_experts_per_token,
            expert_ffn=config.expert_ffn_size,
            normalise_routing=config.normalise_routing,
            shared_ffn=config.shared_expert_ffn_size,
            norm_epsilon=config.norm_eps,
            attention_scale=config.head_dim**-0.5,
        )
        kinds = np.zeros((config.num_layers, 3), np.int64)  # LayerKind in decoder.cpp
        kinds[list(config.sparse_layers), 0] = 1
        kinds[:, 1] = 1
        kinds[list(config.no_rope_layers), 1] = 0
        kinds[:, 2] = [config.get_window_tokens(layer) for layer in range(config.num_layers)]
        absent = np.array(config.absent_ids, np.int64).reshape(-1, 2)  # Absent in sampling.h
        args = rope.data_ptr(), kinds.ctypes.data, absent.ctypes.data, len(absent)
        self._decoder = self._lib.decoder_new(ctypes.byref(shape_struct), *args)
        if not self._decoder:
            raise out_of_memory_error()

    def __del__(self) -> None:
        if getattr(self, "_decoder", None):
            self._lib.decoder_delete(self._decoder)

    def attach_block_table(self, table: NDArray[np.int32]) -> None:
        """Attach the block table that steps read."""
        self._block_table = table

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's keys and values of all layers into another block."""
        self._lib.decoder_copy_block(self._decoder, source, target)

    def span_bytes(self, start: int, end: int) -> int:
        """Return the bytes of the blocks of tokens [start, end); `start` begins a block."""
        return (
            (count_blocks(end) - start // BLOCK_TOKENS) * BLOCK_TOKENS * self.cache_bytes_per_token
        )

    def read_cache(self, slot: int, start: int, end: int) -> NDArray[np.uint8]:
        """Copy a slot's blocks of tokens [start, end), uint8."""
        return self.read_blocks(self._get_block_ids(slot, start, end))

    def write_cache(self, slot: int, start: int, end: int, content: NDArray[np.uint8]) -> None:
        """Write the result of `read_cache` into the slot's blocks."""
        self.write_blocks(self._get_block_ids(slot, start, end), content)

    def read_blocks(self, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy blocks, uint8."""
        content = np.empty(len(blocks) * BLOCK_TOKENS * self.cache_bytes_per_token, np.uint8)
        self._lib.decoder_read_blocks(
            self._decoder, blocks.ctypes.data, len(blocks), content.ctypes.data
        )
        return content

    def write_blocks(self, blocks: NDArray[np.int32], content: NDArray[np.uint8]) -> None:
        """Write the result of `read_blocks`."""
        content = np.ascontiguousarray(content)
        self._lib.decoder_write_blocks(
            self._decoder, blocks.ctypes.data, len(blocks), content.ctypes.data
        )

    def release_cache(self) -> None:
        """Free the memory of the cache, whose pages are allocated again at their next use."""
        self._lib.decoder_discard_cache(self._decoder)

    def reallocate_cache(self) -> None:
        """Do nothing: see `release_cache`."""

    def collect_weights(self) -> MappedMemory:
        """Return the memory of the matrices and the embedding, which are nearly all weights."""
        regions, address = {}, ctypes.c_void_p()
        for index, name in enumerate(("matrices", "embedding")):
            size = self._lib.decoder_weights_memory(self._decoder, index, ctypes.byref(address))
            regions[name] = (address.value or 0, size)
        return MappedMemory(regions)

    def _get_block_ids(self, slot: int, start: int, end: int) -> NDArray[np.int32]:
        assert self._block_table is not None
        return self._block_table[slot, start // BLOCK_TOKENS : count_blocks(end)]

    def run_steps(
        self, slots: SlotIndices, counts: SlotIndices, max_steps: int, budget_s: float
    ) -> int:
        """Compute `counts[i]` tokens of each slot; return the number of sampled tokens.

        If all counts are 1, run up to `max_steps` steps within `budget_s` seconds.
        """
        # A request with more ids than any before replaces an array.
        arrays = self._slots.stop_ids, self._slots.biased_ids, self._slots.biases
        if any(map(is_not, arrays, self._widening_arrays)) or self._slots_struct is None:
            assert self._block_table is not None
            self._slots_struct = _describe_slots(self._slots, self._block_table)
            self._widening_arrays = arrays
        sampled = self._lib.decoder_run(
            self._decoder,
            ctypes.byref(self._slots_struct),
            slots.ctypes.data,
            counts.ctypes.data,
            len(slots),
            max_steps,
            budget_s,
        )
        if sampled < 0:
            raise out_of_memory_error()
        return int(sampled)

    @torch.inference_mode()
    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Pack weights for the C++ code; raise MeshError if memory runs out."""
        for name in state:
            part, layer = _parse_tensor_name(name)
            self._load_part(part, layer, self._get_elements(part, state, name))
        if self._config.tie_embeddings:
            self._load_part("unembedding", 0, self._get_elements("unembedding", state, "embedding"))

    def _get_elements(self, part: str, state: Mapping[str, Tensor], name: str) -> list[Tensor]:
        """Return a tensor's elements in order, without a copy if possible."""
        if self._needs_padding(part):
            return [self._pad_heads(part, state[name].float()).reshape(-1)]
        return list_tensor_parts(state, name)

    def _load_part(self, part: str, layer: int, tensors: list[Tensor]) -> None:
        """Pack a part; copy only elements of a type that the library does not support."""
        buffers = []
        for tensor in (tensor.detach().cpu() for tensor in tensors if tensor.numel()):
            native = tensor.dtype in (torch.float32, torch.bfloat16)
            buffers.append((tensor if native else tensor.float()).contiguous())
        pieces, end = (_TensorPieceStruct * len(buffers))(), 0
        for piece, tensor in zip(pieces, buffers, strict=True):
            begin, end = end, end + tensor.numel()
            piece.begin, piece.end, piece.data = begin, end, tensor.data_ptr()
            piece.is_bf16 = tensor.dtype == torch.bfloat16
        args = WEIGHT_PARTS.index(part), layer, ctypes.byref(pieces), len(buffers)
        if self._lib.decoder_load(self._decoder, *args):
            raise out_of_memory_error()

    @torch.inference_mode()
    def find_differing_weights(self, state: Mapping[str, Tensor]) -> list[str]:
        """Return names of weights that differ between the C++ code and `state`."""
        differing = [
            name
            for name, tensor in state.items()
            if not self._has_weights(*_parse_tensor_name(name), tensor)
        ]
        if self._config.tie_embeddings:
            tied = self._has_weights("unembedding", 0, state["embedding"])
            differing += [] if tied else ["unembedding"]
        return differing

    def _has_weights(self, part: str, layer: int, tensor: Tensor) -> bool:
        expected = self._pad_heads(part, tensor.detach().float().cpu()).contiguous()
        found = torch.empty_like(expected)
        self._lib.decoder_read(self._decoder, WEIGHT_PARTS.index(part), layer, found.data_ptr())
        if self._rounds_weights and part not in FLOAT32_PARTS:
            expected = expected.bfloat16().float()
        return torch.equal(found.view(torch.int32), expected.view(torch.int32))

    @torch.inference_mode()
    def load_adapter(self, adapter_index: int, deltas: AdapterDeltas) -> None:
        """Pack an adapter and install it as a whole; raise MeshError if memory runs out."""
        ranks = np.zeros((self._config.num_layers, len(ADAPTER_TARGETS)), np.int64)
        for (layer, name), delta in deltas.items():
            ranks[layer, ADAPTER_TARGETS.index(name)] = delta.rank
        if self._lib.decoder_adapter_begin(self._decoder, ranks.ctypes.data):
            raise out_of_memory_error()
        for (layer, name), delta in deltas.items():
            a = self._pad_heads(name, delta.a) if name == "output" else delta.a
            b = self._pad_heads(name, delta.b) if name == "qkv" else delta.b
            a, b = a.contiguous(), b.contiguous()
            args = layer, ADAPTER_TARGETS.index(name), delta.rank
            self._lib.decoder_adapter_set(self._decoder, *args, a.data_ptr(), b.data_ptr())
        if self._lib.decoder_adapter_commit(self._decoder, adapter_index):
            raise out_of_memory_error()

    def drop_adapter(self, adapter_index: int) -> None:
        """Remove an adapter that no running request uses."""
        self._lib.decoder_adapter_drop(self._decoder, adapter_index)

    def _needs_padding(self, part: str) -> bool:
        """Return True if there are no kernels for the head width of a part."""
        return self._width != self._config.head_dim and part in ("qkv", "qkv_bias", "output")

    def _pad_heads(self, part: str, tensor: Tensor) -> Tensor:
        """Pad heads to the width that kernels support."""
        config, more = self._config, self._width - self._config.head_dim
        if not self._needs_padding(part):
            return tensor
        if part == "output":
            columns = torch.unflatten(tensor, 1, (config.num_heads, config.head_dim))
            return pad(columns, (0, more)).flatten(1)
        heads = config.num_heads + 2 * config.num_kv_heads
        rows = torch.unflatten(tensor, 0, (heads, config.head_dim))
        return pad(rows, (0, more) if rows.dim() == 2 else (0, 0, 0, more)).flatten(0, 1)

    def score(
        self, tokens: IntArray, blocks: IntArray, adapter_index: int = 0
    ) -> NDArray[np.float32]:
        """Score all tokens but the first with the adapter at `adapter_index`.

        Return log-probabilities at temperature 1, float32 [n - 1]. The call overwrites `blocks`.
        """
        scored = np.zeros(max(len(tokens) - 1, 0), np.float32)
        row = np.ascontiguousarray(tokens, np.int64)
        table = np.ascontiguousarray(blocks, np.int32)
        num_computed, adapter = np.zeros(1, np.int64), np.array([adapter_index], np.int32)
        struct = _SlotsStruct(
            tokens=row.ctypes.data,
            num_computed_tokens=num_computed.ctypes.data,
            table=table.ctypes.data,
            adapter_index=adapter.ctypes.data,
            length=len(row),
            table_width=len(table),
        )
        for start in range(0, len(scored), SCORE_CHUNK_TOKENS):
            part = scored[start : start + SCORE_CHUNK_TOKENS]
            if self._lib.decoder_score(
                self._decoder, ctypes.byref(struct), 0, len(part), part.ctypes.data
            ):
                raise out_of_memory_error()
        return scored

    def sleep(self) -> None:
        """Free the memory of weights and cache."""
        self._lib.decoder_sleep(self._decoder)

    def wake(self, num_blocks: int) -> None:
        """Allocate weights and cache; raise MeshError if memory runs out."""
        if self._lib.decoder_wake(self._decoder, num_blocks):
            raise out_of_memory_error()


def _parse_tensor_name(name: str) -> tuple[str, int]:
    """Parse a tensor's name into part and layer."""
    _, dot, rest = name.partition("layers.")
    layer, _, part = rest.partition(".") if dot else ("0", "", name)
    return part, int(layer)


def _describe_slots(slots: Slots, table: NDArray[np.int32]) -> _SlotsStruct:
    struct = _SlotsStruct(
        length=slots.max_length,
        table_width=table.shape[1],
        stop_width=slots.stop_ids.shape[1],
        bias_width=slots.biased_ids.shape[1],
    )
    for name, dtype in _SLOT_ARRAYS.items():
        array = table if name == "table" else getattr(slots, name)
        assert array.dtype == dtype and array.flags.c_contiguous
        setattr(struct, name, array.ctypes.data if array.size else None)
    return struct
