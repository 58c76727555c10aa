"""Checkpoints as `transformers` computes them and as MeshRL does."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loadtests.models.drawn import CLASSES, VOCABULARY, drawn
from meshrl.common.base.errors import MeshError
from meshrl.common.generation.builtin.engine_builder import build_engine
from meshrl.common.generation.engine_contract import GenerationRequest
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.initial_parameters import load_model
from meshrl.common.model.network.decoder import Decoder
from meshrl.kernels.ops.varlen import VarlenAttention
from meshrl.services.trainer.models.forward import fuse_pointwise

TOLERANCE = 1e-4  # nats
SHORT, LONG = 96, 2048  # tokens
LONG_EVERY = 10
SAMPLED = 12  # tokens that an engine samples
EAGER = {"experts_implementation": "eager"}  # takes any width, as ours do
PATHS = ("native", "eager", "graphs")
# Keys of config.json and their new values; null removes the key.
KEYS = Path(__file__).with_name("changed.jsonl")
FILES = ("float8_e4m3fn", "float8_e5m2", "int8", "int32", "nan", "infinite")


def change(random: Random, directory: Path) -> str:
    """Change a key of config.json or, more rarely, a tensor; return a description."""
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


@dataclass
class ComparisonResult:
    unequal: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    worst: float = 0.0
    refused: int = 0
    equal_changed: int = 0


def compare(
    random: Random, number: int, length: int, paths: Sequence[str], found: ComparisonResult
) -> None:
    """Compare one checkpoint unchanged, and once more with one thing changed."""
    architecture = list(CLASSES)[number % len(CLASSES)]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "model"
        options = drawn(random, architecture, length)
        theirs = save(random, architecture, options, directory)
        what = f"{number} {architecture}: {options}"
        try:
            worst = difference(directory, theirs, random, length, paths)
        except MeshError as error:
            found.unequal.append(f"{what}: refused: {error}")
        else:
            found.worst = max(found.worst, worst)
            if not worst <= TOLERANCE:
                found.unequal.append(f"{what}: {worst}")
        changed = Path(scratch) / "changed"
        shutil.copytree(directory, changed)
        check_changed(random, changed, what, found)


def save(random: Random, architecture: str, options: dict[str, Any], directory: Path) -> Any:
    """Write and return a model with random weights, norms and biases."""
    import transformers

    config = getattr(transformers, CLASSES[architecture])(**options)
    torch.manual_seed(random.randrange(1 << 30))
    classes: Any = transformers.AutoModelForCausalLM  # its methods are not typed
    model = classes.from_config(config, **EAGER).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            own = 1.0 if "norm" in name else 0.0
            parameter.copy_(own + spread * torch.randn_like(parameter))
    model.save_pretrained(directory)
    if random.random() < 0.25:
        file = directory / "config.json"
        raw = json.loads(file.read_text())
        defaults = getattr(transformers, CLASSES[architecture])().to_dict()
        sizes = ("model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size")
        kept = {
            key: value
            for key, value in raw.items()
            if key in sizes or key.startswith("num_") or value != defaults.get(key, ...)
        }
        file.write_text(json.dumps(kept))
    return model


def difference(
    directory: Path, theirs: Any, random: Random, length: int, paths: Sequence[str]
) -> float:
    """Return the largest difference between our log-probabilities and the reference's."""
    config, model = load_model(directory)
    tokens = torch.tensor([random.randrange(3, VOCABULARY) for _ in range(length - SAMPLED)])
    known: dict[bytes, Tensor] = {}  # engines of one seed sample the same

    def expected(of: Tensor) -> Tensor:
        key = of.numpy().tobytes()
        return known[key] if key in known else known.setdefault(key, reference(theirs, of))

    worst = gap(trained(model, tokens), expected(tokens))
    for path in paths:
        for whole, found in engine(config, model, path, tokens, length):
            worst = max(worst, gap(found, expected(whole)[-len(found) :]))
    return worst


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().nan_to_num(torch.inf).max())


