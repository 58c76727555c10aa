"""Emulated speeds of engines and trainers: how fast a declared accelerator generates and trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.accelerators import Accelerator, load_accelerators

# If several workers share a model, each layer gathers their parts twice, after attention and after
# its MLP. Each takes this time for any number of workers, also for a chunk of prefill (Libra's cost
# model, model.py).
COLLECTIVE_S = 8e-6
CHUNK_TOKENS = 1024
# Time of a step's collectives as a share of one worker's decode step, if the number of layers is
# unknown: the profiles below have 0.02 to 0.08.
COLLECTIVES_SHARE = 0.05

# A step that ends later than its emulated time by more than this share counts as late: the host was
# too slow, and the run's figures are less reliable.
LATE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class EmulatedEngineSpeed:
    """Engine speed of an emulated accelerator.

    Decoding time is flat up to `plateau_batch` sequences and linear beyond.
    """

    decode_step_s: float  # a step with up to `plateau` sequences
    plateau_batch: int
    prefill_tokens_per_s: float
    layers: int = 0  # of the model; 0: unknown
    collectives_s: float = 0.0  # of a decode step, for any batch size

    def with_tensor_parallel(self, degree: int) -> EmulatedEngineSpeed:
        """Return the speed of `degree` accelerators that share a model.

        Each reads its part of the weights and does its part of the arithmetic, and all wait for two
        collectives a layer. Libra's released formula divides the bytes read by the degree twice;
        this one divides once.
        """
        if degree == 1:
            return self
        known_s = 2 * self.layers * COLLECTIVE_S
        gathers_s = known_s if self.layers else COLLECTIVES_SHARE * self.decode_step_s
        token_s = 1 / (self.prefill_tokens_per_s * degree) + gathers_s / CHUNK_TOKENS
        return replace(
            self,
            decode_step_s=self.decode_step_s / degree,
            prefill_tokens_per_s=1 / token_s,
            collectives_s=gathers_s,
        )

    def compute_step_s(self, batch: int, steps: int, prefill_tokens: int) -> float:
        """Return the seconds of `steps` decode steps of `batch` sequences with `prefill_tokens`
        beside.
        """
        computes_s = self.decode_step_s * max(1.0, batch / self.plateau_batch)
        decode = steps * (computes_s + self.collectives_s) if batch else 0.0
        return decode + prefill_tokens / self.prefill_tokens_per_s


@dataclass(frozen=True, slots=True)
class EmulatedTrainingSpeed:
    """Training speed of an emulated accelerator."""

    tokens_per_s: float  # of a bin, forward and backward
    update_s: float  # of the optimizer's step

    def compute_gradient_s(self, tokens: int) -> float:
        """Return the seconds of the gradient of a bin of `tokens` tokens."""
        return tokens / self.tokens_per_s

    def compute_score_s(self, tokens: int) -> float:
        """Return the seconds of a bin's scores: a backward pass costs twice a forward pass."""
        return tokens / (3.0 * self.tokens_per_s)


def derive_engine_speed(
    parameters: float, accelerator: Accelerator, layers: int = 0
) -> EmulatedEngineSpeed:
    """Return the engine speed of a dense model in 16 bits.

    A decode step reads every weight once, until the arithmetic of the batch takes longer than the
    reading.
    """
    decode_s = 2 * parameters / accelerator.read_bytes_per_s
    token_s = 2 * parameters / accelerator.prefill_flops_per_s
    return EmulatedEngineSpeed(decode_s, round(decode_s / token_s), 1 / token_s, layers)


def derive_training_speed(parameters: float, accelerator: Accelerator) -> EmulatedTrainingSpeed:
    """Return the training speed of a dense model.

    A token takes six operations a parameter. An update reads parameter, gradient and two moments in
    32 bits and writes all but the gradient.
    """
    token_s = 6 * parameters / accelerator.training_flops_per_s
    return EmulatedTrainingSpeed(1 / token_s, 28 * parameters / accelerator.read_bytes_per_s)


