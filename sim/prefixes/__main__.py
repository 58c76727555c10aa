"""Speed-up of loading a prefix while computing it, on the curves of Cake (arXiv 2410.03065).

Usage:

    python -m meshrl.sim.prefixes

Its Fig. 4 gives the time of a chunk of 512 tokens of LongAlpaca-7B: on an A100 38.8 ms, the 64th
112.0; on an H100 27.4 and 93.5. Keys and values take 512 KiB per token. `x_load` and `x_compute`
are speed-ups over loading or computing alone: in closed form, by the engine's own rules (`events`),
and as published. The last line is JSON.
"""

from __future__ import annotations

import json

from meshrl.sim.prefixes.prefix_model import (
    PrefixCurve,
    bisect_root,
    simulate_events,
    solve_closed_form,
)

TOKEN_BYTES = 512 << 10  # LongAlpaca-7B, 16 bits per item
A100 = PrefixCurve(0.0388, (0.1120 - 0.0388) / 63)
H100 = PrefixCurve(0.0274, (0.0935 - 0.0274) / 63)
GBPS_32 = 4 << 30  # bytes per second: Fig. 4 fits 32 Gbps = 4 GiB/s (62.4 ms for 256 MiB)
GBPS_2 = 2e9 / 8
PUBLISHED_SPEEDUPS = {"x_load": 2.20, "x_compute": 1.94}  # its table 4: 7B, 16K tokens, A100
PUBLISHED_LOAD_REDUCTION = 0.946  # of the time to the first token, over loading alone
PUBLISHED_COMPUTE_REDUCTION = 0.681  # over computing alone; its setting is not published


def compute_speedups(curve: PrefixCurve, bytes_per_s: float, tokens: int) -> dict[str, float]:
    load_s = TOKEN_BYTES / bytes_per_s
    single_s = {"load": load_s * tokens, "compute": curve.predict_compute_s(0, tokens)}
    found: dict[str, float] = {}
    for kind, model in (("closed", solve_closed_form), ("events", simulate_events)):
        solution = model(curve, load_s, tokens)
        found |= {
            f"{kind}_x_{name}": round(s / solution.seconds, 3) for name, s in single_s.items()
        }
        found[f"{kind}_met_at"] = round(solution.computed_tokens / tokens, 3)
    return found


def main() -> None:
    tokens = 16 << 10
    settings: dict[str, dict[str, float]] = {}
    print(f"{'':24}{'over load':>24}{'over compute':>24}")
    for name, curve, rate, length in (
        ("A100, 16K, 32 Gbps", A100, GBPS_32, tokens),
        ("A100, 32K, 32 Gbps", A100, GBPS_32, 2 * tokens),
        ("H100, 32K, 32 Gbps", H100, GBPS_32, 2 * tokens),
        ("A100, 16K, 2 Gbps", A100, GBPS_2, tokens),
    ):
        found = settings[name] = compute_speedups(curve, rate, length)
        load, compute = (
            f"{found[f'closed_x_{k}']:.2f}, events {found[f'events_x_{k}']:.2f}"
            for k in ("load", "compute")
        )
        print(f"{name:24}{load:>24}{compute:>24}")
    ours, slow = settings["A100, 16K, 32 Gbps"], settings["A100, 16K, 2 Gbps"]
    figures = {
        f"{key}_off": ours[f"events_{key}"] / value - 1 for key, value in PUBLISHED_SPEEDUPS.items()
    }
    reduction = 1 - 1 / slow["events_x_load"]
    figures["reduction_load_2gbps"] = reduction
    figures["reduction_load_2gbps_off"] = reduction / PUBLISHED_LOAD_REDUCTION - 1
    compute_s = A100.predict_compute_s(0, tokens)

    def above(bytes_per_s: float) -> float:
        solution = solve_closed_form(A100, TOKEN_BYTES / bytes_per_s, tokens)
        return solution.seconds / compute_s - (1 - PUBLISHED_COMPUTE_REDUCTION)

    figures["reduction_compute_0.681_at_gbps"] = bisect_root(1e8, 1e12, above) * 8 / 1e9
    print(
        f"the source: {PUBLISHED_SPEEDUPS['x_load']} over loading, "
        f"{PUBLISHED_SPEEDUPS['x_compute']} over computing at 16K"
    )
    print(json.dumps(settings | {key: round(value, 4) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
