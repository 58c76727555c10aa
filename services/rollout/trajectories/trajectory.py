"""Trajectory: its tokens, its turns, and its recovery from the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshrl.common.base.expert_routing import NO_EXPERTS, UNKNOWN_EXPERT
from meshrl.common.mesh.telemetry.stopwatch import NULL_STOPWATCH, NullStopwatch
from meshrl.common.records.ledger import LedgerRecord, RecordKind, extract_group, make_trajectory_id
from meshrl.common.records.token_records import select_rows

NOT_SAMPLED = -1  # weight version of a token that the model did not sample
INITIAL_TOKENS = 64  # initial capacity of a buffer

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
ExpertIds = NDArray[np.int16]


class StagedRow(Protocol):
    """Staged row with the newest tokens of a running request; see `staging.py`."""

    @property
    def staged_tokens(self) -> int:
        """Number of staged tokens."""

    def unstage(self) -> None:
        """Move the staged tokens into the buffer's own columns."""


class TokenBuffer:
    """Growing columns of ids, log-probabilities, weight versions and experts, with one entry per
    token. Staging may have the newest tokens.
    """

    __slots__ = ("_experts", "_length", "_logprobs", "_staged_row", "_tokens", "_versions")

    def __init__(self) -> None:
        self._staged_row: StagedRow | None = None  # while a request is running
        self._length = 0  # tokens in the columns
        self._tokens = np.zeros(INITIAL_TOKENS, np.int32)
        self._logprobs = np.zeros(INITIAL_TOKENS, np.float32)
        self._versions = np.full(INITIAL_TOKENS, NOT_SAMPLED, np.int32)
        self._experts = NO_EXPERTS  # parallel to the others, once experts are recorded

    @property
    def length(self) -> int:
        """Number of tokens, with staged ones."""
        if self._staged_row is None:
            return self._length
        return self._length + self._staged_row.staged_tokens

    @property
    def tokens(self) -> Ints:
        """Token ids, int32 [length]."""
        self._unstage()
        return self._tokens[: self._length]

    @property
    def logprobs(self) -> Floats:
        """Log-probabilities, float32 [length]; 0 for tokens that were not sampled."""
        self._unstage()
        return self._logprobs[: self._length]

    @property
    def versions(self) -> Ints:
        """Weight versions that sampled each token, int32 [length]; NOT_SAMPLED elsewhere."""
        self._unstage()
        return self._versions[: self._length]

    @property
    def experts(self) -> ExpertIds:
        """Experts, int16 [length, layers x k], as in `meshrl.common.base.expert_routing`;
        NO_EXPERTS without any.
        """
        self._unstage()
        return self._experts[: self._length]

    def set_staged_row(self, row: StagedRow | None) -> None:
        """Set the staged row of the newest tokens; None: all are in the buffer."""
        self._unstage()
        self._staged_row = row

    def append_sampled(
        self, tokens: Ints, logprobs: Floats, versions: Ints, experts: ExpertIds = NO_EXPERTS
    ) -> None:
        """Append sampled tokens, [n] each, with experts [n, layers x k] or NO_EXPERTS."""
        where = self._add_room(len(tokens))
        self._tokens[where] = tokens
        self._logprobs[where] = logprobs
        self._versions[where] = versions
        self._set_experts(where, experts)

    def append(self, ids: list[int]) -> None:
        where = self._add_room(len(ids))
        self._tokens[where] = ids
        self._logprobs[where] = 0.0
        self._versions[where] = NOT_SAMPLED
        self._set_experts(where, NO_EXPERTS)

    def clear(self) -> None:
        self._unstage()
        self._length = 0

    def _unstage(self) -> None:
        if self._staged_row is not None:
            self._staged_row.unstage()

    def _add_room(self, n: int) -> slice:
        end = self._length + n
        if end > len(self._tokens):
            n = max(end, 2 * len(self._tokens)) - len(self._tokens)  # additional capacity
            self._tokens = np.concatenate([self._tokens, np.zeros(n, np.int32)])
            self._logprobs = np.concatenate([self._logprobs, np.zeros(n, np.float32)])
            self._versions = np.concatenate([self._versions, np.full(n, NOT_SAMPLED, np.int32)])
            if width := self._experts.shape[1]:
                unknown = np.full((n, width), UNKNOWN_EXPERT, np.int16)
                self._experts = np.concatenate([self._experts, unknown])
        where = slice(self._length, end)
        self._length = end
        return where

    def _set_experts(self, where: slice, experts: ExpertIds) -> None:
        """Set the experts of tokens within the capacity; NO_EXPERTS: unknown."""
        width = experts.shape[1]
        if width and not self._experts.shape[1]:
            self._experts = np.full((len(self._tokens), width), UNKNOWN_EXPERT, np.int16)
        if self._experts.shape[1]:
            self._experts[where] = experts if width else UNKNOWN_EXPERT


