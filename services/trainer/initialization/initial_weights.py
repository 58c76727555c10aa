"""Initial state of training: the given or random weights, after a warm start if there is one."""

from __future__ import annotations

import errno
import importlib
import json
import sys
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshrl.common.base.errors import ConfigError, CorruptData
from meshrl.common.base.files import corruption
from meshrl.common.base.random import Random
from meshrl.common.grading.row_values import find_value
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import load_model_config
from meshrl.common.job.bundle.source_locations import append_location, locate_error, locate_function
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.initial_parameters import (
    ParameterSource,
    PretrainedParameters,
    RandomParameters,
    materialize_model,
)
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.kernels.library_build import TRAINING_LIBRARIES, build_library
from meshrl.services.trainer.initialization import warm_start
from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.models.forward import enable_activation_checkpointing

T = TypeVar("T")
StepwiseWork = Generator[None, None, T]  # of arithmetic; it returns its result
ReportCorruption = Callable[[dict[str, Any]], None]  # takes the fields of an event `damaged`

COMPILE_TIMEOUT_S = 600.0  # about 10 s on an idle core; processes of one host wait for each other
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compile_kernels() -> None:
    """Compile the kernels of a CPU training pass unless this host has them; it blocks."""
    for name in TRAINING_LIBRARIES:
        build_library(name)


def create_learner(data: JobData) -> Learner:
    """Return a learner of the job's model, pretrained or initialised from the job's seed."""
    config = data.config
    model, beginning = build_meta_model(data)
    return Learner(
        materialize_model(model, beginning, config.mesh.device),
        config.optimizer,
        config.algorithm,
        config.rollout.temperature,
        DTYPES[config.training.dtype],
    )


def build_meta_model(data: JobData) -> tuple[Decoder, ParameterSource]:
    """Return the model of `create_learner` on the `meta` device, and the source of its rows."""
    config, shape = data.config, load_model_config(data)
    beginning: ParameterSource
    if config.model.path:
        beginning = PretrainedParameters(data.bundle / config.model.path, shape)
    else:
        beginning = RandomParameters(shape, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    if config.training.activation_checkpointing:
        enable_activation_checkpointing(model)
    return model, beginning


def describe_model(data: JobData) -> tuple[ModelConfig, int]:
    """Return the job's model configuration and its parameter count, without creating weights."""
    config = load_model_config(data)
    with torch.device("meta"):
        return config, sum(parameter.numel() for parameter in Decoder(config).parameters())


def create_first_weights(
    data: JobData, progress: Callable[[int, float], None], report_corruption: ReportCorruption
) -> StepwiseWork[tuple[dict[str, Tensor] | None, bool]]:
    """Return warm-started weights, None for a new learner's, and True if they were cached."""
    if not data.config.warm_start.demonstrations:
        return None, False
    learner = create_learner(data)
    cached = yield from initialize_learner(data, learner, progress, report_corruption)
    return learner.copy_weights(), cached


def initialize_learner(
    data: JobData,
    learner: Learner,
    progress: Callable[[int, float], None],
    report_corruption: ReportCorruption,
) -> StepwiseWork[bool]:
    """Make a learner's weights version 0, step by step; return True if they were cached."""
    cached = False
    if data.config.warm_start.demonstrations:
        cached = yield from run_warm_start(data, learner, progress, report_corruption)
    add_adapters(data, learner)
    return cached


def add_adapters(data: JobData, learner: Learner) -> None:
    """Attach adapters to a warm learner if the job trains adapters."""
    if data.config.lora.rank:
        learner.add_adapters(data.config.lora, data.config.seed)


def run_warm_start(
    data: JobData,
    learner: Learner,
    progress: Callable[[int, float], None],
    report_corruption: ReportCorruption,
) -> StepwiseWork[bool]:
    """Warm-start a learner; return True if the cache had intact weights."""
    config = data.config
    path = None
    if config.cache:
        path = warm_start.build_cache_path(config.cache, build_cache_key(data), read_sources(data))
        try:
            weights = warm_start.load_weights(path)
        except CorruptData as error:
            weights, quarantined_path = None, corruption.quarantine(path, path.parent)
            then = "the warm start is repeated"
            report_corruption(
                corruption.make_event_fields(
                    "warm start",
                    path,
                    error.message,
                    then,
                    job=data.id,
                    quarantined_path=quarantined_path,
                )
            )
        if weights is not None:
            learner.load_weights(weights)
            return True
    prompts = (find_value(row, config.dataset.prompt) for row in data.read_rows("held_out"))
    held_out = {prompt for prompt in prompts if isinstance(prompt, str)}
    chat = bool(config.environment.chat)
    yield from warm_start.run_steps(
        learner,
        load_demonstrations(data),
        Tokenizer.load(str(data.tokenizer_file)),
        config.warm_start,
        warm_start.DemonstrationLimits(held_out, config.rollout.max_tokens, chat),
        seed=config.seed,
        bin_tokens=config.training.bin_tokens,
        progress=progress,
    )
    if path is not None:
        try:  # for jobs with the same start; containers write to few paths of a host
            warm_start.save_weights(path, learner.get_weights())
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
    return False


def build_cache_key(data: JobData) -> dict[str, Any]:
    """Return the parts of a job that its warm start depends on."""
    document = data.config.to_document()
    key = {part: document[part] for part in ("seed", "warm_start")}
    key["model"] = document["model"]["config"]
    if not data.config.environment.chat and (
        begins := Tokenizer.load(data.tokenizer_file).encode_start("")
    ):
        key["begins"] = begins  # prefix of every demonstration
    key["limits"] = [data.config.rollout.max_tokens, data.config.training.bin_tokens]
    return key


def read_sources(data: JobData) -> list[bytes]:
    """Return the files that a warm start reads: modules, held-out rows, tokenizer and model."""
    paths = [*sorted(data.modules_dir.rglob("*.py")), data.tokenizer_file]
    if data.config.dataset.held_out:
        paths.append(data.bundle / data.config.dataset.held_out)
    if data.config.model.path:
        paths += sorted((data.bundle / data.config.model.path).glob("*"))
    return [path.read_bytes() for path in paths]


def load_function(data: JobData, reference: str) -> Callable[..., Any]:
    if str(data.modules_dir) not in sys.path:
        sys.path.insert(0, str(data.modules_dir))
    module, _, name = reference.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def load_demonstrations(data: JobData) -> warm_start.Demonstrate:
    """Return the job's demonstration function, with its mistakes raised as ConfigError."""
    use, directory = data.config.warm_start.demonstrations, str(data.modules_dir)
    function = load_function(data, use)

    def demonstrate(random: Random, done: float) -> warm_start.Segments:
        try:
            segments = function(random, done)
        except Exception as error:
            why = f"{use} raised {type(error).__name__}: {error}"
            place = locate_error(error, directory)
            raise ConfigError(
                append_location(why, place), where="warm_start.demonstrations"
            ) from error
        if not warm_start.is_demonstration(segments):
            why = f"{use} returned {repr(segments)[:80]}, which is not a demonstration"
            raise ConfigError(
                append_location(why, locate_function(function, directory)),
                where="warm_start.demonstrations",
                fix="Return [(text, is_model_text), ...], the prompt first",
            )
        return segments  # type: ignore[no-any-return]

    return demonstrate


def check_job(data: JobData) -> None:
    """Raise ConfigError for mistakes of a job that only the trainer detects, before any work."""
    if not data.read_rows("train"):
        raise ConfigError("the job has no training prompts", fix="Set dataset.train")
    json.dumps(build_cache_key(data))
