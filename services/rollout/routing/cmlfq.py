"""C-MLFQ: choice of the bucket of engines for a trajectory, repeated at each tool return.

Each trajectory starts in the short bucket. After a tool return, the trees of past trajectories
(`length_trees.py`) estimate the remaining tokens. `queue_policy.decide_bucket` decides on a change
of the bucket (Libra, arXiv 2606.03077). Each decision has a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.services.rollout.routing.degree_buckets import MeasuredEngine, build_buckets
from meshrl.services.rollout.routing.length_trees import (
    LengthTrees,
    PastTrajectory,
    ToolReturn,
    classify_tool_return,
)
from meshrl.services.rollout.routing.queue_policy import BucketDecision, LengthBucket, decide_bucket
from meshrl.services.rollout.trajectories.trajectory import NOT_SAMPLED, Trajectory


@dataclass(slots=True)
class BucketState:
    """Bucket of a trajectory, and its tool returns with the tokens before each."""

    bucket: int = 0
    tool_returns: list[tuple[ToolReturn, int]] = field(default_factory=list)


class BucketScheduler:
    """Scheduler that decides the bucket of each trajectory, and learns from each that ends."""

    def __init__(
        self,
        buckets: Sequence[LengthBucket],
        length_trees: LengthTrees,
        follows_engines: bool = False,
    ) -> None:
        """Create a scheduler. `follows_engines`: the buckets follow the present engines
        (`update_engines`), and lengths are learnt even with one bucket.
        """
        self.buckets = list(buckets)
        self._follows_engines = follows_engines
        self._max_length, self._batch_size = buckets[-1].max_tokens, buckets[-1].batch_size
        self._degrees: dict[str, int] = {}  # of the engines of the buckets
        self.length_trees = length_trees
        self.outcome_counts: Counter[str] = Counter()  # decisions so far, by outcome

    def update_engines(self, engines: Mapping[str, MeasuredEngine]) -> bool:
        """Rebuild the buckets for these engines, by name, if they follow engines that have changed.
        Return True if the degrees changed, so that all trajectories need a new bucket.
        """
        degrees = {name: engine.tensor_parallel_size for name, engine in engines.items()}
        if not self._follows_engines or not degrees or degrees == self._degrees:
            return False
        others = set(degrees.values()) != set(self._degrees.values())
        self._degrees = degrees
        past = self.length_trees.sampled_tokens
        self.buckets = build_buckets(
            list(engines.values()), past, self._max_length, self._batch_size
        )
        return others

    def compute_order(self, trajectory: int, bucket: int) -> tuple[int, ...]:
        """Return the sort key of a waiting trajectory, lowest first; ties go by arrival.
        Trajectories are numbered in the order of their groups.

        With several buckets long trajectories come first, as the step ends with them. All others
        take turns, which soon shows which are long. With one bucket the oldest group comes first,
        as a step waits for it.
        """
        return (-bucket,) if len(self.buckets) > 1 else (trajectory,)

    def decide_after_tool(
        self, trajectory: Trajectory, bucket_state: BucketState
    ) -> BucketDecision:
        """Decide the bucket after a tool has answered the trajectory's open turn."""
        if len(self.buckets) == 1:
            return BucketDecision("already_in_target", 0, "only one bucket exists")
        bucket_state.tool_returns = collect_tool_returns(trajectory, bucket_state.tool_returns)
        decision = self.decide_bucket(
            trajectory, [state for state, _ in bucket_state.tool_returns], bucket_state.bucket
        )
        bucket_state.bucket = decision.bucket
        self.outcome_counts[decision.outcome] += 1
        return decision

    def restore(self, trajectory: Trajectory, bucket_state: BucketState) -> None:
        """Restore a trajectory of a predecessor, or of former buckets, by its tool returns."""
        bucket_state.bucket = 0
        if len(self.buckets) == 1:
            return
        bucket_state.tool_returns = collect_tool_returns(trajectory)
        if bucket_state.tool_returns:
            path = [state for state, _ in bucket_state.tool_returns]
            bucket_state.bucket = self.decide_bucket(trajectory, path, 0).bucket

    def decide_bucket(
        self, trajectory: Trajectory, path: Sequence[ToolReturn], current: int
    ) -> BucketDecision:
        """Decide for a trajectory in bucket `current` after these tool returns."""
        prompt = trajectory.row if trajectory.is_recorded else None
        return decide_bucket(self.length_trees.estimate(prompt, path), current, self.buckets)

    def record_end(
        self, trajectory: Trajectory, bucket_state: BucketState
    ) -> PastTrajectory | None:
        """Learn from a finished trajectory, and return the record to store, if it counts. Failed
        trajectories and evaluations do not count.
        """
        learns = self._follows_engines or len(self.buckets) > 1
        if (
            not learns
            or not trajectory.is_recorded
            or trajectory.outcome is None
            or trajectory.outcome.error
        ):
            return None
        sampled = int((trajectory.versions != NOT_SAMPLED).sum())
        past = PastTrajectory(
            trajectory.row,
            tuple(collect_tool_returns(trajectory, bucket_state.tool_returns)),
            sampled,
        )
        self.length_trees.learn(past)
        return past


def collect_tool_returns(
    trajectory: Trajectory, known: Sequence[tuple[ToolReturn, int]] = ()
) -> list[tuple[ToolReturn, int]]:
    """Collect a trajectory's tool returns, each with the tokens sampled before it."""
    found: list[tuple[ToolReturn, int]] = []
    sampled = 0
    for r in trajectory.all_turns:
        sampled += r.sampled_tokens
        for tool, _, value in r.list_calls():
            new = len(found) >= len(known)
            found.append((classify_tool_return(tool, value), sampled) if new else known[len(found)])
    return found
