"""The pace of declared accelerators: how fast they generate, so that engines can imitate them."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError

BUSY_SHARE = 0.55  # share of peak arithmetic that prefill reaches,
READ_SHARE = 0.85  # share of peak bandwidth that decoding reaches (Libra's cost model, model.py)


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


def pace_of(parameters: float, bytes_per_s: float, flops: float) -> Pace:
    """The pace of a dense model in 16 bits: a decode step reads every weight once, until the
    arithmetic of the batch takes longer than the reading.
    """
    decode_s = 2 * parameters / (bytes_per_s * READ_SHARE)
    token_s = 2 * parameters / (flops * BUSY_SHARE)
    return Pace(decode_s, round(decode_s / token_s), 1 / token_s)


# Peak bandwidth and dense 16-bit arithmetic as their makers declare them.
PROFILES = {
    "a100-7b": pace_of(7.6e9, 2.04e12, 312e12),
    "a100-14b": pace_of(14.8e9, 2.04e12, 312e12),
    "h100-7b": pace_of(7.6e9, 3.35e12, 989e12),
    "l40s-7b": pace_of(7.6e9, 0.864e12, 362e12),
}


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
