"""Chooses the state in which training begins: the given weights, warmed or not."""

from __future__ import annotations

import errno
import importlib
import json
import sys
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshrl.common.base.errors import ConfigError, Damaged
from meshrl.common.base.files import damage
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.authored import beginning_of, place_of, placed
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import model_config
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.rows import Beginning, Drawn, StoredRows, begin
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.kernels.build import TRAINING, library
from meshrl.services.trainer.arithmetic.learner import Learner
from meshrl.services.trainer.initial import warm_start
from meshrl.services.trainer.models.forward import checkpoint_layers

T = TypeVar("T")
Pieces = Generator[None, None, T]  # of arithmetic, and what it returns in the end
Tell = Callable[[dict[str, Any]], None]  # takes the fields of an event `damaged`

COMPILE_S = 600.0  # some 10 s on a quiet core; processes of one host wait for each other
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compile_kernels() -> None:
    """Compile what passes on a CPU call, if this host has not; it blocks."""
    for name in TRAINING:
        library(name)


def fresh_learner(data: JobData) -> Learner:
    """A learner on the job's model as it is given, or initialised from the job's seed."""
    config = data.config
    model, beginning = outlined(data)
    return Learner(
        begin(model, beginning, config.mesh.device),
        config.optimizer,
        config.algorithm,
        config.rollout.temperature,
        DTYPES[config.training.dtype],
    )


def outlined(data: JobData) -> tuple[Decoder, Beginning]:
    """Return `fresh_learner`'s model on the `meta` device, and the source of its rows."""
    config, shape = data.config, model_config(data)
    beginning: Beginning
    if config.model.path:
        beginning = StoredRows(data.bundle / config.model.path, shape)
    else:
        beginning = Drawn(shape, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    if config.training.activation_checkpointing:
        checkpoint_layers(model)
    return model, beginning


def outline(data: JobData) -> tuple[ModelConfig, int]:
    """The job's model as it is described, and how many parameters it has; none is made."""
    config = model_config(data)
    with torch.device("meta"):
        return config, sum(parameter.numel() for parameter in Decoder(config).parameters())


def first_weights(
    data: JobData, progress: Callable[[int, float], None], tell: Tell
) -> Pieces[tuple[dict[str, Tensor] | None, bool]]:
    """Do `start` with a learner of its own: its weights, None for a fresh learner's."""
    if not data.config.warm_start.demonstrations:
        return None, False
    learner = fresh_learner(data)
    cached = yield from start(data, learner, progress, tell)
    return learner.copied_weights(), cached


def start(
    data: JobData, learner: Learner, progress: Callable[[int, float], None], tell: Tell
) -> Pieces[bool]:
    """Make version 0 of a learner, piece by piece; True: its warm start was cached."""
    cached = False
    if data.config.warm_start.demonstrations:
        cached = yield from warm(data, learner, progress, tell)
    adapt(data, learner)
    return cached


def adapt(data: JobData, learner: Learner) -> None:
    """Adapters in place of the model, if the job trains such, once its weights are warm."""
    if data.config.lora.rank:
        learner.adapt(data.config.lora, data.config.seed)


def warm(
    data: JobData, learner: Learner, progress: Callable[[int, float], None], tell: Tell
) -> Pieces[bool]:
    """Warm the learner, or take that from the cache (True) if it is not damaged there."""
    config = data.config
    path = None
    if config.cache:
        path = warm_start.cache_path(config.cache, cache_key(data), sources(data))
        try:
            weights = warm_start.load(path)
        except Damaged as error:
            weights, aside = None, damage.set_aside(path, path.parent)
            then = "the warm start is made again"
            tell(damage.fields("warm start", path, error.message, then, job=data.id, aside=aside))
        if weights is not None:
            learner.load_weights(weights)
            return True
    prompts = (row.get(config.dataset.prompt) for row in data.rows("held_out"))
    held_out = {prompt for prompt in prompts if isinstance(prompt, str)}
    chat = bool(config.environment.chat)
    yield from warm_start.pieces(
        learner,
        demonstrations(data),
        Tokenizer.load(str(data.tokenizer)),
        config.warm_start,
        warm_start.DemonstrationLimits(held_out, config.rollout.max_tokens, chat),
        seed=config.seed,
        bin_tokens=config.training.bin_tokens,
        progress=progress,
    )
    if path is not None:
        try:  # for jobs that begin the same; containers write to few places of a host
            warm_start.save(path, learner.weights())
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
    return False


def cache_key(data: JobData) -> dict[str, Any]:
    """The parts of a job that its warm start depends on."""
    document = data.config.document()
    key = {part: document[part] for part in ("seed", "warm_start")}
    key["model"] = document["model"]["config"]
    if not data.config.environment.chat and (begins := Tokenizer.load(data.tokenizer).begin("")):
        key["begins"] = begins  # what every demonstration begins with
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
    if str(data.modules) not in sys.path:
        sys.path.insert(0, str(data.modules))
    module, _, name = reference.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def demonstrations(data: JobData) -> warm_start.Demonstrate:
    """Return the job's function for its warm start, whose mistakes are ConfigErrors there."""
    use, directory = data.config.warm_start.demonstrations, str(data.modules)
    asked = function(data, use)

    def demonstrate(random: Random, done: float) -> warm_start.Segments:
        try:
            segments = asked(random, done)
        except Exception as error:
            why = f"{use} raised {type(error).__name__}: {error}"
            place = place_of(error, directory)
            raise ConfigError(placed(why, place), where="warm_start.demonstrations") from error
        if not warm_start.is_demonstration(segments):
            why = f"{use} returned {repr(segments)[:80]}, which is no demonstration"
            raise ConfigError(
                placed(why, beginning_of(asked, directory)),
                where="warm_start.demonstrations",
                fix="return [(text, whether the model writes it), ...], the prompt first",
            )
        return segments  # type: ignore[no-any-return]

    return demonstrate


def check(data: JobData) -> None:
    """ConfigError for what only the trainer can tell of a job, before any work."""
    if not data.rows("train"):
        raise ConfigError("the job has no training prompts", fix="set dataset.train")
    json.dumps(cache_key(data))
