"""Changes of a trial's model and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from loadtests.mistakes.job import Place

_FILE = "model/model.safetensors"
_TOKENIZER = "model/tokenizer.json"


def _change_matrices(place: Place, dtype: str) -> None:
    """Store every matrix of a layer in another type, as quantized checkpoints do."""
    tensors = place.weights()
    layers = {name for name in tensors if ".layers." in name and tensors[name].dim() == 2}
    other = getattr(torch, dtype)
    place.save_weights({n: t.to(other) if n in layers else t for n, t in tensors.items()})


def _truncate(place: Place) -> None:
    file = place.path(_FILE)
    file.write_bytes(file.read_bytes()[:-1000])


def _drop_shard(place: Place) -> None:
    tensors = place.weights()
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    place.path(_FILE).rename(place.path("model/model-00001-of-00002.safetensors"))
    place.write("model/model.safetensors.index.json", json.dumps({"weight_map": names}))


def _set_nan(place: Place) -> None:
    tensors = place.weights()
    tensors["model.norm.weight"][3] = float("nan")
    place.save_weights(tensors)


def _drop_tensor(place: Place) -> None:
    tensors = place.weights()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    place.save_weights(tensors)


def _add_tensor(place: Place, name: str, *shape: int) -> None:
    place.save_weights(place.weights() | {name: torch.ones(shape)})


def _add_token(place: Place, number: int) -> None:
    """Add a token whose id is beyond the others'."""
    content = json.loads(place.path(_TOKENIZER).read_text())
    content["model"]["vocab"]["far"] = number
    place.write(_TOKENIZER, json.dumps(content))


def _add_small_reference(place: Place) -> None:
    """Add a reference whose head has fewer rows than the tokenizer has ids."""
    shutil.copytree(place.path("model"), place.path("reference"))
    file = place.path("reference/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 40}))
    file = place.path("reference/model.safetensors")
    name = "model.embed_tokens.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name][:40].clone()}, file, metadata={"format": "pt"})


def _lasting(change: Callable[..., None]) -> Callable[..., AbstractContextManager[None]]:
    """Return a preparation that changes the place and undoes nothing."""

    @contextmanager
    def prepare(place: Place, *arguments: Any) -> Iterator[None]:
        change(place, *arguments)
        yield

    return prepare


CHANGES: Mapping[str, Callable[..., AbstractContextManager[None]]] = {
    "matrices": _lasting(_change_matrices),
    "truncated_weights": _lasting(_truncate),
    "missing_shard": _lasting(_drop_shard),
    "nan_weight": _lasting(_set_nan),
    "missing_tensor": _lasting(_drop_tensor),
    "further_tensor": _lasting(_add_tensor),
    "further_token": _lasting(_add_token),
    "small_reference": _lasting(_add_small_reference),
}
