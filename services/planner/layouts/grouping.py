"""Trajectories by length: what gangs are allocated by, in as many groups as the search can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

LEAST = 256  # groups: plans take some 1 % longer than of trajectories one by one,
PER_WORKER = 16  # and with so many for each accelerator 0.1 % (`loadtests.plan`)


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Trajectories of about a length. Sums are exact, however many there are of them."""

    requests: int
    prompts: float  # tokens that are prefilled, of all together
    generated: float  # tokens, of all together
    held: float  # tokens of context, summed over all steps: of one, generated * (prompt + half)
    longest: float  # tokens that one of them generates at most
    longest_context: float  # tokens of prompt and what is generated, of one, at most
    prompt: float = 0.0  # tokens of a prompt at most
    tool_s: float = 0.0  # that one spends in tools and rewards at most
    tools_s: float = 0.0  # that all together spend there, and keep their slots

    def __add__(self, other: LengthGroup) -> LengthGroup:
        return LengthGroup(
            self.requests + other.requests,
            self.prompts + other.prompts,
            self.generated + other.generated,
            self.held + other.held,
            max(self.longest, other.longest),
            max(self.longest_context, other.longest_context),
            max(self.prompt, other.prompt),
            max(self.tool_s, other.tool_s),
            self.tools_s + other.tools_s,
        )


def alike(requests: int, prompt: float, generated: float, tool_s: float = 0.0) -> LengthGroup:
    """So many trajectories with as many tokens each; one of them is a trajectory."""
    held = generated * (prompt + generated / 2)
    return LengthGroup(
        requests,
        requests * prompt,
        requests * generated,
        requests * held,
        generated,
        prompt + generated,
        prompt,
        tool_s,
        requests * tool_s,
    )


def together(groups: Sequence[LengthGroup]) -> LengthGroup:
    """All of them as one."""
    return reduce(LengthGroup.__add__, groups)


def by_length(groups: Sequence[LengthGroup]) -> list[LengthGroup]:
    """The groups in the order in which ranges are cut: by what their longest one generates."""
    return sorted(groups, key=lambda group: (group.longest, group.longest_context))


def quantiles(groups: Sequence[LengthGroup], count: int) -> list[LengthGroup]:
    """So many groups in order of length, each of about as many generated tokens: of as many
    trajectories each, the longest would be too many for one gang. Groups that are given stay whole,
    so that there are fewer where they are few.
    """
    ordered = by_length(groups)
    total = sum(group.generated for group in ordered)
    found: list[list[LengthGroup]] = []
    before, last = 0.0, -1
    for group in ordered:
        part = int((before + group.generated / 2) * count / total) if total else 0
        if part != last:
            found.append([])
        found[-1].append(group)
        before, last = before + group.generated, part
    return [together(part) for part in found]


def groups_for(workers: int) -> int:
    """Groups that the search should be given for so many accelerators."""
    return max(LEAST, PER_WORKER * workers)
