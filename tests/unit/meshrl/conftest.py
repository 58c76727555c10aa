"""Small complete job that tests of the command line vary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SHAPE = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
CONFIG = ", ".join(f"{key} = {json.dumps(value)}" for key, value in SHAPE.items())
JOB = f"""\
# a job of two rows
name = "tiny"

[model]
tokenizer = "tokenizer.json"
config = {{ {CONFIG} }}

[dataset]
train = "train.jsonl"
held_out = "held.jsonl"

[reward]
use = "rewards:score"

[algorithm]
group_size = 4
"""


NO_TENSORS = b"\x02" + bytes(7) + b"{}"  # a safetensors file without tensors


@pytest.fixture
def shape() -> str:
    """Return the text of a config.json."""
    return json.dumps(SHAPE)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Write a valid job file with all files that it refers to."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n\n{"prompt": "1+2="}\n')
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+3="}\n')
    (tmp_path / "rewards.py").write_text("import tally\n\ndef score(row, turns):\n    return 1.0\n")
    (tmp_path / "tally.py").write_text("COUNT = 1\n")
    (tmp_path / "unrelated.py").write_text("COUNT = 2\n")
    return tmp_path / "job.toml"
