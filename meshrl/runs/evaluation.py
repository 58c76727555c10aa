"""`meshrl eval`: a model on a job's held-out rows and evaluation datasets, on a mesh without
training.

It is the evaluation before training of the same job with another model and a budget of no steps.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from meshrl.common.base.errors import ConfigError, NotFound
from meshrl.common.base.files import json_lines
from meshrl.common.job.config import RolloutConfig
from meshrl.common.job.evaluation_plan import BEFORE, HELD_OUT, can_evaluate
from meshrl.directory import directory_paths, model_export
from meshrl.directory.directory_paths import write_json
from meshrl.job import hub_origins, job_reader
from meshrl.job.hub.repository import is_hub_id
from meshrl.launch.checks import mesh_checks
from meshrl.view.history.job_failures import format_share
from meshrl.view.terminal import Console

RESULT_FILE = "evaluation.json"
FIXED_SETTINGS = (
    "budget.steps=0",
    "evaluation.before=true",
    "evaluation.after=false",
    'warm_start.demonstrations=""',
    "lora.rank=0",
    "training.ranks=1",
    # Models that training compares with are not used; a judge is.
    "algorithm.kl_coefficient=0.0",
    'models.reference.path=""',
    'models.teacher.path=""',
)
NO_TEACHER_SETTING = (
    'algorithm.name="grpo"'  # for a job that distils: its evaluation has no teacher
)


def evaluate_model(
    model: Path, job: Path, settings: list[str], step: int | None, best: bool, as_json: bool
) -> int:
    """Print the figures, write them to the evaluation's run directory, return the exit status."""
    with _resolve_model(model, step, best) as path:
        fixed = [*FIXED_SETTINGS, *_derive_settings(job)]
        chosen = [f"model.path={json.dumps(path)}", "model.config={}", 'model.revision=""']
        if is_hub_id(path) or (Path(path) / "tokenizer.json").is_file():
            chosen.append('model.tokenizer=""')
        found = job_reader.read_job_file(job, [*fixed, *chosen, *settings])
        config, base = found.config, found.base
        if not can_evaluate(config):
            raise ConfigError(
                f"{job} has no evaluation data",
                fix="Set dataset.held_out or [[evaluation.datasets]], and a reward",
            )
        mesh_checks.check_job_and_mesh(found)
        hub_origins.fetch_weights(found)
        name = f"{config.name}-eval"
        sets_out = any(setting.partition("=")[0].strip() == "out" for setting in settings)
        config = replace(config, name=name, out=config.out if sets_out else "")
        run_dir = directory_paths.choose_run_directory(config, False)
        # Imported here: only now is it sure that a mesh will be needed.
        from meshrl.runs import session

        # Its progress is no result; standard output is for that.
        with contextlib.redirect_stdout(sys.stderr):
            status = session.run_job(
                replace(config, out=config.out_url or str(run_dir)), base, False, is_evaluation=True
            )
    result = read_result(run_dir)
    if status != 0 or result is None:
        return status or 1
    result = {"model": str(model), "job": str(job), "run": str(run_dir)} | result
    write_json(run_dir / RESULT_FILE, result)
    print(json.dumps(result)) if as_json else _print_result(result)
    return 0


def _derive_settings(job: Path) -> list[str]:
    """Return further settings that the job's file calls for; the loader reports its errors."""
    try:
        document = tomllib.loads(job.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    tables = {
        name: table if isinstance(table := document.get(name), dict) else {}
        for name in ("algorithm", "model", "rollout")
    }
    settings = [NO_TEACHER_SETTING] * (tables["algorithm"].get("name") == "distill")
    # The length of training, where a pretrained model would have a longer default.
    if not tables["model"].get("path") and "max_tokens" not in tables["rollout"]:
        settings.append(f"rollout.max_tokens={RolloutConfig().max_tokens}")
    return settings


@contextlib.contextmanager
def _resolve_model(model: Path, step: int | None, best: bool) -> Iterator[str]:
    """Yield the model's path or Hub id: as it is, or exported from a run's version."""
    if (model / "job.json").is_file():
        with tempfile.TemporaryDirectory(prefix="meshrl-eval-") as scratch:
            out = Path(scratch) / "model"
            if model_export.export_model(model, step, best, out, quiet=True) != 0:
                raise NotFound(
                    f"{model} has no such version", fix="Check the error in the line above"
                )
            yield str(out)
    elif step is not None or best:
        raise ConfigError(f"--step and --best choose a version of a run; {model} is not a run")
    elif (model / "config.json").is_file():
        yield str(model.absolute())
    elif is_hub_id(str(model)) and not model.exists():
        yield str(model)
    else:
        raise NotFound(
            f"{model} is neither a Hugging Face directory nor a run",
            fix="Name a directory with config.json and safetensors, one with a run's job.json, or "
            "a Hub id",
        )


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """Return the figures by name, with the shares and counts of their samples; None without an
    evaluation.
    """
    for event in json_lines.iterate_rows(run_dir / "events.jsonl", '"evaluation"'):
        fields = event["fields"]
        if event["kind"] == "evaluation" and fields["tag"] == BEFORE:
            result_keys = (
                "figures",
                "shares",
                "metrics",
                "reasons",
                "problems",
                "failed",
                "mixed",
                "length_mean",
            )
            return {key: fields[key] for key in result_keys if key in fields}
    return None


def _print_result(found: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False)
    for name, value in found["figures"].items():
        of = format_share(found.get("shares", {}).get(name))
        table.add_row(
            name.replace(f"{HELD_OUT}.", "held-out, "), Text.assemble((f"{value:.3f}", "bold"), of)
        )
    for set_name, metrics in found.get("metrics", {}).items():
        for name, value in metrics.items():
            table.add_row(f"{set_name}, {name}", f"{value:.3f}")
    table.add_row("failed samples", str(found["failed"]))
    for reason, count in found.get("reasons", {}).items():
        table.add_row("", f"{count} x {reason}")
    table.add_row("mean length", f"{found['length_mean']:.1f} tokens")
    console = Console()
    console.print(table)
    run = directory_paths.format_path(Path(found["run"]))
    console.print(f"{run}/{RESULT_FILE}", soft_wrap=True, highlight=False)
