"""Warm start: supervised steps on a job's demonstrations, and the cache of its result."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshrl.common.base.digest import Hasher
from meshrl.common.base.errors import ConfigError, CorruptData
from meshrl.common.base.random import Random
from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig, WarmStartConfig
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.services.trainer.bins.packing import TrainingSequence, make_bins
from meshrl.services.trainer.learner.learner import Learner

Segments = list[tuple[str, bool]]  # text, and True if the model writes it; the prompt comes first
Demonstrate = Callable[[Random, float], Segments]  # a generator, progress from 0 to 1
Progress = Callable[[int, float], None]  # steps done, loss per token

FORMAT = 3  # part of the cache's key: increase it when the same job would learn something else
DIGEST_KEY = "blake3"  # of the tensors, in the cache file's metadata
MAX_REJECTED = 10_000  # consecutive unusable demonstrations before an error


@dataclass(frozen=True)
class DemonstrationLimits:
    """Limits of usable demonstrations: no prompt of `held_out`, at most `max_tokens` tokens.

    Those of a `chat` already contain all text of its format.
    """

    held_out: Collection[str]
    max_tokens: int
    chat: bool = False


def run_steps(
    learner: Learner,
    demonstrate: Demonstrate,
    tokenizer: Tokenizer,
    config: WarmStartConfig,
    limits: DemonstrationLimits,
    *,
    seed: int,
    bin_tokens: int,
    progress: Progress = lambda steps, loss: None,
) -> Iterator[None]:
    """Run a warm start step by step; nothing is computed between two steps.

    It trains the learner's model in place and leaves the learner's own optimizer unchanged. The
    result depends on the arguments alone. Demonstrations beyond the limits are skipped and others
    drawn. Demonstrations without a chat begin as the prompts of rollouts do.
    """
    random = Random(seed).child("warm start")
    rates = OptimizerConfig(muon_lr=config.muon_lr, adamw_lr=config.adamw_lr)
    teacher = Learner(learner.model, rates, AlgorithmConfig(name="sft"))
    for step in range(config.steps):
        done = step / config.steps
        batch = [
            draw_demonstration(demonstrate, tokenizer, random, done, limits)
            for _ in range(config.batch)
        ]
        bins = make_bins(batch, bin_tokens)
        gradient, stats = teacher.compute_round_gradient(bins)
        teacher.apply_gradient(gradient, stats.tokens, compute_lr_factor(step, config))
        progress(step + 1, stats.loss_sum / stats.tokens)
        yield
    learner.load_weights(learner.get_weights())  # its own passes and critic begin with them


def compute_lr_factor(step: int, config: WarmStartConfig) -> float:
    """Return the share of the learning rate at `step`: warm-up, constant, then linear to 0."""
    falling = (config.steps - step) / max(config.decay * config.steps, 1.0)
    return min(1.0, (step + 1) / max(config.warmup_steps, 1), falling)


def draw_demonstration(
    demonstrate: Demonstrate,
    tokenizer: Tokenizer,
    random: Random,
    progress: float,
    limits: DemonstrationLimits,
) -> TrainingSequence:
    """Draw the next usable demonstration; raise ConfigError if there is none."""
    for _ in range(MAX_REJECTED):
        segments = demonstrate(random, progress)
        if segments[0][0] in limits.held_out:
            continue
        sequence = encode_segments(segments, tokenizer, limits.chat)
        if 2 <= len(sequence.tokens) <= limits.max_tokens and sequence.loss_mask[1:].any():
            return sequence
    raise ConfigError(
        f"{MAX_REJECTED} demonstrations in a row are held out, too long or without model text",
        where="warm_start.demonstrations",
        fix=f"Return other prompts, of at most {limits.max_tokens} tokens",
    )


def is_demonstration(value: object) -> bool:
    """Return True if a job's function returned text segments, each with its author flag."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(piece, list | tuple) and len(piece) == 2 for piece in value)
        and all(isinstance(text, str) for text, _ in value)
    )


def encode_segments(
    segments: Segments, tokenizer: Tokenizer, chat: bool = False
) -> TrainingSequence:
    """Encode each segment by itself, as a rollout appends it: tokens never span two segments."""
    first, *others = [text for text, _ in segments]
    pieces = [tokenizer.encode(first) if chat else tokenizer.encode_start(first)]
    pieces += [tokenizer.encode(text) for text in others]
    own = [by_model for _, by_model in segments]
    tokens = np.array([token for piece in pieces for token in piece], np.int32)
    mask = np.repeat(np.array(own, np.bool_), [len(piece) for piece in pieces])
    nothing = np.zeros(len(tokens), np.float32)
    return TrainingSequence(tokens, nothing, mask, np.zeros(len(tokens), np.int32))


def build_cache_path(directory: str, document: Mapping[str, Any], sources: Iterable[bytes]) -> Path:
    """Return the cache path of a warm start, named by the digest of all that it depends on.

    `document` has the relevant parts of the job (model, warm start, seed, limits). `sources` is the
    content of the files that its demonstrations come from.
    """
    key = Hasher(json.dumps([FORMAT, torch.__version__, document], sort_keys=True).encode())
    for source in sources:
        key.update(len(source).to_bytes(8, "little") + source)
    return Path(directory).expanduser() / f"warm-start-{key.hexdigest()}.safetensors"


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the weights atomically, with a digest of their content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(contiguous, unfinished, metadata={DIGEST_KEY: _compute_digest(contiguous)})
    os.replace(unfinished, path)


def load_weights(path: Path) -> dict[str, Tensor] | None:
    """Load cached weights; None if there are none, CorruptData if the digest differs."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            expected_digest = (file.metadata() or {}).get(DIGEST_KEY)
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CorruptData(f"a saved warm start cannot be read: {error}", where=str(path)) from error
    if _compute_digest(found) != expected_digest:
        raise CorruptData("a saved warm start does not match its digest", where=str(path))
    return found


def _compute_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the digest of tensors with their names, dtypes and shapes."""
    hashed = Hasher()
    for name, tensor in sorted(weights.items()):
        hashed.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        hashed.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()
