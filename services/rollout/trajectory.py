"""One trajectory: its tokens, its turns, and how it is rebuilt from the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from common.experts import NO_EXPERTS, UNKNOWN
from common.ledger import Kind, Record, group_of, trajectory_id
from common.tokenrecord import TokenRows

NOT_SAMPLED = -1  # weight version of a token that the model did not sample


@dataclass(slots=True)
class Round:
    """A turn of the model with what the environment answered, as far as it has got."""

    text: str
    tokens: int  # sampled in this turn
    tool: str = ""
    input: Any = None
    value: Any = None
    answered: bool = False  # the tool's value is logged
    earlier: list[tuple[str, Any, Any]] = field(default_factory=list)  # calls before that one

    def called(self, tool: str, input: Any, value: Any) -> None:
        """A tool's value is logged, perhaps after others of this turn."""
        self.earlier = self.calls()
        self.tool, self.input, self.value, self.answered = tool, input, value, True

    def calls(self) -> list[tuple[str, Any, Any]]:
        """(tool, input, value) of all calls of this turn so far."""
        return self.earlier + ([(self.tool, self.input, self.value)] if self.answered else [])

    def history(self) -> list[dict[str, Any]]:
        """The turn as a reward function sees it."""
        turns: list[dict[str, Any]] = [{"role": "model", "text": self.text}]
        for name, argument, value in self.calls():
            turns.append({"role": "tool", "name": name, "input": argument, "value": value})
        return turns


@dataclass(slots=True)
class Ending:
    reason: str  # done, length, turns, or the code of a typed failure
    reward: float | None = None
    error: str = ""


class Stage(Protocol):
    """Where tokens of a turn that goes on lie until somebody reads them; see `Staging`."""

    def waiting(self, row: int) -> int: ...
    def settle(self, row: int) -> None: ...


class Trajectory:
    """Token ids, log-probabilities and versions side by side, in buffers that grow."""

    def __init__(self, group: int, member: int, prompt: int, version: int, seed: int) -> None:
        self.id = trajectory_id(group, member)
        self.group, self.member, self.prompt, self.seed = group, member, prompt, seed
        self.version = (
            version  # of the mesh when its group was admitted: engines below it may not serve it
        )
        self.prompt_length = 0
        self.turn_start = 0  # where this turn's sampled tokens begin
        self.rounds: list[Round] = []
        self.open_round: Round | None = None  # the environment has seen the turn, and not answered
        self.ending: Ending | None = None
        self.attempts = 0  # engines that failed since the last token
        self.failing_since = 0.0  # by the clock: the first of them
        self.engine = ""  # that holds its keys and values
        self.recorded = True  # training trajectories are in the ledger, evaluation is not
        self.temperature = 1.0
        self.scores: dict[str, np.ndarray] = {}  # of frozen models, beside the tokens
        self._stage: Stage | None = None  # while a request is out
        self._row = 0
        self._length = 0  # of what is in the buffers
        self._tokens = np.zeros(64, np.int32)
        self._logprobs = np.zeros(64, np.float32)
        self._versions = np.full(64, NOT_SAMPLED, np.int32)
        self._experts = NO_EXPERTS  # beside the others, once there are some

    @property
    def length(self) -> int:
        """Tokens that count: those of a turn that goes on as soon as they are written down."""
        if self._stage is None:
            return self._length
        return self._length + self._stage.waiting(self._row)

    @property
    def tokens(self) -> np.ndarray:
        self._settle()
        return self._tokens[: self._length]

    @property
    def logprobs(self) -> np.ndarray:
        self._settle()
        return self._logprobs[: self._length]

    @property
    def versions(self) -> np.ndarray:
        self._settle()
        return self._versions[: self._length]

    @property
    def experts(self) -> np.ndarray:
        """As `common.experts` has them: NO_EXPERTS if no token came with any."""
        self._settle()
        return self._experts[: self._length]

    @property
    def turn(self) -> np.ndarray:
        """Ids sampled in the current turn."""
        return self.tokens[self.turn_start :]

    def stage(self, stage: Stage | None, row: int) -> None:
        """Where the tokens of its request are from now on; None: nowhere but here."""
        self._stage, self._row = stage, row

    def _settle(self) -> None:
        if self._stage is not None:
            self._stage.settle(self._row)

    def _room(self, n: int) -> slice:
        end = self._length + n
        if end > len(self._tokens):
            grown = max(end, 2 * len(self._tokens))
            extra = grown - len(self._tokens)
            self._tokens = np.concatenate([self._tokens, np.zeros(extra, np.int32)])
            self._logprobs = np.concatenate([self._logprobs, np.zeros(extra, np.float32)])
            self._versions = np.concatenate([self._versions, np.full(extra, NOT_SAMPLED, np.int32)])
            if width := self._experts.shape[1]:
                unknown = np.full((extra, width), UNKNOWN, np.int16)
                self._experts = np.concatenate([self._experts, unknown])
        where = slice(self._length, end)
        self._length = end
        return where

    def sampled(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        versions: np.ndarray,
        experts: np.ndarray = NO_EXPERTS,
    ) -> None:
        """Tokens of the model."""
        where = self._room(len(tokens))
        self._tokens[where] = tokens
        self._logprobs[where] = logprobs
        self._versions[where] = versions
        self._routed(where, experts)
        self.attempts = 0

    def _routed(self, where: slice, experts: np.ndarray) -> None:
        """Notes the experts of tokens that there is room for; NO_EXPERTS: unknown."""
        width = experts.shape[1]
        if width and not self._experts.shape[1]:
            self._experts = np.full((len(self._tokens), width), UNKNOWN, np.int16)
        if self._experts.shape[1]:
            self._experts[where] = experts if width else UNKNOWN

    def appended(self, ids: list[int]) -> None:
        """Tokens of the prompt or the environment; the model's next turn begins after them."""
        where = self._room(len(ids))
        self._tokens[where] = ids
        self._logprobs[where] = 0.0
        self._versions[where] = NOT_SAMPLED
        self._routed(where, NO_EXPERTS)
        self.turn_start = self._length
        if self.open_round is not None:
            self.rounds.append(self.open_round)
            self.open_round = None

    def begin(self, prompt: list[int]) -> None:
        """(Re)starts at the prompt."""
        self._length = 0
        self.rounds, self.open_round, self.ending = [], None, None
        self.appended(prompt)
        self.prompt_length = len(prompt)

    def turns(self) -> list[dict[str, Any]]:
        """All turns, for the reward function."""
        rounds = self.rounds + ([self.open_round] if self.open_round else [])
        return [turn for r in rounds for turn in r.history()]

    def called(self) -> list[tuple[str, Any, Any]]:
        """(tool, input, value) of all calls so far."""
        rounds = self.rounds + ([self.open_round] if self.open_round else [])
        return [call for r in rounds for call in r.calls()]

    def replay(self, *, answered: bool = False) -> list[Any]:
        """What an environment must be told again to stand where this trajectory stands.

        An open round counts as far as it has got: the environment has seen its turn, and the last
        tool's value only when it has `answered` to that.
        """
        told: list[Any] = []
        tokens, versions = self.tokens, self.versions
        at = self.prompt_length
        for r in self.rounds + ([self.open_round] if self.open_round else []):
            sampled = versions[at:] != NOT_SAMPLED
            at += int(np.argmax(sampled)) if len(sampled) else 0
            told.append(["step", tokens[at : at + r.tokens].tolist()])
            at += r.tokens
            seen = r.earlier if r is self.open_round and not answered else r.calls()
            told += [["result", value] for _, _, value in seen]
        return told


