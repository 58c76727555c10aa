"""GRPO: the advantage of a trajectory is its reward relative to those of its group.

Advantages follow Shao et al. 2024 (arXiv 2402.03300). The defaults differ from the paper. The loss
is averaged over all tokens of a step, and the upper clip is wider than the lower one, after DAPO
(arXiv 2503.14476). Bad tokens that the policy has moved towards have a bounded loss, after
dual-clip PPO (arXiv 1912.09729). There is no KL term. The paper's own settings: `aggregation =
"sequences"`, `clip_high = 0.2`, `dual_clip = 0`, `kl_coefficient = 0.04`.
"""

from __future__ import annotations

from meshrl.services.trainer.algorithms.hooks import Algorithm
from meshrl.services.trainer.losses.group_advantages import normalize_rewards
from meshrl.services.trainer.losses.surrogate import ClipBounds, make_surrogate_loss

CLIPS = ClipBounds(0.2, 0.28, dual=3.0)


ALGORITHM = Algorithm(normalize_rewards, make_surrogate_loss(CLIPS))
