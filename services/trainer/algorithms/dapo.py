"""DAPO (Yu et al. 2025, arXiv 2503.14476): GRPO with four changes.

The upper clip is wider than the lower one, so that unlikely tokens can rise. The loss is averaged
over tokens, so that long trajectories weigh by their length. Groups whose rewards are all equal are
replaced by others (dynamic sampling). Rewards fall softly before the length limit.
"""

from __future__ import annotations

from meshrl.services.trainer.algorithms.hooks import Algorithm
from meshrl.services.trainer.losses.group_advantages import normalize_rewards
from meshrl.services.trainer.losses.surrogate import ClipBounds, make_surrogate_loss

CLIPS = ClipBounds(0.2, 0.28)


# The paper punishes the last 4,096 of 20,480 tokens.
ALGORITHM = Algorithm(
    normalize_rewards, make_surrogate_loss(CLIPS), always_refills=True, overlong_share=0.2
)
