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

BLOCK_TOKENS = 16  # tokens; as kBlock in kernels/csrc/attention.h

TokenIds = NDArray[np.int64]


def count_blocks(tokens: int) -> int:
    """The number of blocks that so many tokens take."""
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    """Counts the holders of each block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = np.zeros(num_blocks, np.int64)
        self._free_blocks = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """The number of blocks that nobody holds."""
        return len(self._free_blocks)

    def allocate(self) -> int:
        """A block with one holder; IndexError when none is free."""
        block = self._free_blocks.pop()
        self.ref_counts[block] = 1
        return block

    def add_reference(self, block: int) -> None:
        """Counts one more holder of a block."""
        self.ref_counts[block] += 1

    def remove_reference(self, block: int) -> None:
        """Counts one holder fewer; a block without holders is free."""
        self.ref_counts[block] -= 1
        if not self.ref_counts[block]:
            self._free_blocks.append(block)


@dataclass(slots=True)
class _PrefixNode:
    """A block of a prefix; its parent knows it by its tokens once it is whole."""

    block: int
    parent: int
    tokens: TokenIds
    children: dict[bytes, int] = field(default_factory=dict)
    partial_children: dict[int, int] = field(
        default_factory=dict
    )  # block -> node, of blocks that were begun


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The known part of a prefix: whole blocks, and the first `tail` tokens of block `copied`."""

    blocks: list[int]
    num_tail_tokens: int = 0
    tail_block: int = -1

    @property
    def num_tokens(self) -> int:
        """The number of tokens whose keys and values are found."""
        return len(self.blocks) * BLOCK_TOKENS + self.num_tail_tokens


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
            self._pool.remove_reference(node.block)
        self._last_node_id = 0  # node ids are never used twice
        self._roots: dict[int, _PrefixNode] = {}  # by id; those of nodes are above 0
        self._nodes.clear()
        self._tail_nodes: dict[int, int] = {}  # block -> its node, while it is a tail

    @property
    def num_blocks(self) -> int:
        """The number of blocks that the tree holds."""
        return len(self._nodes)

    def match(self, tokens: TokenIds, weights_id: int = 0) -> PrefixMatch:
        """The longest known prefix of `tokens`."""
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
        """Makes `tokens`, which lie in `blocks`, known; `tail`: a last block that is not full, too.

        Blocks that the tree has already take the place of their like in `blocks`, so that whoever
        holds a block of the tree holds all that lie before it. A tail stays known when its block
        fills up, as long as the tree holds that.
        """
        path = self._match_path(tokens, weights_id)
        for index, node in enumerate(path):
            ours, theirs = self._nodes[node].block, int(blocks[index])
            if ours != theirs:
                self._pool.add_reference(ours)
                self._pool.remove_reference(theirs)
                blocks[index] = ours
        whole = len(tokens) // BLOCK_TOKENS
        parent = path[-1] if path else _get_root_id(weights_id)
        for index in range(len(path), whole):
            part = tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS].copy()
            block = int(blocks[index])
            node = self._tail_nodes.pop(block, 0) or self._add_node(block, parent, part)
            self._nodes[node].tokens = part
            self._get_node(parent).children[part.tobytes()] = node
            parent = node
        rest = tokens[whole * BLOCK_TOKENS :]
        if not include_tail or self._match_tail(parent, rest)[0] == len(rest):
            return
        block = int(blocks[whole])
        self.remove_tail(block)
        self._tail_nodes[block] = self._add_node(block, parent, rest.copy())
        self._get_node(parent).partial_children[block] = self._tail_nodes[block]

    def remove_tail(self, block: int) -> None:
        """Forgets a block that is not whole yet, since it is going to hold other tokens."""
        if block in self._tail_nodes:
            self._remove_node(self._tail_nodes[block])

    def _match_tail(self, parent: int, rest: TokenIds) -> tuple[int, int]:
        """(n, block): which holds the most of the first tokens of `rest`; (0, -1): none does."""
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
        """Frees up to `count` blocks that nobody else holds, longest unused first."""
        while count > 0:
            gone: list[int] = []
            for node, found in self._nodes.items():
                if len(gone) == count:
                    break
                leaf = not found.children and not found.partial_children
                if leaf and self._pool.ref_counts[found.block] == 1:
                    gone.append(node)
            if not gone:
                return
            for node in gone:
                self._remove_node(node)
            count -= len(gone)  # what is left may be leaves now

    def count_evictable(self) -> int:
        """Blocks that only the tree holds; nobody else holds what lies behind such a block."""
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
        gone = self._nodes.pop(node_id)
        parent = self._get_node(gone.parent)
        self._tail_nodes.pop(gone.block, None)
        parent.partial_children.pop(gone.block, None)
        if len(gone.tokens) == BLOCK_TOKENS:
            del parent.children[gone.tokens.tobytes()]
        if gone.parent <= 0 and not parent.children and not parent.partial_children:
            self._roots.pop(gone.parent, None)  # of weights that may never come back
        self._pool.remove_reference(gone.block)


def _get_root_id(weights_id: int) -> int:
    return -weights_id
