"""What the figures are to be."""

from __future__ import annotations

from loadtests.measuring.rounds import Arm

LEAST = {
    "pull_share_of_memcpy": 0.35,  # of stored chunks, which were hashed when they were stored
    "ratio_gloo": 1.0,
    "ratio_http": 1.0,
    "ratio_full_over_delta_3pct": 9.0,
    "ratio_full_over_delta_1pct": 18.0,
    "multi_adapter_ratio": 0.8,
}
MOST = {
    "copies_per_byte": 1.0,
    "fanout_16_over_4": 1.5,
    "fanout_16_s": 3.4,  # twice what 32 MiB take at 20 MB/s
    "source_copies_sent": 2.0,
    "delta_bytes_share_1pct": 0.0135,
    "delta_bytes_share_02pct": 0.0030,
    "logprob_gap": 1e-4,
    "pause_p99_over_bound": 1.0,
}


def missed(answer: Arm) -> list[str]:
    """Figures that are there and not within their bounds, each with its bound."""
    low = [f"{key} {answer[key]} < {least}" for key, least in LEAST.items()
           if key in answer and not answer[key] >= least]  # fmt: skip
    high = [f"{key} {answer[key]} > {most}" for key, most in MOST.items()
            if key in answer and not answer[key] <= most]  # fmt: skip
    return low + high
