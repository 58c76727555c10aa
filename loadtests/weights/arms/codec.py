"""Arm with deltas of bfloat16 tensors, of which 1 % and 0.2 % of the elements have changed.

Changed elements, anywhere, move to the next number. Measured are the bytes as a share of the
tensors', and gigabytes of tensors that a core encodes and applies in a second. The deltas are made
chunk by chunk, as they travel; the new chunk is hashed where it is applied.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from numpy.typing import NDArray

from loadtests.measuring.metered import HostMeter
from loadtests.measuring.rounds import Arm
from loadtests.weights import contents
from loadtests.weights.scene import Plan
from meshrl.common.base.digest import compute_digest
from meshrl.common.weights.delta.codec import apply_delta, encode_delta
from meshrl.common.weights.layout.manifest import choose_chunk_bytes

SHARES = {"1pct": 0.01, "02pct": 0.002}
WIDTH = 2  # bytes of a bfloat16


def flat(tensors: contents.Tensors) -> NDArray[np.uint8]:
    parts = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors.values()]
    return np.concatenate(parts)


async def codec(plan: Plan) -> Arm:
    honest = HostMeter()
    answer: Arm = {"codec_mib": plan.codec >> 20}
    tensors = contents.drawn(plan.codec, torch.bfloat16)
    old, size = flat(tensors), choose_chunk_bytes(plan.codec)
    for name, share in SHARES.items():
        contents.change(tensors, share, seed=1)
        answer |= _one(name, old, flat(tensors), size, plan.rounds)
        tensors = contents.drawn(plan.codec, torch.bfloat16)
    return answer | honest.get_validity()


def _one(name: str, old: NDArray[np.uint8], new: NDArray[np.uint8], size: int, rounds: int) -> Arm:
    encode_s: list[float] = []
    apply_s: list[float] = []
    bytes_ = 0
    digests = [compute_digest(new[at : at + size].data) for at in range(0, len(new), size)]
    for _ in range(rounds):
        started_s = time.process_time()
        blobs = [encode_delta(old[at : at + size], new[at : at + size], WIDTH) or b""
                 for at in range(0, len(old), size)]  # fmt: skip
        encode_s.append(time.process_time() - started_s)
        bytes_ = sum(map(len, blobs))
        started_s = time.process_time()
        for number, blob in enumerate(blobs):
            part = old[number * size : (number + 1) * size]
            apply_delta(part, blob, digests[number], lambda block: None)
        apply_s.append(time.process_time() - started_s)
    gigabytes = len(old) / 1e9
    return {
        f"delta_bytes_share_{name}": round(bytes_ / len(old), 5),
        f"encode_gb_s_{name}": round(gigabytes / statistics.median(encode_s), 3),
        f"apply_gb_s_{name}": round(gigabytes / statistics.median(apply_s), 3),
    }
