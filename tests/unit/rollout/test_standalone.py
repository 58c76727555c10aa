"""Conversation of a person with a model in its job's environment, without a mesh."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.common.base.errors import NotFound, Refused, ToolFailed
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import load_model_config
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.model.files.hf_writer import save_model
from meshrl.common.model.network.decoder import Decoder
from meshrl.job import bundle, job_reader
from meshrl.services.rollout.standalone.__main__ import choose_row
from meshrl.services.rollout.standalone.console import ChatConsole
from meshrl.services.rollout.standalone.local_player import LocalPlayer, PlayedTrajectory
from meshrl.services.rollout.standalone.sampling import (
    PromptRequest,
    SampleResult,
    build_document,
    create_parser,
    format_result,
    parse_prompt,
    sample,
)
from tests.load import scaled

ROOT = Path(__file__).parents[3]
GAME = ROOT / "meshrl/job_template/game/job.toml"
CHAT = ROOT / "examples/chat.toml"


def create_player(
    tmp_path: Path, job_file: Path, settings: list[str], converse: bool
) -> LocalPlayer:
    """Create a player with a random model: its text is noise, and the turns that follow are
    exact.
    """
    config, base = job_reader.load_config(job_file, settings)
    _, document = bundle.pack_bundle(config, base, tmp_path / "run")
    job = JobData.from_document(
        config.name, json.loads(json.dumps(document)), str(tmp_path / "run")
    )
    shape = load_model_config(job)
    decoder = Decoder(shape)
    decoder.initialise(torch.Generator().manual_seed(0))
    save_model(tmp_path / "model", shape, decoder.state_dict(), job.tokenizer_file)
    return LocalPlayer(SystemHost(), job, tmp_path / "model", tmp_path, is_conversation=converse)


async def run_player(player: LocalPlayer, play: Callable[[LocalPlayer], Any]) -> Any:
    try:
        async with asyncio.timeout(scaled(90.0)):
            return await play(player)
    finally:
        await player.close()


def test_row_is_chosen_by_number_and_its_prompt_can_be_replaced() -> None:
    rows = [{"prompt": "a-c:", "hidden": "b"}, {"prompt": "d-f:", "hidden": "e"}]
    config = JobConfig()
    assert choose_row(config, rows, 1, None) == rows[1]
    assert choose_row(config, rows, 1, "a-l:") == {"prompt": "a-l:", "hidden": "e"}
    assert choose_row(config, rows, None, "a-l:") == {"prompt": "a-l:"}
    with pytest.raises(NotFound, match="Choose a row from 0 to 1"):
        choose_row(config, rows, 2, None)


async def test_row_is_played_in_the_jobs_environment_and_rewarded(tmp_path: Path) -> None:
    row = {"prompt": "c-h:", "hidden": "f"}
    shown: list[dict[str, Any]] = []

    async def play(player: LocalPlayer) -> PlayedTrajectory:
        with pytest.raises(ToolFailed, match="KeyError: 'hidden'"):
            await player.play(1, {"prompt": "c-h:"}, 1.0, 1, shown.append)
        shown.clear()
        for key in range(2, 30):  # a game whose first letter leaves guesses open
            played: PlayedTrajectory = await player.play(
                key, row, 20.0, key, shown.append, with_reward=True
            )
            if len(played.turns) > 2:
                return played
            shown.clear()
        raise AssertionError("every game ended at once")

    played = await run_player(create_player(tmp_path, GAME, [], False), play)
    first, answer = played.turns[:2]
    assert played.prompt == "c-h:" and first["role"] == "model"
    assert answer == {"role": "environment", "text": "<" if first["text"] > "f" else ">"}
    assert [turn["text"] for turn in shown] == ["c-h:", *(t["text"] for t in played.turns)]
    assert played.score is not None and 0.0 <= played.score <= 1.0


async def test_conversation_continues_until_the_input_ends(tmp_path: Path) -> None:
    words = iter(["3+4?", None])
    shown: list[dict[str, Any]] = []

    async def read_line() -> str | None:
        return next(words)

    async def play(player: LocalPlayer) -> PlayedTrajectory:
        # Any sampled token of these ends its turn; they are nearly all tokens.
        tokens = player.tokenizer.vocabulary
        player.stop_token_ids = tuple(
            token for text, token in tokens.items() if not text.startswith("<tool")
        )[:480]
        played: PlayedTrajectory = await player.play(
            1, {"prompt": "1+2?"}, 1.0, 3, shown.append, read_line
        )
        return played

    played = await run_player(create_player(tmp_path, CHAT, [], True), play)
    assert "1+2?<|im_end|>" in played.prompt and '"name": "add"' in played.prompt
    models = [turn for turn in played.turns if turn["role"] == "model"]
    assert len(models) == 2 and played.reason == "done"
    [environment_text] = [turn["text"] for turn in played.turns if turn["role"] == "environment"]
    assert "<|im_start|>user\n3+4?<|im_end|>" in environment_text


ROW = {"prompt": "c-h:", "hidden": "f"}


@pytest.fixture
async def game(tmp_path: Path) -> AsyncIterator[LocalPlayer]:
    player = create_player(tmp_path, GAME, [], False)
    yield player
    await player.close()


async def sample_row(
    player: LocalPlayer, prompt_request: PromptRequest, *words: str
) -> SampleResult:
    a = create_parser().parse_args(["--run=.", "--model=.", "--scratch=.", *words])
    return await sample(player, 1, prompt_request, a, 7, ChatConsole(SystemHost(), quiet=a.json))


async def test_complete_row_has_turns_reward_and_tokens(
    game: LocalPlayer, capsys: pytest.CaptureFixture[str]
) -> None:
    result = await sample_row(game, PromptRequest(ROW, True))
    played = result.trajectory
    assert played is not None and result.error == "" and played.score is not None
    assert 0 < played.sampled_tokens < played.tokens
    assert capsys.readouterr().out.startswith("prompt:      c-h:\nmodel:")
    reward, tokens = format_result(result)
    assert reward == f"reward:      {played.score:g}"
    assert tokens.startswith(f"tokens:      {played.tokens}, {played.sampled_tokens} sampled")
    line = build_document(PromptRequest(ROW, True), result, 1.0, 7)
    assert (line["row"], line["reward"], line["ending"]) == (ROW, played.score, played.reason)
    assert json.loads(json.dumps(line))["turns"] == played.turns


async def test_environment_error_is_shown_with_a_fix(game: LocalPlayer) -> None:
    result = await sample_row(game, PromptRequest({"prompt": "c-h:"}, False))
    assert result.trajectory is None and "key 'hidden' (" in result.error
    assert "Pass a whole row" in result.error and list(format_result(result)) == [
        f"failed:      {result.error}"
    ]
    whole = await sample_row(game, PromptRequest({"prompt": "c-h:"}, True))
    assert "KeyError: 'hidden'" in whole.error and "Pass a whole row" not in whole.error
    assert build_document(PromptRequest({}, True), whole, 1.0, 7)["ending"] == "failed"


async def test_sampling_stops_at_max_tokens(game: LocalPlayer) -> None:
    game.stop_token_ids = ()  # so that no other limit ends a turn
    result = await sample_row(game, PromptRequest(ROW, True), "--max-tokens=3", "--json")
    assert result.trajectory is not None
    assert (result.trajectory.sampled_tokens, result.trajectory.reason) == (3, "length")


async def test_prompt_that_fills_the_context_is_rejected(game: LocalPlayer) -> None:
    long = ROW | {"prompt": "a" * game.max_length}
    with pytest.raises(Refused, match=f"the prompt has {game.max_length} tokens"):
        await sample_row(game, PromptRequest(long, True), "--json")


@pytest.mark.rotating(2)
async def test_reward_that_needs_row_fields_is_missing_for_a_bare_prompt(tmp_path: Path) -> None:
    player = create_player(tmp_path, CHAT, [], False)
    try:
        result = await sample_row(player, PromptRequest({"prompt": "1+2?"}, False), "--json")
        assert (
            result.trajectory is not None and result.error == "" and result.trajectory.score is None
        )
        assert "the reward needs the row's key 'answer'" in result.note
        assert result.note in next(iter(format_result(result)))
        whole = await sample_row(player, PromptRequest({"prompt": "1+2?"}, True), "--json")
        assert whole.note == "" and "KeyError" in whole.error
    finally:
        await player.close()


def test_prompt_of_a_job_row_selects_that_row(game: LocalPlayer) -> None:
    rows = game.job.read_rows("train")
    known = next(row for row in rows)
    result = parse_prompt(json.dumps({"prompt": known["prompt"]}), game.job)
    assert result.is_complete and result.row["prompt"] == known["prompt"] and "hidden" in result.row
    assert parse_prompt('{"prompt": "?"}', game.job) == PromptRequest({"prompt": "?"}, False)
    assert parse_prompt('{"row": {"a": 1}}', game.job) == PromptRequest({"a": 1}, True)
