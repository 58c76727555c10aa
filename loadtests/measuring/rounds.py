"""Rounds of arms in rotating order, and figures of their results.

The rotation spreads changes of the machine over all arms equally.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from loadtests.measuring.entry import print_progress

P = TypeVar("P")
T = TypeVar("T")
Arm = dict[str, Any]


def rotated(arms: Sequence[T], number: int) -> list[T]:
    """Return the arms in the order of a round: each begins with another."""
    turn = number % len(arms)
    return [*arms[turn:], *arms[:turn]]


def turns(arms: Sequence[T], rounds: int) -> Iterator[T]:
    """Yield the arms of all rounds."""
    for number in range(rounds):
        yield from rotated(arms, number)


async def measured(
    runs: Mapping[str, Callable[[P], Awaitable[Arm]]], plan: P, names: Sequence[str], rounds: int
) -> dict[str, list[Arm]]:
    """Run each round of each arm; return the results, which are also printed to stderr."""
    found: dict[str, list[Arm]] = {name: [] for name in names}
    for name in turns(names, rounds):
        arm = await runs[name](plan)
        print_progress({"arm": name, "round": len(found[name]), **arm})
        found[name].append(arm)
    return found


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Return the ratios of pairs, as they were measured after each other."""
    return [a / b for a, b in zip(over, under, strict=True)]


def ratio(over: Sequence[float], under: Sequence[float], digits: int = 3) -> float:
    """Return the median of the pairs' ratios."""
    return round(statistics.median(ratios(over, under)), digits)


def median_of(arms: Sequence[Arm], key: str, digits: int = 4) -> float:
    """Return the median of a figure over arms."""
    return round(float(statistics.median(arm[key] for arm in arms)), digits)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(name: str, values: Sequence[float], digits: int = 4) -> Arm:
    """Return the median of values, its quartiles as `_low` and `_high`, and their count as `_n`."""
    low, middle, high = quartiles(values)
    found = {name: middle, f"{name}_low": low, f"{name}_high": high}
    return {key: round(value, digits) for key, value in found.items()} | {f"{name}_n": len(values)}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the others falls."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
