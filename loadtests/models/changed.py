"""Changes of a checkpoint that MeshRL must refuse, or compute as `transformers` does."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file

# Keys of config.json and what they are set to; null removes the key.
KEYS = Path(__file__).with_name("changed.jsonl")
FILES = ("float8_e4m3fn", "float8_e5m2", "int8", "int32", "nan", "infinite")


def change(random: Random, directory: Path) -> str:
    """Changes a key of config.json or, more rarely, a tensor; returns what it did."""
    if random.random() < 0.15:
        return _tensor(random, directory / "model.safetensors")
    key, value = json.loads(random.choice(KEYS.read_text().splitlines()))
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    if value is None:
        raw.pop(key, None)
    else:
        raw[key] = value
    file.write_text(json.dumps(raw))
    return f"{key} = {value!r}"


def _tensor(random: Random, file: Path) -> str:
    tensors = load_file(file)
    name = random.choice([name for name in sorted(tensors) if name.startswith("model.layers")])
    kind = random.choice(FILES)
    if kind in ("nan", "infinite"):
        broken = torch.nan if kind == "nan" else torch.inf
        tensors[name].view(-1)[random.randrange(tensors[name].numel())] = broken
    else:
        tensors[name] = tensors[name].to(getattr(torch, kind))
    save_file(tensors, file, metadata={"format": "pt"})
    return f"{name} is {kind}"
