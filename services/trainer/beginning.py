"""Where training begins or goes on: a checkpoint, a warm start from the cache or made now, or the
given weights.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from common.api.weights import Load, Weights
from common.bulk import BulkClient
from common.errors import ConfigError
from common.jobdata import JobData
from common.mesh import Mesh
from common.model.config import ModelConfig
from common.model.decoder import Decoder
from common.model.hf import load_model
from common.model.tokenizer import Tokenizer
from common.model.transfer import fetch
from common.patience import patiently
from common.store import STORE
from services.trainer import warm_start
from services.trainer.learner import MODEL, Learner

LOAD_S = 600.0  # of a learner's state into memory


def fresh_learner(data: JobData) -> Learner:
    """The job's model as it is given, or initialised from the job's seed."""
    config = data.config
    if config.model.path:
        _, model = load_model(str(data.bundle / config.model.path), torch.float32)
    else:
        model = Decoder(ModelConfig.from_hf(config.model.config))
        generator = torch.Generator()
        generator.manual_seed(config.seed)
        model.initialise(generator)
    return Learner(model, config.optimizer, config.algorithm)


def warm(data: JobData, learner: Learner, progress: Callable[[int, float], None]) -> bool:
    """Runs the job's warm start in place, or takes it from the cache; True when it was cached."""
    config = data.config
    path = None
    if config.cache:
        path = warm_start.cache_path(config.cache, cache_key(data), sources(data))
        weights = warm_start.load(path)
        if weights is not None:
            learner.load_weights(weights)
            return True
    warm_start.warm_start(
        learner,
        function(data, config.warm_start.demonstrations),
        Tokenizer.load(str(data.tokenizer)),
        config.warm_start,
        seed=config.seed,
        held_out={
            prompt
            for row in data.rows("held_out")
            if isinstance(prompt := row.get(config.dataset.prompt), str)
        },
        max_tokens=config.rollout.max_tokens,
        bin_tokens=config.training.bin_tokens,
        progress=progress,
    )
    if path is not None:
        warm_start.save(path, learner.weights())
    return False


def cache_key(data: JobData) -> dict[str, Any]:
    """The parts of a job that its warm start depends on."""
    document = data.config.document()
    key = {part: document[part] for part in ("seed", "warm_start")}
    key["model"] = document["model"]["config"]
    key["limits"] = [data.config.rollout.max_tokens, data.config.training.bin_tokens]
    return key


def sources(data: JobData) -> list[bytes]:
    """Files that a warm start reads: the job's modules, held-out rows, tokenizer and model."""
    paths = [*sorted(data.modules.rglob("*.py")), data.tokenizer]
    if data.config.dataset.held_out:
        paths.append(data.bundle / data.config.dataset.held_out)
    if data.config.model.path:
        paths += sorted((data.bundle / data.config.model.path).glob("*"))
    return [path.read_bytes() for path in paths]


def function(data: JobData, reference: str) -> Callable[..., Any]:
    """What `module:function` of the job names."""
    if str(data.modules) not in sys.path:
        sys.path.insert(0, str(data.modules))
    module, _, name = reference.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


async def from_checkpoint(
    mesh: Mesh, bulk: BulkClient, data: JobData, learner: Learner, name: str, manifest: str
) -> None:
    """Puts the learner where the checkpoint `name` of the weights `manifest` left it."""
    store = mesh.ref(STORE)
    load = Load(data.id, name)
    checkpoint = await patiently(mesh.clock, lambda: store.call(Weights.load, load))
    if checkpoint.weights != manifest:
        raise ConfigError(
            f"checkpoint {name} holds other weights than version {checkpoint.step} was made of",
            where=mesh.name,
            fix="remove it, and resume the run from the one before",
        )
    _, weights = await fetch(mesh, bulk, checkpoint.weights)
    _, optimizer = await fetch(mesh, bulk, checkpoint.optimizer)
    state = {MODEL + key: tensor for key, tensor in weights.items()} | optimizer
    await mesh.host.run_blocking(learner.load, state, deadline_s=LOAD_S)


def check(data: JobData) -> None:
    """ConfigError for what only the trainer can tell of a job, before any work."""
    if not data.rows("train"):
        raise ConfigError("the job has no training prompts", fix="set dataset.train")
    json.dumps(cache_key(data))
