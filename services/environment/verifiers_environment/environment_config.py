"""Conversion of a job's settings of a `verifiers` environment to that package's configuration."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from verifiers.v1 import (
    AgentConfig,
    Env,
    EnvConfig,
    Task,
    default_harness_id,
    env_config_type,
    load_environment,
)
from verifiers.v1.runtimes import runtime_is_local

from meshrl.common.base.errors import ConfigError
from meshrl.services.environment.verifiers_environment import chat_harness

SHELL_HARNESS = "bash"  # the harness of `verifiers` for tasksets without one


def build_environment(taskset: str, options: dict[str, Any]) -> Env:
    """Build the environment of a taskset id, with `options` as in the package's `[env]` table.

    An agent without a harness, of a taskset without one, gets our conversation instead of a shell.
    An agent without a runtime runs in processes of this host.
    """
    settings: dict[str, Any] = copy.deepcopy(options)
    settings["taskset"] = {**settings.get("taskset", {}), "id": taskset}
    kind = env_config_type(taskset, settings.get("id", ""))
    for name, default in _iter_agents(kind):
        role = settings.setdefault(name, {})
        if "harness" not in role and default.harness is None:
            given = default_harness_id(taskset)
            role["harness"] = {"id": chat_harness.HARNESS_ID if given == SHELL_HARNESS else given}
        if "runtime" not in role and "runtime" not in default.model_fields_set:
            role["runtime"] = {"type": "subprocess"}
    env = load_environment(kind.model_validate(settings))
    for name, _ in _iter_agents(kind):
        if not runtime_is_local(getattr(env.config, name).runtime):
            raise ConfigError(
                f"agent {name!r} would run on another host, which cannot reach the engines",
                fix="Set its runtime.type to subprocess, docker or podman",
            )
    return env


def _iter_agents(kind: type[EnvConfig]) -> Iterator[tuple[str, AgentConfig]]:
    for name, field in kind.model_fields.items():
        if isinstance(field.default, AgentConfig):
            yield name, field.default


def iter_task_rows(env: Env, max_rows: int) -> Iterator[dict[str, Any]]:
    """Yield the data of at most `max_rows` tasks of the taskset (0: all), for `build_task`."""
    tasks = env.taskset
    if max_rows:
        tasks = tasks.take(max_rows)
    elif not tasks.bounded:
        raise ConfigError("the taskset is unbounded", fix="Set dataset.tasks")
    for task in tasks:
        yield task.data.model_dump(mode="json", exclude_none=True)


def build_task(env: Env, row: dict[str, Any]) -> Task:
    """Build the task that a row describes, as the taskset's own loading does."""
    kind = type(env.taskset).task_type()
    return kind(kind.data_type().model_validate(row), env.config.taskset.task)
