"""Blocks of the paged cache: their reference counts, and the prefixes that requests can share.

A radix tree over blocks of 16 tokens (RadixAttention, arXiv 2312.07104, section 3) has a root for
each set of weights that computes here: the base, and the base with each adapter. A block without
references is free. The tree holds references too, and releases its least recently used blocks if a
request needs a block. The block after the last full one of a sequence cannot be shared, since its
first holder continues to write it, but its content can be copied.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshrl.common.job.memory.cache_blocks import BLOCK_TOKENS

TokenIds = NDArray[np.int64]


class BlockPool:
    """Reference counts of the blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = np.zeros(num_blocks, np.int64)
        self._free_blocks = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of blocks without references."""
        return len(self._free_blocks)

    def allocate(self) -> int:
        """Allocate a block with one reference; raise IndexError if none is free."""
        block = self._free_blocks.pop()
        self.ref_counts[block] = 1
        return block

    def add_reference(self, block: int) -> None:
        """Add a reference to a block."""
        self.ref_counts[block] += 1

    def remove_reference(self, block: int) -> None:
        """Remove a reference from a block; a block without references is free."""
        self.ref_counts[block] -= 1
        if not self.ref_counts[block]:
            self._free_blocks.append(block)


@dataclass(slots=True)
class _PrefixNode:
    """Block of a prefix. Its parent finds it by its tokens once it is full."""

    block: int
    parent: int
    tokens: TokenIds
    children: dict[bytes, int] = field(default_factory=dict)
    # block -> node, of partial blocks
    partial_children: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Known part of a prefix: full blocks, and the first `tail` tokens of block `copied`."""

    blocks: list[int]
    num_tail_tokens: int = 0
    tail_block: int = -1

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose keys and values are cached."""
        return len(self.blocks) * BLOCK_TOKENS + self.num_tail_tokens


class PrefixCache:
    """Radix tree of known prefixes.

    `weights_id` identifies the weights that computed a prefix; keys and values of other weights do
    not match.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._nodes: OrderedDict[int, _PrefixNode] = OrderedDict()  # longest unused first
        self.clear()

    def clear(self) -> None:
        """Drop all prefixes, because the weights have changed."""
        for node in self._nodes.values():
            self._pool.remove_reference(node.block)
        self._last_node_id = 0  # node ids are never used twice
        self._roots: dict[int, _PrefixNode] = {}  # by id; ids of nodes are above 0
        self._nodes.clear()
        self._tail_nodes: dict[int, int] = {}  # block -> its node, while it is a tail

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the tree references."""
        return len(self._nodes)

    def match(self, tokens: TokenIds, weights_id: int = 0) -> PrefixMatch:
        """Find the longest known prefix of `tokens`."""
        path = self._match_path(tokens, weights_id)
        for node in reversed(path):  # parents count as used after their children
            self._nodes.move_to_end(node)
        blocks = [self._nodes[node].block for node in path]
        tail, copied = self._match_tail(
            path[-1] if path else _get_root_id(weights_id), tokens[len(path) * BLOCK_TOKENS :]
        )
        return PrefixMatch(blocks, tail, copied)

    def insert(
        self, tokens: TokenIds, blocks: NDArray[np.int32], include_tail: bool, weights_id: int = 0
    ) -> None:
        """Add `tokens`, cached in `blocks`, to the tree; with `include_tail` also a partial last
        block.

        Blocks that are in the tree already replace their equals in `blocks`, so that a holder of a
        block of the tree also holds all blocks before it. A tail stays known when its block fills
        up, as long as the tree references the block.
        """
        path = self._match_path(tokens, weights_id)
        for index, node in enumerate(path):
            ours, theirs = self._nodes[node].block, int(blocks[index])
            if ours != theirs:
                self._pool.add_reference(ours)
                self._pool.remove_reference(theirs)
                blocks[index] = ours
        num_full_blocks = len(tokens) // BLOCK_TOKENS
        parent = path[-1] if path else _get_root_id(weights_id)
        for index in range(len(path), num_full_blocks):
            part = tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS].copy()
            block = int(blocks[index])
            node = self._tail_nodes.pop(block, 0) or self._add_node(block, parent, part)
            self._nodes[node].tokens = part
            self._get_node(parent).children[part.tobytes()] = node
            parent = node
        rest = tokens[num_full_blocks * BLOCK_TOKENS :]
        if not include_tail or self._match_tail(parent, rest)[0] == len(rest):
            return
        block = int(blocks[num_full_blocks])
        self.remove_tail(block)
        self._tail_nodes[block] = self._add_node(block, parent, rest.copy())
        self._get_node(parent).partial_children[block] = self._tail_nodes[block]

    def remove_tail(self, block: int) -> None:
        """Drop a partial block from the tree, because its other tokens will be overwritten."""
        if block in self._tail_nodes:
            self._remove_node(self._tail_nodes[block])

    def _match_tail(self, parent: int, rest: TokenIds) -> tuple[int, int]:
        """Return (n, block) of the tail that matches most first tokens of `rest`.

        (0, -1) if none.
        """
        best, found = 0, -1
        for block, node in self._get_node(parent).partial_children.items():
            tail = self._nodes[node].tokens
            n = min(len(tail), len(rest))
            same = tail[:n] == rest[:n]
            common = n if same.all() else int(same.argmin())
            if common > best:
                best, found = common, block
        return best, found

    def evict(self, count: int) -> None:
        """Free up to `count` blocks that only the tree references, least recently used first."""
        while count > 0:
            evicted: list[int] = []
            for node, found in self._nodes.items():
                if len(evicted) == count:
                    break
                leaf = not found.children and not found.partial_children
                if leaf and self._pool.ref_counts[found.block] == 1:
                    evicted.append(node)
            if not evicted:
                return
            for node in evicted:
                self._remove_node(node)
            count -= len(evicted)  # the remaining nodes may be leaves now

    def count_evictable(self) -> int:
        """Count the blocks that only the tree references.

        All blocks behind such a block are evictable too.
        """
        blocks = [node.block for node in self._nodes.values()]
        return int((self._pool.ref_counts[blocks] == 1).sum()) if blocks else 0

    def _match_path(self, tokens: TokenIds, weights_id: int) -> list[int]:
        path: list[int] = []
        root = _get_root_id(weights_id)
        for index in range(len(tokens) // BLOCK_TOKENS):
            key = tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS].tobytes()
            found = self._get_node(path[-1] if path else root).children.get(key)
            if found is None:
                break
            path.append(found)
        return path

    def _get_node(self, node_id: int) -> _PrefixNode:
        if node_id > 0:
            return self._nodes[node_id]
        return self._roots.setdefault(node_id, _PrefixNode(-1, -1, np.zeros(0, np.int64)))

    def _add_node(self, block: int, parent: int, tokens: TokenIds) -> int:
        self._last_node_id += 1
        self._pool.add_reference(block)
        self._nodes[self._last_node_id] = _PrefixNode(block, parent, tokens)
        return self._last_node_id

    def _remove_node(self, node_id: int) -> None:
        removed = self._nodes.pop(node_id)
        parent = self._get_node(removed.parent)
        self._tail_nodes.pop(removed.block, None)
        parent.partial_children.pop(removed.block, None)
        if len(removed.tokens) == BLOCK_TOKENS:
            del parent.children[removed.tokens.tobytes()]
        if removed.parent <= 0 and not parent.children and not parent.partial_children:
            # the weights of this root may never be loaded again
            self._roots.pop(removed.parent, None)
        self._pool.remove_reference(removed.block)


def _get_root_id(weights_id: int) -> int:
    return -weights_id
