"""One trajectory: its tokens, its turns, and how it is rebuilt from the ledger."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.mesh.telemetry.stopwatch import UNTIMED, Untimed
from common.records.ledger import Kind, Record, group_of, trajectory_id
from common.records.token_record import TokenRows, some
from services.rollout.trajectories.buffers import ExpertIds, Floats, Ints, TokenBuffer


@dataclass(slots=True)
class Turn:
    """A turn of the model with what the environment answered, as far as it has got."""

    text: str
    tokens: int  # sampled in this turn
    tool: str = ""
    input: Any = None
    value: Any = None
    answered: bool = False  # the tool's value is logged
    earlier: list[tuple[str, Any, Any]] = field(default_factory=list)  # calls before that one
    appended: int = 0  # tokens of the environment that follow it
    cut: bool = False  # the trajectory ended in the middle of it

    def called(self, tool: str, input: Any, value: Any) -> None:
        """A tool's value is logged, perhaps after others of this turn."""
        self.earlier = self.calls()
        self.tool, self.input, self.value, self.answered = tool, input, value, True

    def calls(self) -> list[tuple[str, Any, Any]]:
        """(tool, input, value) of all calls of this turn so far."""
        return self.earlier + ([(self.tool, self.input, self.value)] if self.answered else [])


@dataclass(slots=True)
class Ending:
    reason: str  # done, length, turns, or the code of a typed failure
    reward: float | None = None
    error: str = ""
    kind: str = ""  # of a typed failure, while this shard lives


def _ended(reason: str, reward: float | None, error: str) -> Ending:
    """Return an ending on record. Earlier versions recorded rewards that are not finite."""
    if reward is None or math.isfinite(reward):
        return Ending(reason, reward, error)
    return Ending("failed", None, f"the reward was {reward}", "reward is not finite")


class Trajectory:
    """A prompt and what follows it: a view of its buffer of tokens, cut into turns."""

    def __init__(self, group: int, member: int, prompt: int, version: int, seed: int) -> None:
        self.id = trajectory_id(group, member)
        self.group, self.member, self.prompt, self.seed = group, member, prompt, seed
        # Of the mesh when its group was admitted: engines below it may not serve it.
        self.version = version
        self.buffer = TokenBuffer()
        self.prompt_length = 0
        self.turn_start = 0  # where this turn's sampled tokens begin
        self.past_turns: list[Turn] = []
        self.open_turn: Turn | None = None  # the environment has seen the turn, and not answered
        self.ending: Ending | None = None
        self.last: list[int] = []  # a last observation, which no turn follows
        self.recorded = True  # training trajectories are in the ledger, evaluation is not
        self.temperature = 1.0
        self.watch: Untimed = UNTIMED  # says where its time goes
        self.scores: dict[str, np.ndarray] = {}  # frozen models' numbers, one for each token

    @property
    def length(self) -> int:
        """Tokens that count: those of a turn that goes on as soon as they are written down."""
        return self.buffer.length

    @property
    def tokens(self) -> Ints:
        return self.buffer.tokens

    @property
    def logprobs(self) -> Floats:
        return self.buffer.logprobs

    @property
    def versions(self) -> Ints:
        return self.buffer.versions

    @property
    def experts(self) -> ExpertIds:
        """The tokens' experts as `common.base.experts` lays them out: NO_EXPERTS if no token
        came with any.
        """
        return self.buffer.experts

    @property
    def turn(self) -> Ints:
        """Ids sampled in the current turn."""
        return self.tokens[self.turn_start :]

    def appended(self, ids: list[int]) -> None:
        """Takes tokens of the prompt or the environment; the model's next turn follows them."""
        self.buffer.appended(ids)
        self.turn_start = self.length
        if self.open_turn is not None:
            self.open_turn.appended = len(ids)
            self.past_turns.append(self.open_turn)
            self.open_turn = None

    def ended_with(self, ids: list[int]) -> None:
        """Takes the last observation of an environment that has ended the trajectory."""
        self.last = ids
        self.appended(ids)

    def begin(self, prompt: list[int]) -> None:
        """(Re)starts at the prompt."""
        self.buffer.clear()
        self.last = []
        self.past_turns, self.open_turn, self.ending = [], None, None
        self.appended(prompt)
        self.prompt_length = len(prompt)

    @property
    def every_turn(self) -> list[Turn]:
        """Those that are over, and the one that the environment has not answered yet."""
        return self.past_turns + ([self.open_turn] if self.open_turn else [])

    def called(self) -> list[tuple[str, Any, Any]]:
        """(tool, input, value) of all calls so far."""
        return [call for r in self.every_turn for call in r.calls()]

    def replay(self, *, answered: bool = False) -> list[Any]:
        """What an environment must be told again to stand where this trajectory stands.

        An open turn counts as far as it has got: the environment has seen its turn, and the last
        tool's value only when it has `answered` to that.
        """
        told: list[Any] = []
        tokens, at = self.tokens, self.prompt_length
        for r in self.every_turn:
            told.append(["step", tokens[at : at + r.tokens].tolist()])
            at += r.tokens + r.appended
            seen = r.earlier if r is self.open_turn and not answered else r.calls()
            told += [["result", value] for _, _, value in seen]
        return told


