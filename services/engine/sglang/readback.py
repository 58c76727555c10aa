"""Bit-by-bit comparison of a server's tensors with a version, by the server's digests."""

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

SGLANG_FUSED_NAMES = {  # our fused matrices by SGLang name
    "qkv": "self_attn.qkv_proj.weight",
    "qkv_bias": "self_attn.qkv_proj.bias",
    "gate_up": "mlp.gate_up_proj.weight",
}
# Matrices that are wider in SGLang's MLP: see `v0_5.INNER_ROWS`.
WIDER_ROWS = tuple(f".{x}_proj.{y}weight" for x in ("gate", "up") for y in ("", "lora_B."))
WIDER_COLUMNS = (".down_proj.weight", ".down_proj.lora_A.weight")


def find_differing(
    config: ModelConfig, answer: Any, hf_weights: Mapping[str, Tensor], dtype: torch.dtype
) -> list[str]:
    """Return names of the server's tensors that differ from a dense model's version.

    `hf_weights`: the version by Hugging Face names. `answer`: the server's answer. `dtype`: the
    type that the server computes in, whatever the version is published in. Raise RemoteFailure if
    the answer is not that of a server with the whole model in one process.
    """
    ranks = answer.get("ranks") if isinstance(answer, dict) else None
    if not ranks or len(ranks) != 1:
        raise RemoteFailure(
            f"{v0_5.WEIGHTS_CHECKER} answered for {len(ranks or ())} ranks instead of 1"
        )
    has = ranks[0]["checksums"]
    expected = {
        name: compute_digest(tensor.to(dtype))
        for name, tensor in to_server_layout(config, hf_weights)
    }
    return [name for name, digest in expected.items() if has.get(name) != digest]


def to_server_layout(
    config: ModelConfig, hf_weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Convert a version's tensors to the names and layout of a server on a CPU, one by one."""
    fused_names: dict[str, tuple[str, list[str]]] = {}  # by first part: the fused one, its parts
    later_parts: set[str] = set()
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for fused, names in get_fused_parts(config).items():
            parts = [prefix + name for name in names]
            if all(part in hf_weights for part in parts):
                fused_names[parts[0]] = prefix + SGLANG_FUSED_NAMES[fused], parts
                later_parts.update(parts[1:])
    for name in hf_weights:
        if name in fused_names:
            fused_name, parts = fused_names[name]
            yield fused_name, torch.cat([pad_tensor(p, hf_weights[p]) for p in parts])
        elif name not in later_parts:
            yield name, pad_tensor(name, hf_weights[name])


def pad_tensor(name: str, tensor: Tensor) -> Tensor:
    """Pad a matrix, or an adapter's factor of it, with the zeros that SGLang appends."""
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
    """Return the digest that a server on a CPU computes."""
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content.data).digest()[:8].hex()
