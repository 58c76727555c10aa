"""Kernels against float64, and their share of the bandwidth or arithmetic of the device.

The implementations of the device are called directly, because operators would fall back to plain
PyTorch without an error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import silu

from loadtests.gpu.measuring import (
    build_config,
    check_close,
    check_equal,
    describe_arithmetic,
    describe_bandwidth,
    measure_s,
)
from loadtests.gpu.plan import Figures, Incorrect, Settings
from meshrl.common.model.network.moe import MixtureOfExperts, can_group_experts
from meshrl.kernels.backends import cuda, native
from meshrl.kernels.backends.cache_layout import BLOCK_TOKENS, get_cache_shapes, unpack_cache

TOLERANCE = 0.02  # of the largest number: bfloat16 has 8 bits, and results are rounded once
LOGPROB_TOLERANCE = 1e-5  # computed in float32 from exact logits
EXPERTS_TOLERANCE = 0.04  # three products, each rounded
CHECKED_ROWS = 8


@dataclass(frozen=True)
class Sizes:
    """Sizes of the inputs. On a GPU each input is several times its last-level cache."""

    rows: int  # of bucket_pack and bucket_scatter, and of logits
    row_width: int
    sequences: int
    context: int
    heads: int
    kv_heads: int
    width: int
    prefill: tuple[int, ...]  # lengths
    vocab: int
    moe_tokens: int
    moe_hidden: int
    moe_ffn: int
    experts: int
    chosen: int


ON_GPU = Sizes(
    rows=4096,
    row_width=151_936,
    sequences=128,
    context=4096,
    heads=32,
    kv_heads=8,
    width=128,
    prefill=(8192, 4096, 4096, 4096, 2048, 2048, 1024, 700),
    vocab=151_936,
    moe_tokens=8192,
    moe_hidden=2048,
    moe_ffn=768,
    experts=128,
    chosen=8,
)
ON_CPU = Sizes(
    rows=16,
    row_width=64,
    sequences=2,
    context=64,
    heads=4,
    kv_heads=2,
    width=32,
    prefill=(40, 20),
    vocab=512,
    moe_tokens=32,
    moe_hidden=64,
    moe_ffn=32,
    experts=4,
    chosen=2,
)


def get_sizes(settings: Settings) -> Sizes:
    return ON_CPU if settings.is_tiny else ON_GPU


def get_backend(settings: Settings) -> ModuleType:
    return cuda if settings.device == "cuda" else native


def draw(settings: Settings, *shape: int) -> Tensor:
    """Return random numbers in bfloat16, the same in each run."""
    generator = torch.Generator(settings.device).manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device=settings.device).bfloat16()


def build(settings: Settings) -> Figures:
    """Return the seconds to build and load the device's kernels; 0 if they were built before."""
    began = time.perf_counter()
    if settings.device == "cuda":
        library = cuda.build_library()
        if isinstance(library, str):
            raise Incorrect(library)
    else:
        native.load_library()
    return {"build_s": time.perf_counter() - began}


def measure_bucket(settings: Settings) -> Figures:
    """Measure packing half of the rows, every second lane in reverse order, and scattering them."""
    sizes, backend = get_sizes(settings), get_backend(settings)
    rows = draw(settings, sizes.rows, sizes.row_width)
    index = torch.arange(sizes.rows - 1, -1, -2, device=settings.device)
    index[::5] = -1
    packed = backend.bucket_pack(rows, index)
    expected = rows[index.clamp(min=0)] * (index >= 0)[:, None]
    check_equal(packed, expected, "packed rows")
    target = torch.zeros_like(rows)
    backend.bucket_scatter(packed, index, target)
    check_equal(target[index[index >= 0]], packed[index >= 0], "scattered rows")
    moved_bytes = 2.0 * packed.nbytes
    packed_s = measure_s(settings, lambda: backend.bucket_pack(rows, index))
    scattered_s = measure_s(settings, lambda: backend.bucket_scatter(packed, index, target))
    return {
        f"{name}_{key}": value
        for name, seconds in (("pack", packed_s), ("scatter", scattered_s))
        for key, value in describe_bandwidth(settings, seconds, moved_bytes).items()
    }


