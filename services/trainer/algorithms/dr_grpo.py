"""Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): GRPO without its two biases.

Advantages keep the scale of the rewards, so that hard and easy prompts weigh alike. A token's loss
is divided by a constant instead of its trajectory's length, so that long failures are not favoured.
"""

from __future__ import annotations

from meshrl.services.trainer.algorithms.hooks import Algorithm
from meshrl.services.trainer.losses.group_advantages import center_rewards
from meshrl.services.trainer.losses.surrogate import PPO_CLIPS, make_surrogate_loss

ALGORITHM = Algorithm(center_rewards, make_surrogate_loss(PPO_CLIPS), aggregation="constant")
