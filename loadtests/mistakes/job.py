"""A user's own job in a folder of its own: it runs as it is, until a mistake is made in it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf_writer import save_model
from meshrl.common.model.network.decoder import Decoder

POSITIONS = 256
LETTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz.#$"
CODE = '''"""What the job asks of its user: a reward."""


def reward(row, turns):
    said = "".join(turn["text"] for turn in turns if turn["role"] == "model")
    return float(said.startswith(row["answer"]))
'''
JOB: dict[str, Any] = {
    "name": "mine",
    "mesh": {"workers": 2},
    "model": {"path": "model"},
    "dataset": {"train": "train.jsonl", "held_out": "held_out.jsonl"},
    "reward": {"use": "mine:reward"},
    "rollout": {"slots": 8, "max_tokens": 24, "stop": ["$"]},
    "algorithm": {
        "groups_per_step": 2,
        "group_size": 2,
        "min_group": 1,
        "filter_zero_variance": False,
    },
    "evaluation": {"every": 0, "before": False, "after": False},
    "budget": {"steps": 2},
}


class Place:
    """The folder of one trial, with the job, its data, its code and a model."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        sums = [(a, b) for a in range(1, 9) for b in range(1, 9)]
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
        self.write("train.jsonl", lines(rows[:40]))
        self.write("held_out.jsonl", lines(rows[40:]))
        self.write("mine.py", CODE)
        self.write("job.toml", toml(JOB))
        make_model(root / "model")

    def path(self, name: str) -> Path:
        return self.root / name

    def write(self, name: str, content: str | bytes | None) -> None:
        file = self.path(name)
        if content is None:
            file.unlink()
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    def set(self, keys: Mapping[str, Any]) -> None:
        job = json.loads(json.dumps(JOB))
        for key, value in keys.items():
            *tables, last = key.split(".")
            table = job
            for name in tables:
                table = table.setdefault(name, {})
            if value is None:
                table.pop(last, None)
            else:
                table[last] = value
        self.write("job.toml", toml(job))

    def config(self, **keys: Any) -> None:
        file = self.path("model/config.json")
        config = json.loads(file.read_text()) | keys
        kept = {key: value for key, value in config.items() if value is not None}
        file.write_text(json.dumps(kept))

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.path("model/model.safetensors"))

    def save_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, self.path("model/model.safetensors"), metadata={"format": "pt"})

    def contents(self) -> dict[str, str]:
        """Return every file of the trial with a digest of its content; links by their targets."""
        found = {}
        for folder, names, files in os.walk(self.root):
            for name in (*names, *files):
                path = Path(folder, name)
                key = str(path.relative_to(self.root))
                if path.is_symlink():
                    found[key] = f"-> {os.readlink(path)}"
                elif path.is_file():
                    found[key] = hashlib.blake2b(path.read_bytes()).hexdigest()
                elif path.is_dir():
                    found[key] = "folder"
        return found


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """Return a table of tables, texts, numbers and lists as TOML, whose values are written as in
    JSON.
    """
    own = {key: value for key, value in table.items() if not isinstance(value, dict)}
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in own.items())
    for key, value in table.items():
        if isinstance(value, dict):
            text += f"\n[{prefix}{key}]\n" + toml(value, f"{prefix}{key}.")
    return text


def make_model(directory: Path) -> None:
    """Write a tiny Llama with random weights, and a tokenizer with one token per letter."""
    vocabulary = {letter: index for index, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = ModelConfig.from_hf(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": POSITIONS,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
        }
    )
    decoder = Decoder(config)
    decoder.initialise(torch.Generator().manual_seed(0))
    save_model(directory, config, decoder.state_dict())
