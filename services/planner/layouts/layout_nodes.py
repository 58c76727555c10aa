"""Nodes and their capacity for gangs: a gang's degree is a power of two, within one node.

Gangs whose sizes divide each other fit into nodes exactly if they fit into the nodes' blocks.
Blocks are the powers of two that sum to a node's free accelerators, and the largest degree is the
largest block (Coffman, Garey and Johnson 1987: bin packing with divisible item sizes). So the
supply is counted by (kind, block), and only totals matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LayoutNode:
    """Accelerators of a kind that can form a gang: a host, or a fast network."""

    kind: str
    place: str
    free_accelerators: int


AcceleratorPool = tuple[str, int]  # kind, accelerators of a block
Supply = dict[AcceleratorPool, int]  # accelerators
MAX_BLOCK = 8  # maximum accelerators of a gang in a node


def count_supply(nodes: Sequence[LayoutNode], max_degrees: Mapping[str, int]) -> Supply:
    """Count the accelerators of nodes by kind and block. `max_degrees` has the largest degree of
    each kind; other kinds are left out.
    """
    found: Counter[AcceleratorPool] = Counter()
    for node in nodes:
        if node.kind in max_degrees:
            for block in _split_into_blocks(node.free_accelerators, max_degrees[node.kind]):
                found[node.kind, block] += block
    return dict(found)


def _split_into_blocks(free: int, max_block: int) -> list[int]:
    """Split a number into powers of two, at most `max_block`, which is a power of two."""
    found = [max_block] * (free // max_block)
    return found + [
        1 << bit for bit in range(max_block.bit_length()) if free % max_block & 1 << bit
    ]


def take_accelerators(
    nodes: Sequence[LayoutNode], kind: str, workers: int, unit: int = 1
) -> tuple[tuple[LayoutNode, ...], list[str]] | None:
    """Take accelerators of a kind, in units within one node each. Return the remaining nodes and
    the place of each unit; None if they do not suffice. The smallest sufficient blocks are taken
    first, which leaves the most capacity for gangs of any degree.
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
        count = min(block, workers)
        free[index] -= count
        workers -= count
        places += [nodes[index].place] * (count // unit)
        if not workers:
            remaining_nodes = (
                replace(node, free_accelerators=n) for node, n in zip(nodes, free, strict=True) if n
            )
            return tuple(remaining_nodes), places
    return None if workers else (tuple(nodes), places)


def place_gangs(nodes: Sequence[LayoutNode], gangs: Sequence[tuple[str, int]]) -> list[str]:
    """Return the place of each gang of (kind, degree). Raise ValueError if they do not fit."""
    remaining_nodes = list(nodes)
    found = [""] * len(gangs)
    for index in sorted(range(len(gangs)), key=lambda i: -gangs[i][1]):
        kind, degree = gangs[index]
        allocation = take_accelerators(remaining_nodes, kind, degree, degree)
        if allocation is None:
            raise ValueError(f"no node has {degree} free accelerators of kind {kind}")
        remaining_nodes, found[index] = list(allocation[0]), allocation[1][0]
    return found
