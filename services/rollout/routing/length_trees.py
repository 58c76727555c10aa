"""Prediction of the remaining length of a trajectory from its tool returns.

Tool returns decide the final length, and do not exist when a trajectory starts. So the length is
estimated at each of them. A prefix tree over (tool, size class of the answer, status) stores at
each node the tokens that past trajectories sampled after it. There is one tree for each prompt and
one for all (Libra, arXiv 2606.03077, section 4; `cmlfq_*.py` in its released code).

There are two differences to Libra. A node counts only from MIN_VISITS on, so that one unusual
trajectory has no effect. If a prompt's tree has no estimate at a state's full depth, the tree of
all prompts is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

SMALL_CHARS, MEDIUM_CHARS = 500, 5000  # characters of an answer; Libra's default classes
NODE_SAMPLES = 200  # latest lengths of a node for its 90th percentile
MIN_VISITS = 4  # trajectories behind an estimate
HISTORY = 5000  # latest trajectories in the trees

ToolReturn = tuple[str, str, str]  # tool, size class, status


@dataclass(frozen=True, slots=True)
class PastTrajectory:
    """Finished trajectory: its tool returns, each with the tokens sampled before it."""

    prompt: int
    tool_returns: tuple[tuple[ToolReturn, int], ...]
    sampled_tokens: int  # in total


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """Estimate of the remaining tokens at a node, with the node for the explanation."""

    mean: float
    p90: float
    visits: int
    depth: int  # matched tool returns of the trajectory
    tree: str  # "prompt" | "all"


@dataclass(slots=True)
class _LengthNode:
    visits: int = 0
    mean: float = 0.0
    latest: deque[int] = field(default_factory=lambda: deque(maxlen=NODE_SAMPLES))
    children: dict[ToolReturn, _LengthNode] = field(default_factory=dict)

    def learn(self, remaining: int) -> None:
        self.visits += 1
        self.mean += (remaining - self.mean) / self.visits
        self.latest.append(remaining)

    def p90(self) -> float:
        """Return the smallest of the latest lengths that at least 90 % do not exceed."""
        ordered = sorted(self.latest)
        return float(ordered[-(-9 * len(ordered) // 10) - 1])


class LengthTrees:
    """Trees of the latest `limit` trajectories; the same history makes the same trees."""

    def __init__(self, history: Iterable[PastTrajectory] = (), limit: int = HISTORY) -> None:
        self._history: deque[PastTrajectory] = deque(history, maxlen=limit)
        self._limit = limit
        self._rebuild()

    @property
    def sampled_tokens(self) -> list[int]:
        """Tokens of each trajectory in the trees, the oldest first."""
        return [past.sampled_tokens for past in self._history]

    def learn(self, past: PastTrajectory) -> None:
        """Learn from a finished trajectory, and forget the oldest ones beyond the limit."""
        self._history.append(past)
        self._learned_since_rebuild += 1
        if len(self._history) == self._limit and self._learned_since_rebuild >= self._limit // 2:
            self._rebuild()
        else:
            self._insert(past)

    def estimate(self, prompt: int | None, path: Sequence[ToolReturn]) -> LengthEstimate | None:
        """Return the estimate of the deepest node that matches `path`. Of equal depths prefer the
        prompt's own tree to the tree of all. Return None if no tool return has been seen often
        enough.
        """
        own = self._prompts.get(prompt) if prompt is not None else None
        found = [_find_deepest(root, path) for root in (own, self._all_prompts) if root is not None]
        names = ("prompt", "all") if own is not None else ("all",)
        matches = [
            LengthEstimate(node.mean, node.p90(), node.visits, depth, name)
            for (node, depth), name in zip(found, names, strict=True)
            if depth > 0
        ]
        return max(matches, key=lambda e: e.depth, default=None)

    def _rebuild(self) -> None:
        self._all_prompts = _LengthNode()
        self._prompts: dict[int, _LengthNode] = {}
        self._learned_since_rebuild = 0
        for past in self._history:
            self._insert(past)

    def _insert(self, past: PastTrajectory) -> None:
        for root in (self._prompts.setdefault(past.prompt, _LengthNode()), self._all_prompts):
            node = root
            node.learn(past.sampled_tokens)
            for state, sampled in past.tool_returns:
                node = node.children.setdefault(state, _LengthNode())
                node.learn(past.sampled_tokens - sampled)


def _find_deepest(root: _LengthNode, path: Sequence[ToolReturn]) -> tuple[_LengthNode, int]:
    """Find the last node along `path` with enough visits, and its depth; 0: only the root."""
    node, depth = root, 0
    for state in path:
        child = node.children.get(state)
        if child is None or child.visits < MIN_VISITS:
            break
        node, depth = child, depth + 1
    return node, depth


def classify_tool_return(tool: str, value: Any) -> ToolReturn:
    """Classify a tool's answer as a state.

    It is a time-out or a failure if a field `status`, `error` or `exception` reports it, or if it
    is a text that mentions one (Libra's default extractor).
    """
    text = value if isinstance(value, str) else None
    size = len(text) if text is not None else len(msgpack.packb(value, use_bin_type=True))
    small = "small" if size <= SMALL_CHARS else "medium" if size <= MEDIUM_CHARS else "large"
    return tool, small, _classify_status(value, text)


def _classify_status(value: Any, text: str | None) -> str:
    if isinstance(value, dict):
        message = " ".join(
            str(value[key]) for key in ("status", "error", "exception") if value.get(key)
        )
        failed = bool(value.get("error") or value.get("exception"))
    else:
        message, failed = text or "", False
    message = message.lower()
    if "timeout" in message or "timed out" in message:
        return "timeout"
    return "failure" if failed or "error" in message or "fail" in message else "success"
