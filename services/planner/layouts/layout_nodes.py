"""Nodes, and what fits into them: a gang's degree is a power of two, and it lies in one node.

Gangs whose sizes divide each other fit into nodes exactly when they fit into the nodes' blocks: the
powers of two that a node's free accelerators are the sum of, with the largest degree as the largest
block (Coffman, Garey and Johnson 1987: bin packing with divisible item sizes). So what is left is
counted by (kind, block), in which nothing but the total matters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LayoutNode:
    """Accelerators of a kind that a gang may be formed of: a host, or a fast network."""

    kind: str
    place: str
    free_accelerators: int


AcceleratorPool = tuple[str, int]  # kind, accelerators of a block
Supply = dict[AcceleratorPool, int]  # accelerators
MAX_BLOCK = 8  # accelerators of a node that a gang has at most


def count_supply(nodes: Sequence[LayoutNode], max_degrees: Mapping[str, int]) -> Supply:
    """The accelerators of nodes by kind and block. `largest` is the largest degree of each kind;
    others than those kinds' are of no use, and left out.
    """
    found: Counter[AcceleratorPool] = Counter()
    for node in nodes:
        if node.kind in max_degrees:
            for block in _split_into_blocks(node.free_accelerators, max_degrees[node.kind]):
                found[node.kind, block] += block
    return dict(found)


def _split_into_blocks(free: int, max_block: int) -> list[int]:
    """The powers of two that a number is the sum of, none above `largest`, which is one."""
    found = [max_block] * (free // max_block)
    return found + [
        1 << bit for bit in range(max_block.bit_length()) if free % max_block & 1 << bit
    ]


def take_accelerators(
    nodes: Sequence[LayoutNode], kind: str, workers: int, unit: int = 1
) -> tuple[tuple[LayoutNode, ...], list[str]] | None:
    """The nodes after so many of their accelerators are taken, in units that lie in one node each,
    and the place of each unit; None when they do not have them. The smallest blocks that hold a
    unit go first: no other choice leaves more room for gangs of any degree.
    """
    free = [node.free_accelerators for node in nodes]
    places: list[str] = []
    blocks = [
        (block, index)
        for index, node in enumerate(nodes)
        if node.kind == kind
        for block in _split_into_blocks(node.free_accelerators, max(unit, MAX_BLOCK))
        if block >= unit
    ]
    for block, index in sorted(blocks):
        taken = min(block, workers)
        free[index] -= taken
        workers -= taken
        places += [nodes[index].place] * (taken // unit)
        if not workers:
            left = (
                replace(node, free_accelerators=n) for node, n in zip(nodes, free, strict=True) if n
            )
            return tuple(left), places
    return None if workers else (tuple(nodes), places)


def place_gangs(nodes: Sequence[LayoutNode], gangs: Sequence[tuple[str, int]]) -> list[str]:
    """The place of each gang of (kind, degree). ValueError when they do not fit."""
    left = list(nodes)
    found = [""] * len(gangs)
    for index in sorted(range(len(gangs)), key=lambda i: -gangs[i][1]):
        kind, degree = gangs[index]
        taken = take_accelerators(left, kind, degree, degree)
        if taken is None:
            raise ValueError(f"no node has {degree} free accelerators of kind {kind}")
        left, found[index] = list(taken[0]), taken[1][0]
    return found
