"""What the planner offers: a hint to look at the state again."""

from __future__ import annotations

from common.api.hint import Look
from common.interface import Cast, Interface


class Planner(Interface):
    look = Cast(Look)
