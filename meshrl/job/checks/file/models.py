"""Checks of the models that a job names: frozen ones, and the shapes of all."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.job.config import INITIAL
from meshrl.job.loaded import PLACED, JobFile
from meshrl.job.model_files import loaded, shape_at


def declared(job: JobFile) -> None:
    """Check the frozen models, and that those are there which the algorithm compares with."""
    config, declared = job.config, job.config.models.declared
    if config.algorithm.kl_coefficient and "reference" not in declared:
        wrong = "algorithm.kl_coefficient compares with models.reference, which the job has not"
        fix = f"Set models.reference.path, to {INITIAL!r} or a directory"
        raise job.fail("algorithm.kl_coefficient", wrong, fix)
    if config.algorithm.name == "distill" and "teacher" not in declared:
        raise job.fail(
            "algorithm.name", "distill learns from models.teacher, which the job has not"
        )
    for role, table in job.given.get("models", {}).items():
        if "path" not in table:
            raise job.fail(
                f"models.{role}",
                f"models.{role} has no path",
                "Name a Hugging Face directory"
                + (f", or {INITIAL!r}" if role == "reference" else ""),
            )
    if {"reference", "teacher"} & set(declared) and config.rollout.temperature != 1:
        raise job.fail(
            "rollout.temperature",
            "reference and teacher are compared with what the model samples at temperature 1, not "
            f"{config.rollout.temperature:g}",
        )
    for role, model in declared.items():
        if model.path != INITIAL:
            _directory(job, role, Path(model.path))
        elif role != "reference":
            key = f"models.{role}.path"
            raise job.fail(key, f"{key} = {INITIAL!r} is for the reference alone")


def _directory(job: JobFile, role: str, place: Path) -> None:
    """Check a frozen model's files, and that one which is compared with has the job's tokenizer."""
    key, tokenizer = f"models.{role}.path", job.config.model.tokenizer_file
    own = (place / "tokenizer.json").is_file()
    if not (place / "config.json").is_file():
        raise job.fail(key, f"{place} holds no config.json")
    if role == "reward" and not own:
        raise job.fail(key, f"{place} holds no tokenizer.json")
    if role != "reward" and own and tokenizer.is_file():
        ours = loaded(job, tokenizer, "model.tokenizer").vocabulary
        if not ours.items() <= loaded(job, place, key).vocabulary.items():
            raise job.fail(key, f"{place} has another tokenizer than the model")


def shapes(job: JobFile) -> None:
    """Check that every model is described as one that the decoder implements."""
    described = {} if job.config.model.path else {"model.config": ""}
    for key, path in (described | {file.key: file.path for file in job.models}).items():
        with job.naming(key, PLACED):
            shape_at(path, job.config.model.config)
