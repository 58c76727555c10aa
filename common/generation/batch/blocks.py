"""The blocks of the paged cache: who holds each, and which prefixes requests can share.

A radix tree over blocks of 16 tokens (RadixAttention, arXiv 2312.07104, section 3), with a root for
each set of weights that computes here: the base, and the base with each adapter. A block is freed
when nobody holds it; the tree is a holder too, and lets go of what was used longest ago when
somebody needs a block. The block behind the last whole one of a sequence cannot be shared, since
its first holder goes on writing, but what it holds can be copied.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BLOCK = 16  # tokens; as kBlock in kernels/csrc/attention.h

TokenIds = NDArray[np.int64]


def blocks_of(tokens: int) -> int:
    """The number of blocks that so many tokens take."""
    return -(-tokens // BLOCK)


class BlockPool:
    """Counts the holders of each block."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.holders = np.zeros(count, np.int64)
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """The number of blocks that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A block with one holder; IndexError when none is free."""
        block = self._free.pop()
        self.holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Counts one more holder of a block."""
        self.holders[block] += 1

    def drop(self, block: int) -> None:
        """Counts one holder fewer; a block without holders is free."""
        self.holders[block] -= 1
        if not self.holders[block]:
            self._free.append(block)


@dataclass(slots=True)
class _PrefixNode:
    """A block of a prefix; its parent knows it by its tokens once it is whole."""

    block: int
    parent: int
    tokens: TokenIds
    children: dict[bytes, int] = field(default_factory=dict)
    tails: dict[int, int] = field(default_factory=dict)  # block -> node, of blocks that were begun


@dataclass(frozen=True, slots=True)
class Match:
    """The known part of a prefix: whole blocks, and the first `tail` tokens of block `copied`."""

    blocks: list[int]
    tail: int = 0
    copied: int = -1

    @property
    def tokens(self) -> int:
        """The number of tokens whose keys and values are found."""
        return len(self.blocks) * BLOCK + self.tail


class PrefixCache:
    """The radix tree of known prefixes. `weights` is the number of those that computed them: keys
    and values of others are not theirs.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._nodes: OrderedDict[int, _PrefixNode] = OrderedDict()  # longest unused first
        self.clear()

    def clear(self) -> None:
        """Forgets all prefixes, because there are other weights."""
        for node in self._nodes.values():
            self._pool.drop(node.block)
        self._last = 0  # node ids are never used twice
        self._roots: dict[int, _PrefixNode] = {}  # by id; those of nodes are above 0
        self._nodes.clear()
        self._tail_at: dict[int, int] = {}  # block -> its node, while it is a tail

    @property
    def blocks(self) -> int:
        """The number of blocks that the tree holds."""
        return len(self._nodes)

    def match(self, tokens: TokenIds, weights: int = 0) -> Match:
        """The longest known prefix of `tokens`."""
        path = self._path(tokens, weights)
        for node in reversed(path):  # parents count as used after their children
            self._nodes.move_to_end(node)
        blocks = [self._nodes[node].block for node in path]
        tail, copied = self._tail(path[-1] if path else _root(weights), tokens[len(path) * BLOCK :])
        return Match(blocks, tail, copied)

    def insert(
        self, tokens: TokenIds, blocks: NDArray[np.int32], tail: bool, weights: int = 0
    ) -> None:
        """Makes `tokens`, which lie in `blocks`, known; `tail`: a last block that is not full, too.

        Blocks that the tree has already take the place of their like in `blocks`, so that whoever
        holds a block of the tree holds all that lie before it. A tail stays known when its block
        fills up, as long as the tree holds that.
        """
        path = self._path(tokens, weights)
        for index, node in enumerate(path):
            ours, theirs = self._nodes[node].block, int(blocks[index])
            if ours != theirs:
                self._pool.hold(ours)
                self._pool.drop(theirs)
                blocks[index] = ours
        whole = len(tokens) // BLOCK
        parent = path[-1] if path else _root(weights)
        for index in range(len(path), whole):
            part = tokens[index * BLOCK : (index + 1) * BLOCK].copy()
            block = int(blocks[index])
            node = self._tail_at.pop(block, 0) or self._add(block, parent, part)
            self._nodes[node].tokens = part
            self._node(parent).children[part.tobytes()] = node
            parent = node
        rest = tokens[whole * BLOCK :]
        if not tail or self._tail(parent, rest)[0] == len(rest):
            return
        block = int(blocks[whole])
        self.forget_tail(block)
        self._tail_at[block] = self._add(block, parent, rest.copy())
        self._node(parent).tails[block] = self._tail_at[block]

    def forget_tail(self, block: int) -> None:
        """Forgets a block that is not whole yet, since it is going to hold other tokens."""
        if block in self._tail_at:
            self._remove(self._tail_at[block])

    def _tail(self, parent: int, rest: TokenIds) -> tuple[int, int]:
        """(n, block): which holds the most of the first tokens of `rest`; (0, -1): none does."""
        best, found = 0, -1
        for block, node in self._node(parent).tails.items():
            tail = self._nodes[node].tokens
            n = min(len(tail), len(rest))
            same = tail[:n] == rest[:n]
            common = n if same.all() else int(same.argmin())
            if common > best:
                best, found = common, block
        return best, found

    def evict(self, count: int) -> None:
        """Frees up to `count` blocks that nobody else holds, longest unused first."""
        while count > 0:
            gone: list[int] = []
            for node, found in self._nodes.items():
                if len(gone) == count:
                    break
                leaf = not found.children and not found.tails
                if leaf and self._pool.holders[found.block] == 1:
                    gone.append(node)
            if not gone:
                return
            for node in gone:
                self._remove(node)
            count -= len(gone)  # what is left may be leaves now

    def evictable(self) -> int:
        """Blocks that only the tree holds; nobody else holds what lies behind such a block."""
        blocks = [node.block for node in self._nodes.values()]
        return int((self._pool.holders[blocks] == 1).sum()) if blocks else 0

    def _path(self, tokens: TokenIds, weights: int) -> list[int]:
        path: list[int] = []
        root = _root(weights)
        for index in range(len(tokens) // BLOCK):
            key = tokens[index * BLOCK : (index + 1) * BLOCK].tobytes()
            found = self._node(path[-1] if path else root).children.get(key)
            if found is None:
                break
            path.append(found)
        return path

    def _node(self, node: int) -> _PrefixNode:
        if node > 0:
            return self._nodes[node]
        return self._roots.setdefault(node, _PrefixNode(-1, -1, np.zeros(0, np.int64)))

    def _add(self, block: int, parent: int, tokens: TokenIds) -> int:
        self._last += 1
        self._pool.hold(block)
        self._nodes[self._last] = _PrefixNode(block, parent, tokens)
        return self._last

    def _remove(self, node: int) -> None:
        gone = self._nodes.pop(node)
        parent = self._node(gone.parent)
        self._tail_at.pop(gone.block, None)
        parent.tails.pop(gone.block, None)
        if len(gone.tokens) == BLOCK:
            del parent.children[gone.tokens.tobytes()]
        if gone.parent <= 0 and not parent.children and not parent.tails:
            self._roots.pop(gone.parent, None)  # of weights that may never come back
        self._pool.drop(gone.block)


def _root(weights: int) -> int:
    return -weights
