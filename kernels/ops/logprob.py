"""The operator for the log-probability of one token per row of logits."""

import torch
from torch import Tensor

from kernels.backends import reference
from kernels.ops.dispatch import offer


@torch.library.custom_op("meshrl::token_logprob", mutates_args=())
def token_logprob(logits: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / temperature)[token] of each row -> [n] float32.

    logits [n, vocab] float32 or bfloat16, tokens [n] int64 (-1: an empty lane, 0), temperature [n]
    float32 (0 counts as 1: the likeliest token was taken). A row that holds a NaN gives NaN.
    IndexError on a CPU if a token is out of range.
    """
    _check(logits, tokens, temperature)
    return reference.token_logprob(logits, tokens, temperature)


def _check(logits: Tensor, tokens: Tensor, temperature: Tensor) -> None:
    if logits.dim() != 2 or logits.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"logits {list(logits.shape)} of {logits.dtype}")
    for tensor, dtype in ((tokens, torch.int64), (temperature, torch.float32)):
        if list(tensor.shape) != [logits.shape[0]] or tensor.dtype != dtype:
            raise ValueError(
                f"{list(tensor.shape)} of {tensor.dtype}, expected [{logits.shape[0]}] of {dtype}"
            )


offer(token_logprob, _check, lambda logits, tokens, temperature: torch.empty_like(temperature))
