"""What a rollout shard offers: a hint that the job's record has changed."""

from __future__ import annotations

from common.api.hint import Look
from common.interface import Cast, Interface


class Rollout(Interface):
    look = Cast(Look)
