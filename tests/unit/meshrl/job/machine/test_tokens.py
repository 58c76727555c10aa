"""Positions, the tokenizer's ids and the tokens that end a turn are checked against the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from meshrl.job import jobfile
from meshrl.job.checks.machine import tokens
from tests.unit.meshrl.conftest import SHAPE
from tests.unit.meshrl.job.machine.conftest import read, refusal


def frozen(directory: Path, positions: int) -> None:
    directory.mkdir()
    described = SHAPE | {"max_position_embeddings": positions}
    (directory / "config.json").write_text(json.dumps(described))


def test_trajectories_longer_than_the_models_positions_are_refused(place: Path) -> None:
    positions = "model.config.max_position_embeddings=256"
    tokens.positions(read(place, positions, "rollout.max_tokens=256"))
    with pytest.raises(
        Exception, match=r"max_tokens = 320 \(the default\) exceeds .* 256 pos"
    ) as e:
        tokens.positions(jobfile.read(place, [positions]))
    assert "Set rollout.max_tokens to 256 or less" in str(e.value)


def test_so_are_those_that_a_frozen_model_has_no_positions_for(place: Path) -> None:
    frozen(place.parent / "teacher", 48)
    teacher = "models.teacher.path=teacher"
    said = refusal(tokens.positions, place, teacher)
    assert "models.teacher" in said and "rollout.max_tokens = 64" in said and "48" in said
    said = refusal(tokens.positions, place, teacher, "models.teacher.max_tokens=50")
    assert "models.teacher.max_tokens = 50 exceeds" in said
    tokens.positions(read(place, teacher, "models.teacher.max_tokens=48"))


def test_added_tokens_count_where_ids_are_compared_with_rows(place: Path) -> None:
    tokens.vocabulary(read(place))
    file = place.parent / "added.json"
    backend = Backend.from_file(str(place.parent / "tokenizer.json"))
    backend.add_tokens([AddedToken(f"<extra {i}>") for i in range(5)])
    backend.save(str(file))
    said = refusal(tokens.vocabulary, place, "model.tokenizer=added.json")
    assert "ids up to 16 ('<extra 4>')" in said


def test_tokens_that_end_a_turn_are_taken(place: Path) -> None:
    tokens.stop(read(place, 'rollout.stop=["="]', 'rollout.stop_text=["12="]'))
