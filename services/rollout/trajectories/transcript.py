"""Text of a trajectory's tokens: its prompt, and its turns for rewards and users.

See docs/use/job-file.md, "Reward arguments", for each turn's keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from meshrl.common.api.engine import LogitAdjustments
from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import RolloutConfig
from meshrl.common.model.tokens.logit_bias import resolve_logit_bias
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.services.rollout.trajectories.trajectory import Trajectory

TRUNCATION_REASONS = ("length", "turns")  # ends of trajectories that the environment has not ended


def find_stop_token_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """Return the ids of `rollout.stop`. Raise ConfigError for a text that is no token."""
    found = {text: tokenizer.token_to_id(text) for text in texts}
    unknown = [text for text, token in found.items() if token is None]
    if unknown:
        raise ConfigError(
            f"{unknown[0]!r} is not a token of the tokenizer",
            where="rollout.stop",
            fix="Name one of its tokens, or set rollout.stop_text to the text",
        )
    return [token for token in found.values() if token is not None]


def build_adjustments(tokenizer: Tokenizer, rollout: RolloutConfig) -> LogitAdjustments:
    """Return the changes of logits that a job wants before sampling."""
    return LogitAdjustments(
        resolve_logit_bias(tokenizer, rollout.logit_bias),
        rollout.repetition_penalty,
        rollout.presence_penalty,
        rollout.min_tokens,
    )


class Transcript:
    """Decoder of one job's trajectories. `decode` is its tokenizer's, with special tokens. A turn
    ends with a token of `stop` or with a text of `stop_text`, unless it was cut.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop_token_ids: Collection[int],
        stop_strings: Sequence[str],
    ) -> None:
        self._decode, self._stop_token_ids, self._stop_strings = (
            decode,
            stop_token_ids,
            stop_strings,
        )

    def decode_prompt(self, trajectory: Trajectory) -> str:
        return self._decode(trajectory.tokens[: trajectory.prompt_length].tolist())

    def build_turns(self, trajectory: Trajectory, reason: str = "") -> list[dict[str, Any]]:
        """Build all turns in order: the model's, its tools', and the text appended after them.

        `reason` is the end of the trajectory: `done`, `length`, `turns`, or the code of a typed
        failure. A failure leaves open whether a complete turn was the last for lack of room.
        """
        turns: list[dict[str, Any]] = []
        tokens, at = trajectory.tokens, trajectory.prompt_length
        for turn in trajectory.all_turns:
            stop = (
                ""
                if turn.is_cut
                else self._find_stop(turn.text, tokens[at : at + turn.sampled_tokens].tolist())
            )
            turns.append({"role": "model", "text": turn.text, "stop": stop, "truncated": False})
            turns += [build_tool_turn(*call) for call in turn.list_calls()]
            at += turn.sampled_tokens
            if turn.appended_tokens:
                text = self._decode(tokens[at : at + turn.appended_tokens].tolist())
                turns.append({"role": "environment", "text": text})
                at += turn.appended_tokens
        if reason in TRUNCATION_REASONS or (
            trajectory.all_turns and trajectory.all_turns[-1].is_cut
        ):
            last = next((turn for turn in reversed(turns) if turn["role"] == "model"), None)
            if last is not None:
                last["truncated"] = True
        return turns

    def decode_unfinished(self, trajectory: Trajectory) -> str:
        """Decode the model's unfinished turn, which no other process has received."""
        turns = trajectory.all_turns
        at = trajectory.prompt_length + sum(
            turn.sampled_tokens + turn.appended_tokens for turn in turns
        )
        return "" if turns and turns[-1].is_cut else self._decode(trajectory.tokens[at:].tolist())

    def _find_stop(self, text: str, ids: list[int]) -> str:
        if ids and ids[-1] in self._stop_token_ids and text.endswith(end := self._decode(ids[-1:])):
            return end
        # A turn ends with the first token that completes a stop text.
        places = [place for stop in self._stop_strings if (place := text.find(stop)) >= 0]
        return text[min(places) :] if places else ""


def build_tool_turn(name: str, argument: Any, value: Any) -> dict[str, Any]:
    """Build the turn of a tool call: `text` is the value as text, or as JSON if it is no text."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return {"role": "tool", "text": text, "name": name, "input": argument, "value": value}
