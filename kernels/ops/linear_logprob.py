"""Log-probability of one token per hidden state, and the entropy of its distribution.

Both are computed from the unembedding matrix, with the logits of one chunk of the vocabulary in
memory at a time. The sums of the softmax are taken online over chunks (Milakov, Gimelshein 2018);
the backward pass computes each chunk's logits again, as in "Cut Your Losses" (arXiv 2411.09009). A
vocabulary of one chunk saves its distribution instead. Products of bfloat16 are summed in float32,
and so is the softmax; float64 stays float64. Plain PyTorch, so it runs on every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshrl.kernels.absent_ids import IdRanges, mask_absent_logits

# Logits in memory at a time: those of a CPU fit its cache, those of a GPU keep it busy.
MAX_LOGITS_PER_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 27}
MIN_CHUNK_IDS = 512  # smallest chunk of the vocabulary: products of fewer rows are slow


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    max_logits: int = 0,
    absent_ids: IdRanges = (),
) -> tuple[Tensor, Tensor]:
    """Return log softmax(hidden weight^T / temperature) at each target [t], and the entropies [t].

    Shapes: hidden [t, d] and weight [vocab, d] of one dtype, targets [t] int64; results are float32
    (float64 of float64). Both have a gradient. `max_logits`: logits in memory at a time; 0: chosen
    for the device. Ids in `absent_ids` have no probability; their rows of
    `weight` get no gradient. IndexError on a CPU if a target is out of range.
    """
    max_logits = max_logits or MAX_LOGITS_PER_CHUNK.get(
        hidden.device.type, MAX_LOGITS_PER_CHUNK["cuda"]
    )
    if targets.device.type == "cpu" and len(targets):
        least, most = int(targets.min()), int(targets.max())
        if least < 0 or most >= weight.shape[0]:
            raise IndexError(f"a target is out of range of {weight.shape[0]} tokens")
    chunk = max(MIN_CHUNK_IDS, max_logits // max(1, len(targets)))
    if weight.shape[0] <= chunk:
        logprobs, entropy = _FullVocabularyLogprob.apply(  # type: ignore[no-untyped-call]
            hidden, weight, targets, temperature, absent_ids
        )
    else:
        logprobs, entropy = _ChunkedLogprob.apply(  # type: ignore[no-untyped-call]
            hidden, weight, targets, temperature, chunk, absent_ids
        )
    return logprobs, entropy


class _FullVocabularyLogprob(torch.autograd.Function):
    """Small vocabulary: all logits at once, with the distribution saved for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        absent: IdRanges,
    ) -> tuple[Tensor, Tensor]:
        logits = mask_absent_logits(
            _multiply_in_float32(hidden, weight.t()).div_(temperature), absent
        )
        normal = logits.log_softmax(-1)
        logprobs = normal.gather(1, targets.unsqueeze(1)).squeeze(1)
        likely = normal.exp()
        # 0 log 0 = 0 if a logit is minus infinity
        entropy = torch.linalg.vecdot(likely, normal.clamp_(min=-1e30)).neg_()
        ctx.save_for_backward(hidden, weight, targets, likely, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, likely, entropy = ctx.saved_tensors
        arriving, entropy_arriving = _scale_slopes(slopes, entropy, ctx.temperature)
        rising = (likely * -arriving).scatter_add_(1, targets.unsqueeze(1), arriving)
        if entropy_arriving is not None:
            rising -= _differentiate_entropy(likely.log(), entropy) * entropy_arriving
        rising = rising.to(hidden.dtype)
        of_hidden = rising @ weight if ctx.needs_input_grad[0] else None
        of_weight = rising.t() @ hidden if ctx.needs_input_grad[1] else None
        return of_hidden, of_weight, None, None, None


class _ChunkedLogprob(torch.autograd.Function):
    """Large vocabulary: saves the log of each row's softmax sum for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        absent: IdRanges,
    ) -> tuple[Tensor, Tensor]:
        kind = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # Finite, since the first chunks may have absent ids only.
        lowest = torch.finfo(kind).min
        peak = torch.full(targets.shape, lowest, dtype=kind, device=hidden.device)
        total, weighted, chosen = (torch.zeros_like(peak) for _ in range(3))
        for first, part in _split_vocabulary(weight, chunk):
            logits = mask_absent_logits(
                _multiply_in_float32(hidden, part.t()).div_(temperature), absent, first
            )
            here, at = _locate_targets(targets, first, len(part))
            chosen += torch.where(here, logits.gather(1, at).squeeze(1), 0)
            now = torch.maximum(peak, logits.amax(1))
            shrink = (peak - now).exp_()
            logits -= now.unsqueeze(1)
            likely = logits.exp()
            # The entropy needs the mean of (logit - peak); the sum so far is corrected as the peak
            # changes.
            moved = torch.where(total > 0, (peak - now) * total, 0)
            weighted = (weighted + moved) * shrink + torch.linalg.vecdot(
                likely, logits.clamp_(min=-1e30)
            )
            total = total * shrink + likely.sum(1)
            peak = now
        log_sum = peak + total.log()
        entropy = total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, targets, log_sum, entropy)
        ctx.temperature, ctx.chunk, ctx.absent = temperature, chunk, absent
        ctx.set_materialize_grads(False)
        return chosen - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sum, entropy = ctx.saved_tensors
        arriving, entropy_arriving = _scale_slopes(slopes, entropy, ctx.temperature)
        of_hidden = torch.zeros_like(hidden, dtype=log_sum.dtype)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for first, part in _split_vocabulary(weight, ctx.chunk):
            logits = mask_absent_logits(
                _multiply_in_float32(hidden, part.t()).div_(ctx.temperature), ctx.absent, first
            )
            normal = logits.sub_(log_sum.unsqueeze(1))
            bent = None
            if entropy_arriving is not None:
                bent = _differentiate_entropy(normal, entropy) * entropy_arriving
            rising = normal.exp_().mul_(-arriving)
            here, at = _locate_targets(targets, first, len(part))
            rising.scatter_add_(1, at, arriving * here.unsqueeze(1))
            if bent is not None:
                rising -= bent
            rising = rising.to(hidden.dtype)
            if rising.dtype == of_hidden.dtype:
                of_hidden.addmm_(rising, part)
            else:
                of_hidden += _multiply_in_float32(rising, part)
            if of_weight is not None:
                torch.mm(rising.t(), hidden, out=of_weight[first : first + len(part)])
        return of_hidden.to(hidden.dtype), of_weight, None, None, None, None


def _scale_slopes(
    slopes: tuple[Tensor | None, ...], entropy: Tensor, temperature: float
) -> tuple[Tensor, Tensor | None]:
    """Return the slopes [t, 1] with respect to logits before the temperature; None: not needed."""
    own, of_entropy = slopes
    own = torch.zeros_like(entropy) if own is None else own
    scaled = own.unsqueeze(1) / temperature
    return scaled, None if of_entropy is None else of_entropy.unsqueeze(1) / temperature


def _differentiate_entropy(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Return minus the gradient of the entropy with respect to logits: p (log p + entropy)."""
    return logprobs.exp() * (logprobs.clamp(min=-1e30) + entropy.unsqueeze(1))


def _split_vocabulary(weight: Tensor, chunk: int) -> list[tuple[int, Tensor]]:
    return [(first, weight[first : first + chunk]) for first in range(0, len(weight), chunk)]


def _locate_targets(targets: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return which targets are in a chunk, and an index [t, 1] into it that is valid for all."""
    at = targets - first
    return (at >= 0) & (at < count), at.clamp(0, count - 1).unsqueeze(1)


def _multiply_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return a b, summed and stored in float32, also for narrower factors."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
