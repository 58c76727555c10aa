"""Number of successive rounds of which one process sums the gradients."""

from __future__ import annotations

import math

MAX_TRANSFER_SHARE = 0.25  # of the time in which a hybrid computes a block


def choose_block_rounds(
    rounds: int, bins_per_round: int, hybrids: int, transfer_s: float, round_s: float
) -> int:
    """Choose as many rounds as hide the transfer of their sum, but at most a hybrid's share.

    A hybrid then sends one sum in a step of large models, and few in a step of small ones, which
    are shared more evenly.

    Args:
        rounds: Expected rounds of the step. The core computes the bins of a round in parallel, and
            a hybrid one after another.
        transfer_s: Time from the last round of a hybrid's sum until the ranks have it.
        round_s: Time in which a hybrid computes a round.
    """
    if not hybrids or transfer_s <= 0 or round_s <= 0:
        return 1
    fair_share = rounds // (bins_per_round + hybrids)
    return max(1, min(fair_share, math.ceil(transfer_s / (MAX_TRANSFER_SHARE * round_s))))
