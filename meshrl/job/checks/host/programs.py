"""Checks that the programs which a job names exist and run: interpreters, MCP servers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.generation.sglang_model import to_sglang_config
from meshrl.common.job.isolation import isolation_probe
from meshrl.common.mesh.process.engine_environments import locate_environment, locate_python
from meshrl.job.checks.host.tokens import load_model_shape, load_model_without_absent_ids
from meshrl.job.job_file import JobFile

PROBE_TIMEOUT_S = 20.0  # for an interpreter that looks for a package, on a slow disk
IMPORT_TIMEOUT_S = 60.0  # for the imports of a jail's interpreter
FIND_PACKAGE = "import importlib.util, sys; sys.exit(3 * (importlib.util.find_spec({!r}) is None))"
ABSENT_STATUS = 3
# SGLang's adapters need pinned memory, which a torch without an accelerator lacks.
PINNED_MEMORY_PROBE = (
    "import importlib.util, torch; importlib.util.find_spec('sglang.srt.lora'); "
    "torch.empty(1, pin_memory=True)"
)


def check_sglang(job: JobFile) -> None:
    """Check that the engine's interpreter has SGLang, and that SGLang supports the model."""
    rollout = job.config.rollout
    if rollout.engine != "sglang":
        return
    try:
        to_sglang_config(load_model_without_absent_ids(job), rollout.max_tokens)
    except ConfigError as error:
        raise job.make_error(
            error.where, f"rollout.engine = 'sglang': {error.message}", error.fix
        ) from error
    key = "rollout.sglang_python" if rollout.sglang_python else "rollout.engine"
    python = Path(rollout.sglang_python or locate_python(locate_environment("sglang"))).expanduser()
    fix = "Run `meshrl engine install sglang`"
    if rollout.sglang_python:
        fix = f"{fix}; a job without rollout.sglang_python uses that installation"
    if problem := explain_missing_package(python, "sglang"):
        raise job.make_error(key, f"rollout.engine = 'sglang': {problem}", fix)
    _check_read_back(job)
    _check_kv_tiers(job)
    _check_adapters(job, python, key)


def _check_read_back(job: JobFile) -> None:
    """Check that SGLang can return weights for comparison with a version."""
    if not job.config.rollout.verify_weights:
        return
    why = ""
    if job.config.mesh.device != "cpu":
        why = "SGLang computes its own digest of weights on a GPU"
    elif load_model_shape(job, job.config.model.path).sparse_layers:
        why = "SGLang stores experts in the layout of its kernels"
    if why:
        wrong = f"rollout.verify_weights: {why}, which cannot be compared with a version"
        fix = "Remove the key, or set rollout.engine to the built-in engine"
        raise job.make_error("rollout.verify_weights", wrong, fix)


def _check_kv_tiers(job: JobFile) -> None:
    """Check that the job has GPUs for SGLang's hierarchical cache."""
    rollout = job.config.rollout
    if job.config.mesh.device == "cpu" and (rollout.kv_tier_gib or rollout.kv.disk):
        wrong = "rollout.kv: SGLang supports KV tiers only on GPUs"
        fix = "Set memory and disk to 0, or set rollout.engine to the built-in engine"
        raise job.make_error("rollout.kv", wrong, fix)


def _check_adapters(job: JobFile, python: Path, key: str) -> None:
    """Check that SGLang starts with adapters beside the model. `key`: its interpreter's setting."""
    config = job.config
    if not config.lora.rank or config.lora.engine_mode != "beside" or config.mesh.device != "cpu":
        return
    status, output = _run_python(python, PINNED_MEMORY_PROBE, IMPORT_TIMEOUT_S)
    if status is None:
        fix = "Find the cause of the delay, such as a slow disk, and submit the job again"
        raise job.make_error(key, f"rollout.engine = 'sglang': {output}", fix)
    if status:
        raise job.make_error(
            "lora.engine_mode",
            "lora.engine_mode = 'beside': SGLang needs pinned memory for adapters beside a "
            f"model, and {python} has none: {output}",
            "Set lora.engine_mode to 'merged' or 'auto', which merges for SGLang, or mesh.device "
            "to 'cuda'",
        )


