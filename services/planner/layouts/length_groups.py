"""Trajectories by length: what gangs are allocated by, in as many groups as the search can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

MIN_GROUPS = 256  # groups: plans take some 1 % longer than of trajectories one by one,
GROUPS_PER_WORKER = 16  # and with so many for each accelerator 0.1 % (`loadtests.plan`)


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Trajectories of about a length. Sums are exact, however many there are of them."""

    requests: int
    prompt_tokens: float  # tokens that are prefilled, of all together
    generated_tokens: float  # tokens, of all together
    context_token_steps: (
        float  # tokens of context, summed over all steps: of one, generated * (prompt + half)
    )
    max_generated_tokens: float  # tokens that one of them generates at most
    max_context_tokens: float  # tokens of prompt and what is generated, of one, at most
    max_prompt_tokens: float = 0.0  # tokens of a prompt at most
    max_tool_s: float = 0.0  # that one spends in tools and rewards at most
    total_tool_s: float = 0.0  # that all together spend there, and keep their slots

    def __add__(self, other: LengthGroup) -> LengthGroup:
        return LengthGroup(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.generated_tokens + other.generated_tokens,
            self.context_token_steps + other.context_token_steps,
            max(self.max_generated_tokens, other.max_generated_tokens),
            max(self.max_context_tokens, other.max_context_tokens),
            max(self.max_prompt_tokens, other.max_prompt_tokens),
            max(self.max_tool_s, other.max_tool_s),
            self.total_tool_s + other.total_tool_s,
        )


def make_uniform_group(
    requests: int, prompt_tokens: float, generated_tokens: float, tool_s: float = 0.0
) -> LengthGroup:
    """So many trajectories with as many tokens each; one of them is a trajectory."""
    held = generated_tokens * (prompt_tokens + generated_tokens / 2)
    return LengthGroup(
        requests,
        requests * prompt_tokens,
        requests * generated_tokens,
        requests * held,
        generated_tokens,
        prompt_tokens + generated_tokens,
        prompt_tokens,
        tool_s,
        requests * tool_s,
    )


def merge_groups(groups: Sequence[LengthGroup]) -> LengthGroup:
    """All of them as one."""
    return reduce(LengthGroup.__add__, groups)


def sort_by_length(groups: Sequence[LengthGroup]) -> list[LengthGroup]:
    """The groups in the order in which ranges are cut: by what their longest one generates."""
    return sorted(groups, key=lambda group: (group.max_generated_tokens, group.max_context_tokens))


def group_by_quantiles(groups: Sequence[LengthGroup], count: int) -> list[LengthGroup]:
    """So many groups in order of length, each of about as many generated tokens: of as many
    trajectories each, the longest would be too many for one gang. Groups that are given stay whole,
    so that there are fewer where they are few.
    """
    ordered = sort_by_length(groups)
    total = sum(group.generated_tokens for group in ordered)
    found: list[list[LengthGroup]] = []
    before, last = 0.0, -1
    for group in ordered:
        part = int((before + group.generated_tokens / 2) * count / total) if total else 0
        if part != last:
            found.append([])
        found[-1].append(group)
        before, last = before + group.generated_tokens, part
    return [merge_groups(part) for part in found]


def choose_group_count(workers: int) -> int:
    """Groups that the search should be given for so many accelerators."""
    return max(MIN_GROUPS, GROUPS_PER_WORKER * workers)
