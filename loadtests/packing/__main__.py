"""Benchmark of packing without padding: plans of a step beside other planners, and passes beside
padded ones.

Usage:

    OMP_NUM_THREADS=1 python -m loadtests.packing

Plans: 4,096 sequences of lognormal length (median 1,000, at most 16,384), bins of 32,768 tokens, on
1, 2, 4 and 8 ranks that wait for each other after every bin. Costs are of a decoder whose attention
equals its matrices at 32,768 tokens, and a hundredth of a bin for its dispatch. Of each planner:

- `fill_*`: tokens over what the bins hold, padding included; `makespan_*`: the sum over rounds of
  the dearest bin, over what it would be if all were level and bins free;
- `lockstep_ratio_best_peer`: ours over the best of the others, the worst of the four numbers of
  ranks; `plan_ms_4096`: CPU milliseconds of our slowest plan, the median of rounds;
- `stream_ratio`: the same sequences in groups of 16 as they come, over all at once, the worst.

Passes: the example calculator's model and budget, 256 sequences of lognormal length (median 40, at
most 320), in CPU-seconds, packed and padded in turn in one process. Padded: as many minibatches as
there are bins, of equal count in the order of arrival, each padded to its longest, one causal
attention without a mask, logits only where a loss is.

- `packed_speedup`: padded over packed, the median of rounds; `padding_bound`: padded over real
  tokens; `packed_share_of_bound`; `loss_difference` and `gradient_difference`: relative.
"""

from __future__ import annotations

import torch

from loadtests.measuring.entry import options, report
from loadtests.packing.comparing import SEQUENCES, TRAINED, passes, plans


def main() -> None:
    parser = options(
        __doc__,
        rounds=9,
        seed=0,
        sequences=(SEQUENCES, "that are planned"),
        trained=(TRAINED, "sequences of the passes"),
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = plans(chosen.seed, chosen.sequences)
    found |= passes(chosen.rounds, chosen.seed, chosen.trained)
    report(found)


if __name__ == "__main__":
    main()
