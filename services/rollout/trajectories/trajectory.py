"""One trajectory: its tokens, its turns, and how it is rebuilt from the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshrl.common.base.experts import NO_EXPERTS, UNKNOWN
from meshrl.common.mesh.telemetry.stopwatch import UNTIMED, Untimed
from meshrl.common.records.ledger import Kind, Record, group_of, trajectory_id
from meshrl.common.records.token_record import some

NOT_SAMPLED = -1  # weight version of a token that the model did not sample
FIRST_TOKENS = 64  # room that a buffer begins with

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
ExpertIds = NDArray[np.int16]


class StagedRow(Protocol):
    """Where the newest tokens lie while a request is out; see `staging.py`."""

    @property
    def staged(self) -> int:
        """Tokens that are there."""

    def settle(self) -> None:
        """Moves them into the buffer's own columns."""


class TokenBuffer:
    """Ids, log-probabilities, weight versions and experts, one entry of each a token, in columns
    that grow. Staging holds the newest ones for a while.
    """

    __slots__ = ("_experts", "_length", "_logprobs", "_row", "_tokens", "_versions")

    def __init__(self) -> None:
        self._row: StagedRow | None = None  # while a request is out
        self._length = 0  # tokens in the columns
        self._tokens = np.zeros(FIRST_TOKENS, np.int32)
        self._logprobs = np.zeros(FIRST_TOKENS, np.float32)
        self._versions = np.full(FIRST_TOKENS, NOT_SAMPLED, np.int32)
        self._experts = NO_EXPERTS  # beside the others, once there are some

    @property
    def length(self) -> int:
        """Tokens that count, the staged ones too."""
        if self._row is None:
            return self._length
        return self._length + self._row.staged

    @property
    def tokens(self) -> Ints:
        """int32 [length]."""
        self._settle()
        return self._tokens[: self._length]

    @property
    def logprobs(self) -> Floats:
        """float32 [length]; 0 where nothing was sampled."""
        self._settle()
        return self._logprobs[: self._length]

    @property
    def versions(self) -> Ints:
        """int32 [length], of the weights that sampled each token; NOT_SAMPLED elsewhere."""
        self._settle()
        return self._versions[: self._length]

    @property
    def experts(self) -> ExpertIds:
        """int16 [length, layers x k] as `meshrl.common.base.experts` has them; NO_EXPERTS if none
        came."""
        self._settle()
        return self._experts[: self._length]

    def stage(self, row: StagedRow | None) -> None:
        """Where the newest tokens lie from now on; None: nowhere but here."""
        self._settle()
        self._row = row

    def sampled(
        self, tokens: Ints, logprobs: Floats, versions: Ints, experts: ExpertIds = NO_EXPERTS
    ) -> None:
        """Takes tokens of the model, [n] each, experts [n, layers x k] or NO_EXPERTS."""
        where = self._room(len(tokens))
        self._tokens[where] = tokens
        self._logprobs[where] = logprobs
        self._versions[where] = versions
        self._routed(where, experts)

    def appended(self, ids: list[int]) -> None:
        where = self._room(len(ids))
        self._tokens[where] = ids
        self._logprobs[where] = 0.0
        self._versions[where] = NOT_SAMPLED
        self._routed(where, NO_EXPERTS)

    def clear(self) -> None:
        self._settle()
        self._length = 0

    def _settle(self) -> None:
        if self._row is not None:
            self._row.settle()

    def _room(self, n: int) -> slice:
        end = self._length + n
        if end > len(self._tokens):
            n = max(end, 2 * len(self._tokens)) - len(self._tokens)  # that it grows by
            self._tokens = np.concatenate([self._tokens, np.zeros(n, np.int32)])
            self._logprobs = np.concatenate([self._logprobs, np.zeros(n, np.float32)])
            self._versions = np.concatenate([self._versions, np.full(n, NOT_SAMPLED, np.int32)])
            if width := self._experts.shape[1]:
                unknown = np.full((n, width), UNKNOWN, np.int16)
                self._experts = np.concatenate([self._experts, unknown])
        where = slice(self._length, end)
        self._length = end
        return where

    def _routed(self, where: slice, experts: ExpertIds) -> None:
        """Notes the experts of tokens that there is room for; NO_EXPERTS: unknown."""
        width = experts.shape[1]
        if width and not self._experts.shape[1]:
            self._experts = np.full((len(self._tokens), width), UNKNOWN, np.int16)
        if self._experts.shape[1]:
            self._experts[where] = experts if width else UNKNOWN


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
        return self.earlier + ([(self.tool, self.input, self.value)] if self.answered else [])


@dataclass(slots=True)
class Ending:
    reason: str  # done, length, turns, or the code of a typed failure
    reward: float | None = None
    error: str = ""
    kind: str = ""  # of a typed failure, while this shard lives


class Trajectory(TokenBuffer):
    """A prompt and what follows it: tokens, cut into turns."""

    def __init__(self, group: int, member: int, prompt: int, version: int, seed: int) -> None:
        super().__init__()
        self.id = trajectory_id(group, member)
        self.group, self.member, self.prompt, self.seed = group, member, prompt, seed
        # Of the mesh when its group was admitted: engines below it may not serve it.
        self.version = version
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
    def turn(self) -> Ints:
        """Ids sampled in the current turn."""
        return self.tokens[self.turn_start :]

    def appended(self, ids: list[int]) -> None:
        """Takes tokens of the prompt or the environment; the model's next turn follows them."""
        super().appended(ids)
        self.turn_start = self.length
        if self.open_turn is not None:
            self.open_turn.appended = len(ids)
            self.past_turns.append(self.open_turn)
            self.open_turn = None

    def ended_with(self, ids: list[int]) -> None:
        self.last = ids
        self.appended(ids)

    def begin(self, prompt: list[int]) -> None:
        self.clear()
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
            at = 0
            for identity, count in zip(p.ids.tolist(), p.counts.tolist(), strict=True):
                part = slice(at, at + count)
                at += count
                if identity in self.trajectories:
                    sampled = self.trajectories[identity].sampled
                    sampled(*p.columns(part))
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
            t.ending = Ending(*p[1:4])

    def by_group(self) -> dict[int, list[Trajectory]]:
        """Unclosed groups with the members the ledger knows, in member order."""
        groups: dict[int, list[Trajectory]] = {}
        for t in sorted(self.trajectories.values(), key=lambda t: t.id):
            if group_of(t.id) not in self.closed:
                groups.setdefault(t.group, []).append(t)
        return groups
