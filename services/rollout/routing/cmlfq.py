"""C-MLFQ: chooses the bucket of engines for a trajectory, again at each tool return.

Everything starts in the short bucket. After a tool has answered, the trees of past trajectories
(`length_trees.py`) estimate what remains, and `queue_policy.decide_bucket` says whether that is for
another bucket (Libra, arXiv 2606.03077). Each decision carries its reason.
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
    """A trajectory up to now: its bucket, and its tool returns with the tokens before each."""

    bucket: int = 0
    tool_returns: list[tuple[ToolReturn, int]] = field(default_factory=list)


class BucketScheduler:
    """Decides the bucket of each trajectory, and learns from each that ends."""

    def __init__(
        self,
        buckets: Sequence[LengthBucket],
        prompt_count: int,
        length_trees: LengthTrees,
        follows_engines: bool = False,
    ) -> None:
        """`follows`: the buckets are those of the engines that are there (`follow`), and lengths
        are learnt while there is one.
        """
        self.buckets = list(buckets)
        self._follows_engines = follows_engines
        self._max_length, self._batch_size = buckets[-1].max_tokens, buckets[-1].batch_size
        self._degrees: dict[str, int] = {}  # of the engines that the buckets are for
        self.length_trees = length_trees
        self.outcome_counts: Counter[str] = Counter()  # decisions so far, by outcome
        self._prompt_count = max(1, prompt_count)  # rows of the data set: epochs share their trees

    def update_engines(self, engines: Mapping[str, MeasuredEngine]) -> bool:
        """Makes the buckets those of these engines, by name, where they follow engines and others
        are there than before; whether there are other buckets, so that nobody's is his any more.
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
        """Whose turn it is when several wait, lowest first; then who came first. Trajectories are
        numbered in the order of their groups.

        With buckets, the long ones: the step ends with them. All others take turns, which shows
        soon who is long. With one, the oldest group: it is what a step waits for.
        """
        return (-bucket,) if len(self.buckets) > 1 else (trajectory,)

    def decide_after_tool(
        self, trajectory: Trajectory, bucket_state: BucketState
    ) -> BucketDecision:
        """The decision after a tool has answered the trajectory's open turn."""
        if len(self.buckets) == 1:
            return BucketDecision("already_in_target", 0, "there is one bucket")
        bucket_state.tool_returns = collect_tool_returns(trajectory, bucket_state.tool_returns)
        decision = self.decide_bucket(
            trajectory, [state for state, _ in bucket_state.tool_returns], bucket_state.bucket
        )
        bucket_state.bucket = decision.bucket
        self.outcome_counts[decision.outcome] += 1
        return decision

    def restore(self, trajectory: Trajectory, bucket_state: BucketState) -> None:
        """Takes up a trajectory that a predecessor began, or that other buckets were for, where its
        tool returns have it.
        """
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
        """The decision for a trajectory in bucket `current` after these tool returns."""
        prompt = trajectory.prompt % self._prompt_count if trajectory.is_recorded else None
        return decide_bucket(self.length_trees.estimate(prompt, path), current, self.buckets)

    def record_end(
        self, trajectory: Trajectory, bucket_state: BucketState
    ) -> PastTrajectory | None:
        """Takes in a trajectory that is over; returns what is to be remembered of it, if it counts.
        One that failed says nothing of lengths, nor does evaluation, which samples otherwise.
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
            trajectory.prompt % self._prompt_count,
            tuple(collect_tool_returns(trajectory, bucket_state.tool_returns)),
            sampled,
        )
        self.length_trees.learn(past)
        return past


def collect_tool_returns(
    trajectory: Trajectory, known: Sequence[tuple[ToolReturn, int]] = ()
) -> list[tuple[ToolReturn, int]]:
    """A trajectory's tool returns, each with the tokens that it had sampled by then."""
    found: list[tuple[ToolReturn, int]] = []
    sampled = 0
    for r in trajectory.all_turns:
        sampled += r.sampled_tokens
        for tool, _, value in r.list_calls():
            new = len(found) >= len(known)
            found.append((classify_tool_return(tool, value), sampled) if new else known[len(found)])
    return found