# Parameters of the model, and its accelerator. The numbers of layers are those of Qwen2.5-7B and
# Qwen3-14B, which have as many parameters.
_PROFILE_MODELS = {
    "a100-7b": (7.6e9, load_accelerators()["A100"]),
    "a100-14b": (14.8e9, load_accelerators()["A100"]),
    "h100-7b": (7.6e9, load_accelerators()["H100"]),
    "l40s-7b": (7.6e9, load_accelerators()["L40S"]),
}
_LAYERS = {"7b": 28, "14b": 40}
ENGINE_PROFILES = {
    name: derive_engine_speed(*which, _LAYERS[name.rpartition("-")[2]])
    for name, which in _PROFILE_MODELS.items()
}
TRAINING_PROFILES = {name: derive_training_speed(*which) for name, which in _PROFILE_MODELS.items()}


def parse_engine_speed(text: str) -> EmulatedEngineSpeed:
    """Return a profile by name, or one declared as `DECODE_MS/PLATEAU/PREFILL_TOKENS_PER_S`.

    An example is `18/32/6000`. ConfigError for any other text.
    """
    if text in ENGINE_PROFILES:
        return ENGINE_PROFILES[text]
    try:
        decode_ms, plateau, prefill = text.split("/")
        pace = EmulatedEngineSpeed(float(decode_ms) / 1e3, int(plateau), float(prefill))
    except ValueError:
        pace = EmulatedEngineSpeed(0.0, 0, 0.0)
    if not (pace.decode_step_s > 0 and pace.plateau_batch > 0 and pace.prefill_tokens_per_s > 0):
        raise ConfigError(
            f"there is no emulated engine speed {text!r}",
            where="rollout.emulate",
            fix=f"Use one of {', '.join(ENGINE_PROFILES)}, or "
            "DECODE_MS/PLATEAU/PREFILL_TOKENS_PER_S",
        )
    return pace


@dataclass(frozen=True, slots=True)
class EmulationScale:
    """Scale of the declared speed of each rank's accelerator in a mixture."""

    time_scale: float  # real seconds for each declared second
    token_scale: float = 1.0  # declared tokens for each real token


def parse_emulation_scale(text: str) -> EmulationScale | None:
    """Return the scale that `declared/SCALE` or `declared/SCALE/TOKENS` describes.

    None for any other text. ConfigError if the numbers are not positive.
    """
    name, *numbers = text.split("/")
    if name != "declared":
        return None
    try:
        found = EmulationScale(*map(float, numbers))
    except (TypeError, ValueError):
        found = EmulationScale(0.0)
    if not (0 < found.time_scale < math.inf and 0 < found.token_scale < math.inf):
        raise ConfigError(
            f"there is no emulated training speed {text!r}",
            where="training.emulate",
            fix="Use declared/SCALE, with real seconds for each declared second, such as "
            "declared/300, or declared/SCALE/TOKENS, with declared tokens for each real "
            "token",
        )
    return found


def parse_training_emulation(text: str) -> EmulatedTrainingSpeed | EmulationScale:
    """Return the training speed or the scale that `training.emulate` describes; ConfigError for
    neither.
    """
    return parse_emulation_scale(text) or parse_training_speed(text)


def parse_training_speed(text: str) -> EmulatedTrainingSpeed:
    """Return a profile by name, or one declared as `TOKENS_PER_S/UPDATE_MS`, as in `4000/150`.

    ConfigError for any other text.
    """
    if text in TRAINING_PROFILES:
        return TRAINING_PROFILES[text]
    try:
        tokens, update_ms = text.split("/")
        pace = EmulatedTrainingSpeed(float(tokens), float(update_ms) / 1e3)
    except ValueError:
        pace = EmulatedTrainingSpeed(0.0, 0.0)
    if not (0 < pace.tokens_per_s < math.inf and 0 <= pace.update_s < math.inf):
        raise ConfigError(
            f"there is no emulated training speed {text!r}",
            where="training.emulate",
            fix=f"Use one of {', '.join(TRAINING_PROFILES)}, TOKENS_PER_S/UPDATE_MS, or "
            "declared/SCALE for the ranks of a mixture of experts",
        )
    return pace
