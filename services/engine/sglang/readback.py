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
from meshrl.common.generation.sglang_model import VOCABULARY_MATRICES
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf_writer import get_fused_parts
from meshrl.services.engine.sglang import v0_5

SGLANG_FUSED_NAMES = {  # our fused matrices by SGLang's names
    "qkv": "self_attn.qkv_proj.weight",
    "qkv_bias": "self_attn.qkv_proj.bias",
    "gate_up": "mlp.gate_up_proj.weight",
}
# Where SGLang's MLP is wider: see `v0_5.INNER_ROWS`.
WIDER_ROWS = tuple(f".{x}_proj.{y}weight" for x in ("gate", "up") for y in ("", "lora_B."))
WIDER_COLUMNS = (".down_proj.weight", ".down_proj.lora_A.weight")


def find_differing(
    config: ModelConfig, answer: Any, hf_weights: Mapping[str, Tensor], dtype: torch.dtype
) -> list[str]:
    """Names of the server's tensors that are not what a dense model's version makes of them.

    `theirs`: the version by Hugging Face's names. `told`: the server's answer. `dtype`: the type
    that it computes in, whatever the version is published in. RemoteFailure when the answer is not
    one of a server that has the whole model in a process.
    """
    ranks = answer.get("ranks") if isinstance(answer, dict) else None
    if not ranks or len(ranks) != 1:
        raise RemoteFailure(
            f"{v0_5.WEIGHTS_CHECKER} answered for {len(ranks or ())} ranks in place of 1"
        )
    has = ranks[0]["checksums"]
    expected = {
        name: compute_digest(tensor.to(dtype))
        for name, tensor in to_server_layout(config, hf_weights)
    }
    return [name for name, wanted in expected.items() if has.get(name) != wanted]


def to_server_layout(
    config: ModelConfig, hf_weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """A version's tensors as a server on a CPU has them, by its names."""
    left = {name: pad_tensor(name, tensor) for name, tensor in hf_weights.items()}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for fused, parts in get_fused_parts(config).items():
            if all(prefix + part in left for part in parts):
                yield (
                    prefix + SGLANG_FUSED_NAMES[fused],
                    torch.cat([left.pop(prefix + p) for p in parts]),
                )
    yield from left.items()


def pad_tensor(name: str, tensor: Tensor) -> Tensor:
    """A matrix, or a factor of its adapter, with the zeros that SGLang has beyond it."""
    rows = columns = 1
    if name in VOCABULARY_MATRICES:
        rows = v0_5.VOCABULARY_ROWS
    elif name.endswith(WIDER_ROWS):
        rows = v0_5.INNER_ROWS
    elif name.endswith(WIDER_COLUMNS):
        columns = v0_5.INNER_ROWS
    else:
        return tensor
    return pad(tensor, (0, -tensor.shape[1] % columns, 0, -tensor.shape[0] % rows))


def compute_digest(tensor: Tensor) -> str:
    """As a server on a CPU tells it."""
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content.data).digest()[:8].hex()