@dataclass(slots=True)
class Turn:
    """Turn of the model with the environment's answers so far."""

    text: str
    sampled_tokens: int  # sampled in this turn
    tool_name: str = ""
    tool_input: Any = None
    tool_value: Any = None
    has_tool_value: bool = False  # the tool's value is logged
    # calls before the last one
    earlier_calls: list[tuple[str, Any, Any]] = field(default_factory=list)
    appended_tokens: int = 0  # tokens of the environment after the turn
    is_cut: bool = False  # the trajectory ended within the turn

    def add_call(self, tool: str, input: Any, value: Any) -> None:
        """Add a logged tool value, possibly after others of this turn."""
        self.earlier_calls = self.list_calls()
        self.tool_name, self.tool_input, self.tool_value, self.has_tool_value = (
            tool,
            input,
            value,
            True,
        )

    def list_calls(self) -> list[tuple[str, Any, Any]]:
        return self.earlier_calls + (
            [(self.tool_name, self.tool_input, self.tool_value)] if self.has_tool_value else []
        )


@dataclass(slots=True)
class TrajectoryOutcome:
    reason: str  # done, length, turns, or the code of a typed failure
    reward: float | None = None
    error: str = ""
    failure_kind: str = ""  # of a typed failure, not stored
    # numbers of the reward and the environment by name, such as `reward/format`
    metrics: dict[str, float] = field(default_factory=dict)


class MemberScorer(Protocol):
    """Scorer of a whole group; see `rewards/group_scorer.py`."""

    async def score(self, member: int, turns: list[dict[str, Any]]) -> Any:
        """Return the reward of a member, once all others have ended."""

    def leave(self, member: int) -> None:
        """Wait no longer for a member."""


class Trajectory(TokenBuffer):
    """Trajectory: a prompt and the following tokens, in turns."""

    def __init__(self, group: int, member: int, prompt: int, version: int, seed: int) -> None:
        super().__init__()
        self.id = make_trajectory_id(group, member)
        self.group, self.member, self.prompt, self.seed = group, member, prompt, seed
        self.row = prompt  # number of its row; `prompt` counts on over the epochs
        # Version of the mesh at admission: engines below it must not serve it.
        self.version = version
        self.prompt_length = 0
        self.turn_start = 0  # begin of this turn's sampled tokens
        self.past_turns: list[Turn] = []
        self.open_turn: Turn | None = (
            None  # turn that the environment has received and not answered
        )
        self.outcome: TrajectoryOutcome | None = None
        self.last_observation: list[int] = []  # a last observation, without a following turn
        self.is_recorded = True  # training trajectories are in the ledger, evaluation is not
        self.temperature, self.top_p = 1.0, 1.0
        self.max_tokens = 0  # its maximum length, prompt included; 0: rollout.max_tokens
        self.stopwatch: NullStopwatch = NULL_STOPWATCH  # measures the time by state
        self.scores: dict[str, np.ndarray] = {}  # frozen models' scores, one per token
        self.group_scorer: MemberScorer | None = None  # of a reward over the whole group
        # by member: rewards that a predecessor recorded for the whole group
        self.group_rewards: dict[int, Any] | None = None

    @property
    def turn_tokens(self) -> Ints:
        """Ids sampled in the current turn."""
        return self.tokens[self.turn_start :]

    def append(self, ids: list[int]) -> None:
        """Append tokens of the prompt or the environment; the model's next turn follows them."""
        super().append(ids)
        self.turn_start = self.length
        if self.open_turn is not None:
            self.open_turn.appended_tokens = len(ids)
            self.past_turns.append(self.open_turn)
            self.open_turn = None

    def append_last(self, ids: list[int]) -> None:
        self.last_observation = ids
        self.append(ids)

    def set_prompt(self, prompt: list[int]) -> None:
        self.clear()
        self.last_observation = []
        self.past_turns, self.open_turn, self.outcome = [], None, None
        self.append(prompt)
        self.prompt_length = len(prompt)

    @property
    def all_turns(self) -> list[Turn]:
        """Completed turns, and the open one."""
        return self.past_turns + ([self.open_turn] if self.open_turn else [])

    def list_tool_calls(self) -> list[tuple[str, Any, Any]]:
        """List (tool, input, value) of all calls so far."""
        return [call for r in self.all_turns for call in r.list_calls()]

    def build_replay(self, *, answered: bool = False) -> list[Any]:
        """Build the operations that restore an environment to this trajectory's state.

        An open turn counts with its progress. The environment has received its text, and the last
        tool's value only if `answered`.
        """
        entries: list[Any] = []
        tokens, at = self.tokens, self.prompt_length
        for r in self.all_turns:
            entries.append(["step", tokens[at : at + r.sampled_tokens].tolist()])
            at += r.sampled_tokens + r.appended_tokens
            calls = r.earlier_calls if r is self.open_turn and not answered else r.list_calls()
            entries += [["result", value] for _, _, value in calls]
        return entries


