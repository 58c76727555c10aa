"""`meshrl sample`: trajectories of prompts and rows, with reward and tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.common.base.errors import Refused
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.rollout.talking.console import ChatConsole
from meshrl.services.rollout.talking.partner import Partner
from meshrl.services.rollout.talking.sampling import (
    Sampled,
    SampledPrompt,
    document,
    parser,
    prompt_of,
    sample,
    told,
)
from tests.unit.rollout.test_talking import CHAT, GAME, partner_in

ROW = {"prompt": "c-h:", "hidden": "f"}


@pytest.fixture
async def game(tmp_path: Path) -> AsyncIterator[Partner]:
    partner = partner_in(tmp_path, GAME, [], False)
    yield partner
    await partner.close()


async def sampled(partner: Partner, asked: SampledPrompt, *words: str) -> Sampled:
    a = parser().parse_args(["--run=.", "--model=.", "--scratch=.", *words])
    return await sample(partner, 1, asked, a, 7, ChatConsole(SystemHost(), quiet=a.json))


async def test_a_whole_row_has_turns_reward_and_tokens(
    game: Partner, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await sampled(game, SampledPrompt(ROW, True))
    played = found.played
    assert played is not None and found.error == "" and played.score is not None
    assert 0 < played.sampled < played.tokens
    assert capsys.readouterr().out.startswith("prompt:      c-h:\nmodel:")
    reward, tokens = told(found)
    assert reward == f"reward:      {played.score:g}"
    assert tokens.startswith(f"tokens:      {played.tokens}, {played.sampled} sampled")
    line = document(SampledPrompt(ROW, True), found, 1.0, 7)
    assert (line["row"], line["reward"], line["ending"]) == (ROW, played.score, played.reason)
    assert json.loads(json.dumps(line))["turns"] == played.turns


async def test_what_the_environment_raises_is_told_with_what_to_do(game: Partner) -> None:
    found = await sampled(game, SampledPrompt({"prompt": "c-h:"}, False))
    assert found.played is None and "KeyError: 'hidden'" in found.error
    assert "give a whole row" in found.error and list(told(found)) == [
        f"failed:      {found.error}"
    ]
    whole = await sampled(game, SampledPrompt({"prompt": "c-h:"}, True))
    assert "KeyError: 'hidden'" in whole.error and "give a whole row" not in whole.error
    assert document(SampledPrompt({}, True), whole, 1.0, 7)["ending"] == "failed"


async def test_no_more_is_sampled_than_was_asked_for(game: Partner) -> None:
    game.stop = ()  # so that nothing else ends a turn
    found = await sampled(game, SampledPrompt(ROW, True), "--max-tokens=3", "--json")
    assert found.played is not None
    assert (found.played.sampled, found.played.reason) == (3, "length")


async def test_a_prompt_without_room_behind_it_is_refused(game: Partner) -> None:
    long = ROW | {"prompt": "a" * game.most}
    with pytest.raises(Refused, match=f"too long: it has {game.most} tokens"):
        await sampled(game, SampledPrompt(long, True), "--json")


@pytest.mark.rotating(2)
async def test_a_reward_that_needs_more_than_the_prompt_is_missing_and_no_error(
    tmp_path: Path,
) -> None:
    partner = partner_in(tmp_path, CHAT, [], False)
    try:
        found = await sampled(partner, SampledPrompt({"prompt": "1+2?"}, False), "--json")
        assert found.played is not None and found.error == "" and found.played.score is None
        assert "KeyError" in found.note and next(iter(told(found))).endswith("if it needs one")
        whole = await sampled(partner, SampledPrompt({"prompt": "1+2?"}, True), "--json")
        assert whole.note == "" and "KeyError" in whole.error
    finally:
        await partner.close()


def test_a_prompt_that_a_row_of_the_job_has_is_that_row(game: Partner) -> None:
    rows = game.job.rows("train")
    known = next(row for row in rows)
    found = prompt_of(json.dumps({"prompt": known["prompt"]}), game.job)
    assert found.whole and found.row["prompt"] == known["prompt"] and "hidden" in found.row
    assert prompt_of('{"prompt": "?"}', game.job) == SampledPrompt({"prompt": "?"}, False)
    assert prompt_of('{"row": {"a": 1}}', game.job) == SampledPrompt({"a": 1}, True)
