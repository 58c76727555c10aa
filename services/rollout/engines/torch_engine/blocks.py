"""Blocks of the paged cache: who holds which, and which prefixes can be shared.

A radix tree over blocks of 16 tokens (RadixAttention, arXiv 2312.07104, section 3), kept for one
version of the weights. A block is freed when nobody holds it; the tree is a holder too, and lets go
of what was used longest ago when somebody needs a block. The block behind the last whole one of a
sequence cannot be shared, since its first holder goes on writing, but what it holds can be copied.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BLOCK = 16  # tokens; as kBlock in kernels/csrc/attention.h
ROOT = 0

Tokens = NDArray[np.int64]


class BlockPool:
    """Counts the holders of each block."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.holders = np.zeros(count, np.int64)
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A block with one holder; IndexError when none is free."""
        block = self._free.pop()
        self.holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        self.holders[block] += 1

    def drop(self, block: int) -> None:
        """One holder fewer; the block of nobody is free."""
        self.holders[block] -= 1
        if not self.holders[block]:
            self._free.append(block)


@dataclass(slots=True)
class _Node:
    """A block of a prefix. Its parent knows a whole one by its tokens, a tail by its block."""

    block: int
    parent: int
    tokens: Tokens
    children: dict[bytes, int] = field(default_factory=dict)
    tails: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """What is there of a prefix: whole blocks, and the first `tail` tokens of `copied`."""

    blocks: list[int]
    tail: int = 0
    copied: int = -1

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK + self.tail


class PrefixCache:
    """The radix tree of the version that is loaded."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._nodes: OrderedDict[int, _Node] = OrderedDict()  # longest unused first
        self.clear()

    def clear(self) -> None:
        """Other weights: nothing that is known serves any more."""
        for node in self._nodes.values():
            self._pool.drop(node.block)
        self._last = ROOT  # node ids are never used twice
        self._root = _Node(-1, -1, np.zeros(0, np.int64))
        self._nodes.clear()
        self._tail_at: dict[int, int] = {}  # block -> its node, while it is a tail

    def match(self, tokens: Tokens) -> Match:
        """The longest known prefix of `tokens`."""
        path = self._path(tokens)
        for node in reversed(path):  # parents count as used after their children
            self._nodes.move_to_end(node)
        blocks = [self._nodes[node].block for node in path]
        rest = tokens[len(path) * BLOCK :]
        best, copied = 0, -1
        for block, node in self._node(path[-1] if path else ROOT).tails.items():
            tail = self._nodes[node].tokens
            n = min(len(tail), len(rest))
            same = tail[:n] == rest[:n]
            common = n if same.all() else int(same.argmin())
            if common > best:
                best, copied = common, block
        return Match(blocks, best, copied)

    def insert(self, tokens: Tokens, blocks: NDArray[np.int32]) -> None:
        """Makes `tokens`, which lie in `blocks`, known; a last block that is not full as a tail."""
        path = self._path(tokens)
        whole = len(tokens) // BLOCK
        parent = path[-1] if path else ROOT
        for index in range(len(path), whole):
            self.forget_tail(int(blocks[index]))
            part = tokens[index * BLOCK : (index + 1) * BLOCK]
            node = self._add(int(blocks[index]), parent, part)
            self._node(parent).children[part.tobytes()] = node
            parent = node
        if len(tokens) > whole * BLOCK:
            block = int(blocks[whole])
            self.forget_tail(block)
            node = self._add(block, parent, tokens[whole * BLOCK :])
            self._node(parent).tails[block] = self._tail_at[block] = node

    def forget_tail(self, block: int) -> None:
        """What the block holds is not, or not only, what was known any more."""
        if block in self._tail_at:
            self._remove(self._tail_at[block])

    def evict(self, count: int) -> None:
        """Lets go of up to `count` blocks that nobody else holds, longest unused first."""
        gone = []
        for node, found in self._nodes.items():
            if len(gone) == count:
                break
            leaf = not found.children and not found.tails
            if leaf and self._pool.holders[found.block] == 1:
                gone.append(node)
        for node in gone:
            self._remove(node)

    def evictable(self) -> int:
        """Blocks that only the tree holds; nobody holds what lies behind such a block."""
        blocks = [node.block for node in self._nodes.values()]
        return int((self._pool.holders[blocks] == 1).sum()) if blocks else 0

    def _path(self, tokens: Tokens) -> list[int]:
        path: list[int] = []
        for index in range(len(tokens) // BLOCK):
            key = tokens[index * BLOCK : (index + 1) * BLOCK].tobytes()
            found = self._node(path[-1] if path else ROOT).children.get(key)
            if found is None:
                break
            path.append(found)
        return path

    def _node(self, node: int) -> _Node:
        return self._root if node == ROOT else self._nodes[node]

    def _add(self, block: int, parent: int, tokens: Tokens) -> int:
        self._last += 1
        self._pool.hold(block)
        self._nodes[self._last] = _Node(block, parent, tokens.copy())
        return self._last

    def _remove(self, node: int) -> None:
        gone = self._nodes.pop(node)
        parent = self._node(gone.parent)
        if self._tail_at.pop(gone.block, None) is not None:
            del parent.tails[gone.block]
        else:
            del parent.children[gone.tokens.tobytes()]
        self._pool.drop(gone.block)