@dataclass(slots=True)
class RestoredGroups:
    """Unfinished groups restored from a shard's ledger."""

    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    closed_groups: set[int] = field(default_factory=set)
    # by group and member: recorded for the whole group before its members ended
    group_rewards: dict[int, dict[int, Any]] = field(default_factory=dict)
    cut_trajectories: set[int] = field(default_factory=set)  # trajectories cut at a gap

    def mark_gap(self) -> None:
        """Mark a gap of lost records. Later records of known trajectories are ignored, unless the
        trajectories are opened again.
        """
        self.cut_trajectories |= self.trajectories.keys()

    def filter_record(self, record: LedgerRecord) -> LedgerRecord | None:
        """Return the part of a record that is valid after the gaps so far; None: no part."""
        p = record.payload
        if not self.cut_trajectories or record.kind in (RecordKind.OPEN, RecordKind.CLOSE):
            return record
        if record.kind is RecordKind.REWARDS:  # those of lost turns do not count
            is_cut = p[0] in map(extract_group, self.cut_trajectories)
            return None if is_cut else record
        if record.kind is not RecordKind.TOKENS:
            return None if p[0] in self.cut_trajectories else record
        chosen = ~np.isin(p.trajectory_ids, list(self.cut_trajectories))
        return LedgerRecord(record.kind, select_rows(p, chosen)) if chosen.any() else None

    def apply_record(self, record: LedgerRecord, compute_seed: Any) -> None:
        """Apply one record; records of one trajectory arrive in the order of their writes."""
        counted = self.filter_record(record)
        if counted is None:
            return
        p = counted.payload
        if record.kind is RecordKind.OPEN:
            group, member, prompt, version, ids = p
            t = Trajectory(group, member, prompt, version, compute_seed(group, member))
            t.set_prompt(ids)
            self.trajectories[t.id] = t
            self.cut_trajectories.discard(t.id)
        elif record.kind is RecordKind.TOKENS:
            at = 0
            for identity, count in zip(p.trajectory_ids.tolist(), p.counts.tolist(), strict=True):
                part = slice(at, at + count)
                at += count
                if identity in self.trajectories:
                    sampled = self.trajectories[identity].append_sampled
                    sampled(*p.slice_token_columns(part))
        elif record.kind is RecordKind.CLOSE:
            self.closed_groups.add(p[0])
        elif record.kind is RecordKind.REWARDS:
            self.group_rewards[p[0]] = dict(p[1])
        elif p[0] in self.trajectories:
            self._apply_to_trajectory(self.trajectories[p[0]], record)

    def _apply_to_trajectory(self, trajectory: Trajectory, record: LedgerRecord) -> None:
        p = record.payload
        if record.kind is RecordKind.TURN:
            trajectory.open_turn = Turn(p[1], trajectory.length - trajectory.turn_start)
        elif record.kind is RecordKind.TOOL and trajectory.open_turn is not None:
            trajectory.open_turn.add_call(p[1], p[2], p[3])
        elif record.kind is RecordKind.APPEND:
            trajectory.append(p[1])
        elif record.kind is RecordKind.END:
            reason, reward, error, *metrics = p[1:]  # earlier versions recorded no metrics
            trajectory.outcome = TrajectoryOutcome(
                reason, reward, error, metrics=metrics[0] if metrics else {}
            )

    def list_open_groups(self) -> dict[int, list[Trajectory]]:
        """List unclosed groups with their members in the ledger, in member order."""
        groups: dict[int, list[Trajectory]] = {}
        for t in sorted(self.trajectories.values(), key=lambda t: t.id):
            if extract_group(t.id) not in self.closed_groups:
                t.group_rewards = self.group_rewards.get(t.group)
                groups.setdefault(t.group, []).append(t)
        return groups
