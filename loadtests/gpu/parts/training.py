"""Training: a gradient equal to the CPU's, and the speed of passes and of whole steps."""

from __future__ import annotations

import numpy as np
import torch

from loadtests.gpu.measuring import (
    build_config,
    check_close,
    draw_model,
    get_peaks,
    measure_s,
    synchronize,
)
from loadtests.gpu.plan import Figures, Settings
from loadtests.measuring.shapes import shape
from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.services.trainer.bins.packing import Bin, TrainingSequence, make_bins
from meshrl.services.trainer.learner.learner import Learner

LENGTHS = (4096, 4096, 2048, 2048, 2048, 1024, 512, 512)  # tokens of a bin's sequences
TINY_LENGTHS = (24, 17, 9)
GRADIENT_TOLERANCE = 2e-3  # of the largest number, in float32; attention of a GPU may use TF32
# of the largest weight, 1: AdamW moves a weight by 0.001 to either side where its slope is near 0
WEIGHT_TOLERANCE = 4e-3
PASS_FACTOR = 6.0  # operations per parameter and token: two forward, four backward (2001.08361)


def draw_bin(config: ModelConfig, lengths: tuple[int, ...]) -> Bin:
    """Return a bin of random sequences, of which all tokens but the first carry loss."""
    random = np.random.default_rng(0)
    sequences = [
        TrainingSequence(
            tokens=random.integers(0, config.vocab_size, n).astype(np.int32),
            logprobs=np.full(n, -np.log(config.vocab_size), np.float32),
            loss_mask=np.arange(n) > 0,
            versions=np.zeros(n, np.int32),
            advantages=np.full(n, random.standard_normal(), np.float32),
        )
        for n in lengths
    ]
    (found,) = make_bins(sequences, sum(lengths))
    return found


def build_learner(model: Decoder, dtype: torch.dtype) -> Learner:
    return Learner(model, OptimizerConfig(), AlgorithmConfig(), dtype=dtype)


def count_operations(config: ModelConfig, lengths: tuple[int, ...]) -> float:
    """Return the operations of a forward and a backward pass, without recomputation.

    Causal attention has half of each square: 2 x 2 operations per feature and pair of tokens.
    """
    attended = sum(n * n / 2 for n in lengths) * config.num_heads * config.head_dim
    products = PASS_FACTOR * config.num_parameters * sum(lengths)
    return products + 3 * 4.0 * config.num_layers * attended


def compare_gradients(settings: Settings) -> Figures:
    """Compare a float32 gradient of a small model with the CPU's, and two updates of weights."""
    config = shape(128, 2, 256, 512, (4, 2), head_dim=32, tie_embeddings=True)
    gradients, weights = [], []
    for device in (settings.device, "cpu"):
        model = draw_model(Settings("cpu"), config, torch.float32).to(device)
        learner = build_learner(model, torch.float32)
        gradient, stats = learner.compute_gradient(draw_bin(config, TINY_LENGTHS))
        gradients.append(gradient.cpu())
        learner.apply_gradient(gradient, stats.tokens, 1.0)
        weights.append(torch.cat([w.flatten() for w in learner.copy_weights().values()]))
    figures = check_close(gradients[0], gradients[1], GRADIENT_TOLERANCE)
    after = check_close(weights[0], weights[1], WEIGHT_TOLERANCE)
    return {"max_error": figures["max_error"], "max_error_of_weights": after["max_error"]}


def measure_training(settings: Settings, with_update: bool) -> Figures:
    """Measure passes in bfloat16 over a bin, or a step of one bin with its update."""
    lengths = TINY_LENGTHS if settings.is_tiny else LENGTHS
    config = build_config(settings)
    learner = build_learner(draw_model(settings, config, torch.float32), torch.bfloat16)
    bin = draw_bin(config, lengths)

    def run() -> None:
        gradient, stats = learner.compute_gradient(bin)
        if with_update:
            learner.apply_gradient(gradient, stats.tokens, 0.01)

    run()
    synchronize(settings)
    if settings.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = measure_s(settings, run)
    operations = count_operations(config, lengths)
    found: Figures = {
        "tokens_per_s": sum(lengths) / seconds,
        "tflops": operations / seconds / 1e12,
        "parameters": config.num_parameters,
    }
    if peaks := get_peaks(settings):
        found["mfu"] = operations / seconds / peaks.flops
    if settings.device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


CASES = {
    "equal_gradient": compare_gradients,
    "passes": lambda settings: measure_training(settings, with_update=False),
    "step": lambda settings: measure_training(settings, with_update=True),
}
