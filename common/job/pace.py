"""The pace of declared accelerators: how fast they generate and train, so that engines and trainers
can imitate them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.errors import ConfigError
from common.hardware.profiles import Accelerator, declared

# A step that ends later than its pace by more than this share of it counts as late: the host could
# not keep up, and figures of the run are worth less.
LATE = 0.1


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast an accelerator is: decoding is flat up to `plateau` sequences and linear beyond."""

    decode_s: float  # a step with up to `plateau` sequences
    plateau: int
    prefill_tokens_per_s: float

    def step_s(self, batch: int, steps: int, prefilled: int) -> float:
        """Seconds of `steps` decode steps of `batch` sequences, with `prefilled` tokens beside."""
        decode = steps * self.decode_s * max(1.0, batch / self.plateau) if batch else 0.0
        return decode + prefilled / self.prefill_tokens_per_s


@dataclass(frozen=True, slots=True)
class TrainingPace:
    """How fast an accelerator trains."""

    tokens_per_s: float  # of a bin, forward and backward
    update_s: float  # of the optimizer's step

    def train_s(self, tokens: int) -> float:
        """Seconds of the gradient of a bin of so many tokens."""
        return tokens / self.tokens_per_s

    def score_s(self, tokens: int) -> float:
        """Seconds of a bin's scores: the way back costs twice the way forward."""
        return tokens / (3.0 * self.tokens_per_s)


def pace_of(parameters: float, on: Accelerator) -> Pace:
    """The pace of a dense model in 16 bits: a decode step reads every weight once, until the
    arithmetic of the batch takes longer than the reading.
    """
    decode_s = 2 * parameters / on.read_bytes_per_s
    token_s = 2 * parameters / on.busy_flops
    return Pace(decode_s, round(decode_s / token_s), 1 / token_s)


def training_pace_of(parameters: float, on: Accelerator) -> TrainingPace:
    """The pace of training the same model: six operations a parameter and token, and an update
    that reads parameter, gradient and two moments in 32 bits and writes all but the gradient.
    """
    token_s = 6 * parameters / on.train_flops
    return TrainingPace(1 / token_s, 28 * parameters / on.read_bytes_per_s)


# Parameters of the model, and the accelerator that it is on.
_DECLARED = {
    "a100-7b": (7.6e9, declared()["A100"]),
    "a100-14b": (14.8e9, declared()["A100"]),
    "h100-7b": (7.6e9, declared()["H100"]),
    "l40s-7b": (7.6e9, declared()["L40S"]),
}
PROFILES = {name: pace_of(*which) for name, which in _DECLARED.items()}
TRAINING_PROFILES = {name: training_pace_of(*which) for name, which in _DECLARED.items()}


def profile(text: str) -> Pace:
    """A profile by name, or declared as `DECODE_MS/PLATEAU/PREFILL_TOKENS_PER_S`, as in
    `18/32/6000`. ConfigError when it is neither.
    """
    if text in PROFILES:
        return PROFILES[text]
    try:
        decode_ms, plateau, prefill = text.split("/")
        pace = Pace(float(decode_ms) / 1e3, int(plateau), float(prefill))
    except ValueError:
        pace = Pace(0.0, 0, 0.0)
    if not (pace.decode_s > 0 and pace.plateau > 0 and pace.prefill_tokens_per_s > 0):
        raise ConfigError(
            f"there is no pace {text!r}",
            where="rollout.pace",
            fix=f"{', '.join(PROFILES)}, or DECODE_MS/PLATEAU/PREFILL_TOKENS_PER_S",
        )
    return pace


def training_profile(text: str) -> TrainingPace:
    """A profile by name, or declared as `TOKENS_PER_S/UPDATE_MS`, as in `4000/150`. ConfigError
    when it is neither.
    """
    if text in TRAINING_PROFILES:
        return TRAINING_PROFILES[text]
    try:
        tokens, update_ms = text.split("/")
        pace = TrainingPace(float(tokens), float(update_ms) / 1e3)
    except ValueError:
        pace = TrainingPace(0.0, 0.0)
    if not (0 < pace.tokens_per_s < math.inf and 0 <= pace.update_s < math.inf):
        raise ConfigError(
            f"there is no pace {text!r} of training",
            where="training.pace",
            fix=f"{', '.join(TRAINING_PROFILES)}, or TOKENS_PER_S/UPDATE_MS",
        )
    return pace
