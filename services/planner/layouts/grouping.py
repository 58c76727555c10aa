"""Trajectories by length: what gangs are allocated by, in as many groups as the search can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

LEAST = 64  # groups; fewer cut lengths too coarsely, see `loadtests/plan.py`
PER_WORKER = 4  # groups, so that gangs of one worker each can have ranges of different widths


@dataclass(frozen=True, slots=True)
class Group:
    """Trajectories of about a length. Sums are exact, however many there are of them."""

    requests: int
    prompts: float  # tokens that are prefilled, of all together
    generated: float  # tokens, of all together
    held: float  # tokens of context, summed over all steps: of one, generated * (prompt + half)
    longest: float  # tokens that one of them generates at most
    longest_context: float  # tokens of prompt and what is generated, of one, at most
    prompt: float = 0.0  # tokens of a prompt at most
    tool_s: float = 0.0  # that one spends in tools and rewards at most

    def __add__(self, other: Group) -> Group:
        return Group(
            self.requests + other.requests,
            self.prompts + other.prompts,
            self.generated + other.generated,
            self.held + other.held,
            max(self.longest, other.longest),
            max(self.longest_context, other.longest_context),
            max(self.prompt, other.prompt),
            max(self.tool_s, other.tool_s),
        )


def alike(requests: int, prompt: float, generated: float, tool_s: float = 0.0) -> Group:
    """So many trajectories with as many tokens each; one of them is a trajectory."""
    held = generated * (prompt + generated / 2)
    return Group(
        requests,
        requests * prompt,
        requests * generated,
        requests * held,
        generated,
        prompt + generated,
        prompt,
        tool_s,
    )


def together(groups: Sequence[Group]) -> Group:
    """All of them as one."""
    return reduce(Group.__add__, groups)


def by_length(groups: Sequence[Group]) -> list[Group]:
    """The groups in the order in which ranges are cut: by what their longest one generates."""
    return sorted(groups, key=lambda group: (group.longest, group.longest_context))


def quantiles(groups: Sequence[Group], count: int) -> list[Group]:
    """So many groups of about as many trajectories each, in order of length. Groups stay whole, so
    that there are fewer where they are few."""
    ordered = by_length(groups)
    total = sum(group.requests for group in ordered)
    found: list[list[Group]] = []
    before, last = 0, -1
    for group in ordered:
        part = before * count // total
        if part != last:
            found.append([])
        found[-1].append(group)
        before, last = before + group.requests, part
    return [together(part) for part in found]


def groups_for(workers: int) -> int:
    """Groups that the search should be given for so many accelerators."""
    return max(LEAST, PER_WORKER * workers)
