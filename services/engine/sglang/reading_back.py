"""Compares what a server computes with, bit by bit, with a version: by the digests that it tells of
its own tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshrl.common.base.errors import RemoteFailure
from meshrl.common.generation.served_by_sglang import OF_VOCABULARY
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf import fused_parts
from meshrl.services.engine.sglang import v0_5

THEIRS = {  # our fused matrices by SGLang's names
    "qkv": "self_attn.qkv_proj.weight",
    "qkv_bias": "self_attn.qkv_proj.bias",
    "gate_up": "mlp.gate_up_proj.weight",
}
# Where SGLang's MLP is wider: see `v0_5.INNER_ROWS`.
WIDER_ROWS = tuple(f".{x}_proj.{y}weight" for x in ("gate", "up") for y in ("", "lora_B."))
WIDER_COLUMNS = (".down_proj.weight", ".down_proj.lora_A.weight")


def differing(
    config: ModelConfig, told: Any, theirs: Mapping[str, Tensor], dtype: torch.dtype
) -> list[str]:
    """Names of the server's tensors that are not what a dense model's version makes of them.

    `theirs`: the version by Hugging Face's names. `told`: the server's answer. `dtype`: the type
    that it computes in, whatever the version is published in. RemoteFailure when the answer is not
    one of a server that has the whole model in a process.
    """
    ranks = told.get("ranks") if isinstance(told, dict) else None
    if not ranks or len(ranks) != 1:
        raise RemoteFailure(f"{v0_5.READ_BACK} answered for {len(ranks or ())} ranks in place of 1")
    has = ranks[0]["checksums"]
    expected = {name: digest(tensor.to(dtype)) for name, tensor in laid_out(config, theirs)}
    return [name for name, wanted in expected.items() if has.get(name) != wanted]


def laid_out(config: ModelConfig, theirs: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A version's tensors as a server on a CPU has them, by its names."""
    left = {name: padded(name, tensor) for name, tensor in theirs.items()}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for fused, parts in fused_parts(config).items():
            if all(prefix + part in left for part in parts):
                yield prefix + THEIRS[fused], torch.cat([left.pop(prefix + p) for p in parts])
    yield from left.items()


def padded(name: str, tensor: Tensor) -> Tensor:
    """A matrix, or a factor of its adapter, with the zeros that SGLang has beyond it."""
    rows = columns = 1
    if name in OF_VOCABULARY:
        rows = v0_5.VOCABULARY_ROWS
    elif name.endswith(WIDER_ROWS):
        rows = v0_5.INNER_ROWS
    elif name.endswith(WIDER_COLUMNS):
        columns = v0_5.INNER_ROWS
    else:
        return tensor
    return pad(tensor, (0, -tensor.shape[1] % columns, 0, -tensor.shape[0] % rows))


def digest(tensor: Tensor) -> str:
    """As a server on a CPU tells it."""
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content.data).digest()[:8].hex()
