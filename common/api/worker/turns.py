"""What a resident asks of the keeper of its gang's turns, which is rank 0's worker; and what that
one asks of the gang's other workers.
"""

from __future__ import annotations

from common.base.encoding.messages import message

TURN_S = 600.0  # who waits longer for its turn asks again, and keeps its place


@message
class TakeTurn:
    """A resident wants to compute on its gang's accelerators. It is answered when it may."""

    resident: str
    generation: int
    process: str  # the name of the process that asks,
    incarnation: str  # and which start of it that is
    ticket: int  # counts its requests: the same one again is the same request
    function: str  # generate | score | train_step | sync | save
    estimate_s: float  # how long it will take, as far as the resident knows; 0: it does not
    needs: list[str]  # tensors that must be on the accelerator, by kind: parameters, gradients,
    # optimizer, cache


@message
class GangTurn:
    """A turn that was granted: a process that still has it after `lasts_s` is killed."""

    ticket: int
    lasts_s: float


@message
class GiveBack:
    """A turn is over, or not wanted any more, and with it all that this process had before it."""

    resident: str
    incarnation: str
    ticket: int


@message
class GivenBack:
    """The answer to GiveBack."""


@message
class EndResident:
    """A resident's processes are to be killed at once, whatever they do."""

    resident: str
    generation: int
    why: str


@message
class ResidentEnded:
    """The answer to EndResident: there is no such process here any more."""