def build_cache(settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Return random keys and values of all sequences, and their block table in shuffled order."""
    sizes = get_sizes(settings)
    blocks = sizes.sequences * sizes.context // BLOCK_TOKENS
    shapes = get_cache_shapes(blocks, sizes.kv_heads, sizes.width, torch.bfloat16)
    keys, values = (draw(settings, *shape) for shape in shapes)
    generator = torch.Generator(settings.device).manual_seed(0)
    order = torch.randperm(blocks, generator=generator, device=settings.device)
    return keys, values, order.view(sizes.sequences, -1).to(torch.int32)


def read_cache(keys: Tensor, values: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return a sequence's keys and values [kv_heads, tokens, width]."""
    parts = unpack_cache(keys[blocks.long()], values[blocks.long()])
    k, v = (part.transpose(0, 1).flatten(1, 2) for part in parts)
    return k, v


def measure_paged_write(settings: Settings) -> Figures:
    """Measure writes of every token of every sequence."""
    sizes, backend = get_sizes(settings), get_backend(settings)
    keys, values, table = build_cache(settings)
    count = sizes.sequences * sizes.context
    new_keys, new_values = (
        draw(settings, count, sizes.kv_heads, sizes.width) * factor for factor in (1, 2)
    )
    tables = table.repeat_interleave(sizes.context, 0)
    positions = torch.arange(sizes.context, device=settings.device).repeat(sizes.sequences)

    def write() -> None:
        backend.paged_write(keys, values, new_keys, new_values, tables, positions)

    write()
    for sequence in range(min(CHECKED_ROWS, sizes.sequences)):
        own = slice(sequence * sizes.context, (sequence + 1) * sizes.context)
        k, v = read_cache(keys, values, table[sequence])
        check_equal(k.transpose(0, 1), new_keys[own], "written keys")
        check_equal(v.transpose(0, 1), new_values[own], "written values")
    written_bytes = new_keys.nbytes + new_values.nbytes
    return describe_bandwidth(settings, measure_s(settings, write), 2.0 * written_bytes)


def attend_exactly(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return attention in float64 of q [heads, n, width] to k, v [kv_heads, m, width]."""
    k, v = (x.double().repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    scores = q.double() @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(later, -torch.inf)
    found: Tensor = scores.softmax(-1) @ v
    return found


def measure_paged_decode(settings: Settings) -> Figures:
    """Measure a decode step's attention; its limit is reading the cache once."""
    sizes, backend = get_sizes(settings), get_backend(settings)
    keys, values, table = build_cache(settings)
    queries = draw(settings, sizes.sequences, sizes.heads, sizes.width)
    lengths = torch.full((sizes.sequences,), sizes.context, dtype=torch.int32)
    lengths[1::2] -= 5
    lengths = lengths.to(settings.device)

    def decode() -> Tensor:
        found: Tensor = backend.paged_decode(
            queries, keys, values, table, lengths, sizes.width**-0.5
        )
        return found

    found = decode()
    checked = range(min(CHECKED_ROWS, sizes.sequences))
    exact = []
    for sequence in checked:
        k, v = read_cache(keys, values, table[sequence])
        length = int(lengths[sequence])
        exact.append(
            attend_exactly(queries[sequence][:, None], k[:, :length], v[:, :length], causal=False)
        )
    figures = check_close(found[: len(checked)], torch.stack(exact)[:, :, 0], TOLERANCE)
    read_bytes = float(keys.nbytes + values.nbytes)
    return figures | describe_bandwidth(settings, measure_s(settings, decode), read_bytes)


def measure_prefill(settings: Settings) -> Figures:
    """Measure causal attention of packed sequences; its limit is arithmetic."""
    sizes, backend = get_sizes(settings), get_backend(settings)
    total = sum(sizes.prefill)
    q = draw(settings, total, sizes.heads, sizes.width)
    k, v = (draw(settings, total, sizes.kv_heads, sizes.width) * factor for factor in (1, 2))
    ends = torch.tensor([0, *sizes.prefill]).cumsum(0).to(settings.device, torch.int32)

    def prefill() -> Tensor:
        found: Tensor = backend.varlen_prefill(q, k, v, ends, sizes.width**-0.5)
        return found

    last = slice(total - sizes.prefill[-1], total)
    last_q, last_k, last_v = (x[last].transpose(0, 1) for x in (q, k, v))
    exact = attend_exactly(last_q, last_k, last_v, causal=True)
    figures = check_close(prefill()[last], exact.transpose(0, 1), TOLERANCE)
    operations = sum(2.0 * n * n for n in sizes.prefill) * sizes.heads * sizes.width
    return figures | describe_arithmetic(settings, measure_s(settings, prefill), operations)


def measure_logprob(settings: Settings) -> Figures:
    """Measure log-probabilities of one token of each row of logits."""
    sizes, backend = get_sizes(settings), get_backend(settings)
    logits = draw(settings, sizes.rows, sizes.vocab)
    tokens = torch.arange(sizes.rows, device=settings.device) * 37 % sizes.vocab
    temperature = torch.full((sizes.rows,), 0.7, device=settings.device)

    def compute() -> Tensor:
        found: Tensor = backend.token_logprob(logits, tokens, temperature)
        return found

    few = slice(0, CHECKED_ROWS)
    exact = (logits[few].double() / 0.7).log_softmax(-1).gather(1, tokens[few, None])[:, 0]
    figures = check_close(compute()[few], exact, LOGPROB_TOLERANCE)
    return figures | describe_bandwidth(
        settings, measure_s(settings, compute), float(logits.nbytes)
    )


@torch.inference_mode()
def measure_experts(settings: Settings) -> Figures:
    """Measure a layer's experts as one grouped product, with routing."""
    sizes = get_sizes(settings)
    config = replace(
        build_config(settings),
        num_experts=sizes.experts,
        num_experts_per_token=sizes.chosen,
        expert_ffn_size=sizes.moe_ffn,
        hidden_size=sizes.moe_hidden,
        normalise_routing=True,
    )
    with torch.device(settings.device):
        layer = MixtureOfExperts(config, torch.bfloat16)
    for parameter in layer.parameters():
        parameter.copy_(draw(settings, *parameter.shape) * parameter.shape[-1] ** -0.5)
    x = draw(settings, sizes.moe_tokens, sizes.moe_hidden)
    if not can_group_experts(config, x):
        raise Incorrect("PyTorch has no grouped product for these widths")
    few = x[:CHECKED_ROWS]
    routed = layer.route(few, None, None)
    exact = torch.zeros_like(few, dtype=torch.float64)
    for row, (experts, weights) in enumerate(zip(*routed[:2], strict=True)):
        for expert, weight in zip(experts.tolist(), weights.double(), strict=True):
            gate, up = (layer.gate_up[expert].double() @ few[row].double()).chunk(2)
            exact[row] += weight * (layer.down[expert].double() @ (silu(gate) * up))
    figures = check_close(layer(x)[0][:CHECKED_ROWS], exact, EXPERTS_TOLERANCE)
    seconds = measure_s(settings, lambda: layer(x))
    pairs = sizes.moe_tokens * sizes.chosen
    operations = 6.0 * pairs * sizes.moe_hidden * sizes.moe_ffn
    return figures | describe_arithmetic(settings, seconds, operations)


CASES = {
    "build": build,
    "bucket": measure_bucket,
    "paged_write": measure_paged_write,
    "paged_decode": measure_paged_decode,
    "prefill": measure_prefill,
    "logprob": measure_logprob,
    "experts": measure_experts,
}
