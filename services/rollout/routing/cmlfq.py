"""C-MLFQ: chooses the bucket of engines for a trajectory, again at each tool return.

Everything starts in the short bucket. After a tool has answered, the trees of past trajectories
(`lengths.py`) estimate what remains, and `queues.decide` says whether that is for another bucket
(Libra, arXiv 2606.03077). Each decision carries its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.services.rollout.routing.degree_buckets import MeasuredEngine, buckets_of
from meshrl.services.rollout.routing.lengths import LengthTrees, Past, ToolReturn, tool_return_of
from meshrl.services.rollout.routing.queues import BucketDecision, LengthBucket, decide
from meshrl.services.rollout.trajectories.trajectory import NOT_SAMPLED, Trajectory


@dataclass(slots=True)
class Course:
    """A trajectory up to now: its bucket, and its tool returns with the tokens before each."""

    bucket: int = 0
    returns: list[tuple[ToolReturn, int]] = field(default_factory=list)


class Scheduler:
    """Decides the bucket of each trajectory, and learns from each that ends."""

    def __init__(
        self,
        buckets: Sequence[LengthBucket],
        prompts: int,
        lengths: LengthTrees,
        follows: bool = False,
    ) -> None:
        """`follows`: the buckets are those of the engines that are there (`follow`), and lengths
        are learnt while there is one.
        """
        self.buckets = list(buckets)
        self._follows = follows
        self._longest, self._batch = buckets[-1].max_tokens, buckets[-1].batch
        self._degrees: dict[str, int] = {}  # of the engines that the buckets are for
        self.lengths = lengths
        self.outcomes: Counter[str] = Counter()  # decisions so far, by outcome
        self._prompts = max(1, prompts)  # rows of the data set: epochs share their trees

    def follow(self, engines: Mapping[str, MeasuredEngine]) -> bool:
        """Makes the buckets those of these engines, by name, where they follow engines and others
        are there than before; whether there are other buckets, so that nobody's is his any more.
        """
        degrees = {name: engine.degree for name, engine in engines.items()}
        if not self._follows or not degrees or degrees == self._degrees:
            return False
        others = set(degrees.values()) != set(self._degrees.values())
        self._degrees = degrees
        past = self.lengths.sampled
        self.buckets = buckets_of(list(engines.values()), past, self._longest, self._batch)
        return others

    def order(self, trajectory: int, bucket: int) -> tuple[int, ...]:
        """Whose turn it is when several wait, lowest first; then who came first. Trajectories are
        numbered in the order of their groups.

        With buckets, the long ones: the step ends with them. All others take turns, which shows
        soon who is long. With one, the oldest group: it is what a step waits for.
        """
        return (-bucket,) if len(self.buckets) > 1 else (trajectory,)

    def returned(self, t: Trajectory, course: Course) -> BucketDecision:
        """The decision after a tool has answered the trajectory's open turn."""
        if len(self.buckets) == 1:
            return BucketDecision("already_in_target", 0, "there is one bucket")
        course.returns = returns_of(t, course.returns)
        decision = self.decided(t, [state for state, _ in course.returns], course.bucket)
        course.bucket = decision.bucket
        self.outcomes[decision.outcome] += 1
        return decision

    def restored(self, t: Trajectory, course: Course) -> None:
        """Takes up a trajectory that a predecessor began, or that other buckets were for, where its
        tool returns have it.
        """
        course.bucket = 0
        if len(self.buckets) == 1:
            return
        course.returns = returns_of(t)
        if course.returns:
            path = [state for state, _ in course.returns]
            course.bucket = self.decided(t, path, 0).bucket

    def decided(self, t: Trajectory, path: Sequence[ToolReturn], current: int) -> BucketDecision:
        """The decision for a trajectory in bucket `current` after these tool returns."""
        prompt = t.prompt % self._prompts if t.recorded else None
        return decide(self.lengths.estimate(prompt, path), current, self.buckets)

    def ended(self, t: Trajectory, course: Course) -> Past | None:
        """Takes in a trajectory that is over; returns what is to be remembered of it, if it counts.
        One that failed says nothing of lengths, nor does evaluation, which samples otherwise.
        """
        learns = self._follows or len(self.buckets) > 1
        if not learns or not t.recorded or t.ending is None or t.ending.error:
            return None
        sampled = int((t.versions != NOT_SAMPLED).sum())
        past = Past(t.prompt % self._prompts, tuple(returns_of(t, course.returns)), sampled)
        self.lengths.learn(past)
        return past


def returns_of(
    t: Trajectory, known: Sequence[tuple[ToolReturn, int]] = ()
) -> list[tuple[ToolReturn, int]]:
    """A trajectory's tool returns, each with the tokens that it had sampled by then."""
    found: list[tuple[ToolReturn, int]] = []
    sampled = 0
    for r in t.every_turn:
        sampled += r.tokens
        for tool, _, value in r.calls():
            new = len(found) >= len(known)
            found.append((tool_return_of(tool, value), sampled) if new else known[len(found)])
    return found