@dataclass(slots=True)
class Restored:
    """What a shard's ledger knows of its unfinished groups."""

    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)

    def apply(self, record: Record, seed_of: Any) -> None:
        """Replays one record; records of one trajectory come in the order they were written."""
        p = record.payload
        if record.kind is Kind.OPEN:
            group, member, prompt, version, ids = p
            t = Trajectory(group, member, prompt, version, seed_of(group, member))
            t.begin(ids)
            self.trajectories[t.id] = t
        elif record.kind is Kind.TOKENS:
            self._tokens(p)
        elif record.kind is Kind.CLOSE:
            self.closed.add(p[0])
        elif p[0] in self.trajectories:
            self._continue(self.trajectories[p[0]], record)

    def _continue(self, t: Trajectory, record: Record) -> None:
        p = record.payload
        if record.kind is Kind.TURN:
            t.open_round = Round(p[1], t.length - t.turn_start)
        elif record.kind is Kind.TOOL and t.open_round is not None:
            t.open_round.called(p[1], p[2], p[3])
        elif record.kind is Kind.APPEND:
            t.appended(p[1])
        elif record.kind is Kind.END:
            t.ending = Ending(p[1], p[2], p[3])

    def _tokens(self, rows: TokenRows) -> None:
        at = 0
        for identity, count in zip(rows.ids.tolist(), rows.counts.tolist(), strict=True):
            part = slice(at, at + count)
            at += count
            if identity in self.trajectories:
                sampled = self.trajectories[identity].sampled
                sampled(*rows.columns(part))

    def by_group(self) -> dict[int, list[Trajectory]]:
        """Unclosed groups with the members the ledger knows, in member order."""
        groups: dict[int, list[Trajectory]] = {}
        for t in sorted(self.trajectories.values(), key=lambda t: t.id):
            if group_of(t.id) not in self.closed:
                groups.setdefault(t.group, []).append(t)
        return groups