@dataclass(slots=True)
class Restored:
    """What a shard's ledger knows of its unfinished groups."""

    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)  # trajectories that go no further than a gap

    def gap(self) -> None:
        """Records are lost here: what comes later of trajectories that are known by now does not
        follow what is known of them. They stand where they stood, unless they are opened again.
        """
        self.cut |= self.trajectories.keys()

    def counted(self, record: Record) -> Record | None:
        """What of a record counts after the gaps so far."""
        p = record.payload
        if not self.cut or record.kind in (Kind.OPEN, Kind.CLOSE):
            return record
        if record.kind is not Kind.TOKENS:
            return None if p[0] in self.cut else record
        chosen = ~np.isin(p.ids, list(self.cut))
        return Record(record.kind, some(p, chosen)) if chosen.any() else None

    def apply(self, record: Record, seed_of: Any) -> None:
        """Replays one record; records of one trajectory come in the order they were written."""
        counted = self.counted(record)
        if counted is None:
            return
        p = counted.payload
        if record.kind is Kind.OPEN:
            group, member, prompt, version, ids = p
            t = Trajectory(group, member, prompt, version, seed_of(group, member))
            t.begin(ids)
            self.trajectories[t.id] = t
            self.cut.discard(t.id)
        elif record.kind is Kind.TOKENS:
            self._tokens(p)
        elif record.kind is Kind.CLOSE:
            self.closed.add(p[0])
        elif p[0] in self.trajectories:
            self._continue(self.trajectories[p[0]], record)

    def _continue(self, t: Trajectory, record: Record) -> None:
        p = record.payload
        if record.kind is Kind.TURN:
            t.open_turn = Turn(p[1], t.length - t.turn_start)
        elif record.kind is Kind.TOOL and t.open_turn is not None:
            t.open_turn.called(p[1], p[2], p[3])
        elif record.kind is Kind.APPEND:
            t.appended(p[1])
        elif record.kind is Kind.END:
            t.ending = _ended(*p[1:4])

    def _tokens(self, rows: TokenRows) -> None:
        at = 0
        for identity, count in zip(rows.ids.tolist(), rows.counts.tolist(), strict=True):
            part = slice(at, at + count)
            at += count
            if identity in self.trajectories:
                sampled = self.trajectories[identity].buffer.sampled
                sampled(*rows.columns(part))

    def by_group(self) -> dict[int, list[Trajectory]]:
        """Unclosed groups with the members the ledger knows, in member order."""
        groups: dict[int, list[Trajectory]] = {}
        for t in sorted(self.trajectories.values(), key=lambda t: t.id):
            if group_of(t.id) not in self.closed:
                groups.setdefault(t.group, []).append(t)
        return groups