@torch.inference_mode()
def reference(theirs: Any, tokens: Tensor) -> Tensor:
    """Return [n - 1] log-probabilities of all tokens but the first."""
    logits: Tensor = theirs(tokens[None]).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


@torch.inference_mode()
def trained(model: Decoder, tokens: Tensor) -> Tensor:
    fuse_pointwise(model)
    n, other = len(tokens), tokens[: len(tokens) // 3]
    attention = VarlenAttention(
        np.array([0, n, n + len(other)], np.int32), n + len(other), torch.device("cpu")
    )
    positions = torch.cat((torch.arange(n), torch.arange(len(other))))
    hidden = model(torch.cat((tokens, other)), positions, attention)[: n - 1]
    return model.compute_logits(hidden).float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def engine(
    config: ModelConfig, model: Decoder, path: str, tokens: Tensor, length: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return sequences and the log-probabilities of their last tokens, known and sampled."""
    device = "cuda" if path == "graphs" and torch.cuda.is_available() else "cpu"
    made = build_engine(config, 2, length, backend=path, device=device)
    made.wake(model.state_dict(), 0)
    yield tokens, torch.from_numpy(made.score(tokens.numpy().astype(np.int32)))
    prompt = tokens.numpy().astype(np.int32)
    # Another request beside it, so that a batch has rows of two lengths.
    made.submit([GenerationRequest(1, prompt, SAMPLED, 1.0, (), 7, -1)])
    made.submit([GenerationRequest(2, prompt[: len(prompt) // 2], SAMPLED, 1.0, (), 8, -1)])
    heard: dict[int, tuple[list[int], list[float]]] = {1: ([], []), 2: ([], [])}
    while made.step():
        _hear(made, heard)
    _hear(made, heard)
    for id, begin in ((1, len(prompt)), (2, len(prompt) // 2)):
        sampled, logprobs = heard[id]
        yield torch.cat((tokens[:begin], torch.tensor(sampled))), torch.tensor(logprobs)


def _hear(made: Any, heard: dict[int, tuple[list[int], list[float]]]) -> None:
    flush = made.drain_outputs()
    if flush is None:
        return
    at = 0
    for id, count in zip(flush.ids.tolist(), flush.counts.tolist(), strict=True):
        heard[id][0].extend(flush.tokens[at : at + count].tolist())
        heard[id][1].extend(flush.logprobs[at : at + count].tolist())
        at += count


def check_changed(random: Random, directory: Path, what: str, found: ComparisonResult) -> None:
    """Change one setting and check that it is rejected or read as `transformers` reads it."""
    import transformers

    change_made = change(random, directory)
    try:
        _, model = load_model(directory)
    except MeshError:
        found.refused += 1
        return
    tokens = torch.tensor([random.randrange(3, VOCABULARY) for _ in range(64)])
    classes: Any = transformers.AutoModelForCausalLM  # its methods are not typed
    try:
        theirs = classes.from_pretrained(directory, **EAGER).eval()
        far = gap(trained(model, tokens), reference(theirs, tokens))
    except Exception as error:  # whatever it is, it is not what we read
        found.silent.append(f"{what}, {change_made}: read, where transformers fails: {error}")
        return
    if far <= TOLERANCE:
        found.equal_changed += 1
    else:
        found.silent.append(f"{what}, {change_made}: read, and {far} away")


def run(
    configs: int, seed: int, paths: Sequence[str] = PATHS, longest: int = LONG
) -> dict[str, Any]:
    import transformers

    logging: Any = transformers.utils.logging  # its functions are not typed
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = ComparisonResult()
    for number in range(configs):
        # Each has its own random numbers, so that one can be run alone.
        length = longest if number % LONG_EVERY == LONG_EVERY - 1 else SHORT
        compare(Random(f"{seed} {number}"), number, length, paths, found)
    for line in found.unequal + found.silent:
        print(line, flush=True)
    return {
        "unequal": len(found.unequal),
        "silent": len(found.silent),
        "refused": found.refused,
        "equal_changed": found.equal_changed,
        "worst": found.worst,
    }