def check_verifiers(job: JobFile) -> None:
    environment = job.config.environment
    if environment.verifiers and (
        problem := explain_missing_package(Path(environment.python), "verifiers")
    ):
        wrong = f"environment.python: {problem}"
        fix = (
            "Set environment.python to an interpreter for which `pip install "
            "verifiers==0.4.0` was run"
        )
        raise job.make_error("environment.python", wrong, fix)


def check_sandbox_python(job: JobFile) -> None:
    """Check that the interpreter of the model's code runs, and has the job's imports."""
    config = job.config.sandbox
    if config.root or config.runner or not config.python:
        return  # the interpreter of an image or container runs only inside it
    names = config.imports
    status, output = _run_python(
        Path(config.python), f"import {', '.join(['sys', *names])}", IMPORT_TIMEOUT_S
    )
    if status is None:
        raise job.make_error(
            "sandbox.python",
            f"sandbox.python: {output}",
            "Set sandbox.python to a Python interpreter",
        )
    if status:
        absent = "No module named" in output
        key = "sandbox.imports" if absent else "sandbox.python"
        fix = (
            "Install the module for that interpreter"
            if absent
            else "Set sandbox.python to a Python interpreter"
        )
        raise job.make_error(
            key, f"{key}: {config.python} cannot import the required modules: {output}", fix
        )


def check_mcp_servers(job: JobFile) -> None:
    """Check that the commands of MCP servers exist, and the package of their protocol."""
    environment = job.config.environment
    for name, command in environment.mcp.items():
        key, program = f"environment.mcp.{name}", command[0]
        # They start in the directory of the modules, to which files beside the job file are copied.
        job_program = job.base / program
        found = program == "python" or shutil.which(program) or os.access(job_program, os.X_OK)
        if not found:
            raise job.make_error(
                key,
                f"{key}: there is no program {program!r}",
                "Install the program, or give its full path",
            )
        script = next((word for word in command[1:] if word.endswith(".py")), "")
        if script and not (job.base / script).is_file():
            wrong = f"{key}: there is no file {job.base / script}"
            raise job.make_error(
                key, wrong, "Put the file beside the job file, or give its full path"
            )


def check_packages(job: JobFile) -> None:
    """Check that the optional packages which the job needs are installed."""
    environment, uses = job.config.environment, [p.use for p in job.config.reward.reward_parts]
    requirements = {
        "math_verify": ("math" in uses, "reward.use", "the reward 'math' needs", "math")
    }
    requirements["mcp"] = (bool(environment.mcp), "environment.mcp", "MCP servers need", "mcp")
    for package, (used, key, what, extra) in requirements.items():
        if used and importlib.util.find_spec(package) is None:
            wrong = f"{key}: {what} the package {package}, which is not installed"
            raise job.make_error(key, wrong, f"Run `pip install 'meshrl[{extra}]'`")


def check_isolation(job: JobFile) -> None:
    """Check that this host isolates the model's code as the job demands."""
    isolation_probe.require_isolation(job.config)


def explain_missing_package(python: Path, package: str) -> str:
    """Return why an interpreter lacks a package; empty if it has it."""
    status, output = _run_python(python, FIND_PACKAGE.format(package), PROBE_TIMEOUT_S)
    if status == ABSENT_STATUS:
        return f"{python} has no package {package}"
    return f"{python} failed: {output}" if status else output


def can_import(python: Path, package: str, directory: str) -> bool:
    """Return True if an interpreter can import a package of a directory outside its search path."""
    code = f"import sys; sys.path.append({directory!r}); import {package}"
    return _run_python(python, code, PROBE_TIMEOUT_S)[0] == 0


def _run_python(python: Path, code: str, timeout_s: float) -> tuple[int | None, str]:
    """Return the exit status and the last words unless it is 0; or None and why it did not run."""
    if not python.is_file():
        return None, f"there is no interpreter at {python}"
    if not os.access(python, os.X_OK):
        return None, f"{python} is not executable"
    try:
        result = subprocess.run(
            [str(python), "-I", "-c", code],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        return None, f"{python} cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return None, f"{python} did not finish `{code}` within {timeout_s:g} s"
    last = (result.stderr.strip().splitlines() or [f"status {result.returncode}"])[-1]
    return result.returncode, last if result.returncode else ""
