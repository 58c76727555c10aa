"""Process of an SGLang server, started in its own interpreter and stopped with its children."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import ConfigError, DeadlineExceeded, PeerLost, RemoteFailure
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.host import Host, Stoppable
from meshrl.common.mesh.process.output.log_bounds import rotate_file_if_long
from meshrl.common.mesh.process.spawning import SpawnOptions
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.http_client import UNAUTHORIZED, HttpClient
from meshrl.services.engine.sglang.launch_config import (
    RESERVED_OPTIONS,
    LaunchConfig,
    write_model_config,
    write_secrets,
)
from meshrl.services.engine.sglang.ports import PortBlock
from meshrl.services.engine.sglang.server_devices import count_gpus, find_push_devices
from meshrl.services.engine.sglang.start_progress import (
    ServerProcesses,
    StartLimits,
    StartProgress,
    compute_start_limits,
    is_progress_bar,
)
from meshrl.services.engine.sglang.transport_choice import (
    PushDevices,
    ServerTransportChoice,
    choose_server_transport,
)

PROBE_TIMEOUT_S, POLL_S = 5.0, 0.25
DESCRIBE_TIMEOUT_S = 60.0  # for its API description, which it computes at the first request
STOP_TIMEOUT_S = 5.0  # for a killed process to exit
LOG_CHECK_INTERVAL_S = 1.0  # interval of checks of the log's length
OBSERVE_S, OBSERVE_TIMEOUT_S = 1.0, 20.0  # of the progress of a start
TAIL_LINES, MAX_LINE_CHARS = 25, 300  # lines of the log in an error, and characters of each

OnProgress = Callable[[str, list[float]], None]


class SGLangServer:
    """Running server. Its children exit with it, and it exits with the process that started it."""

    def __init__(
        self,
        launch_config: LaunchConfig,
        http: HttpClient,
        name: str,
        key: str,
        host: Host,
        clock: Clock,
    ) -> None:
        """Describe a server; `name` is the model name that identifies it, `key` its API key."""
        self.launch_config, self.http, self.name, self._key = launch_config, http, name, key
        self.clock, self._host = clock, host
        self.version = ""  # SGLang's version
        self.uses_seeds = False  # the server samples from each request's seed
        self.ranks = 1  # processes that hold a share of the weights
        self.push_devices = PushDevices()  # of the server, and of this process
        self.sleep_tags: tuple[str, ...] = v0_5.SLEEP_TAGS  # empty: sleep must end the server
        self.memory_bytes: Mapping[str, int] = {}  # by tag
        self.keeps_weights = False  # released weights have a copy in host memory
        self.start_text = ""  # progress of a start, for people
        self._child: ChildProcess | None = None
        self._ports: PortBlock | None = None
        self._weights = "auto"
        self.limits = StartLimits(0.0)  # of each start
        self._report: OnProgress = lambda text, progress: None
        self._log_bounder: Stoppable | None = None  # limits the size of the log

    @property
    def child(self) -> ChildProcess:
        assert self._child is not None
        return self._child

    @property
    def pid(self) -> int:
        return self.child.pid

    @classmethod
    async def start(
        cls,
        host: Host,
        clock: Clock,
        launch_config: LaunchConfig,
        config: ModelConfig,
        weights: str = "auto",
        deadline_s: float | None = None,
        on_progress: OnProgress = lambda text, progress: None,
    ) -> SGLangServer:
        """Start a server and return it ready, prepared for `weights` (a transport) and without
        weights.

        Call this on the main thread. `deadline_s` is by the model's size if it is None.
        `on_progress` is called each second with a text for people, and numbers that change with any
        progress. Raise ConfigError if the server does not start or lacks an operation,
        DeadlineExceeded if it is stalled or too slow, PeerLost if another server has its port.
        """
        _check_launch(launch_config)
        write_model_config(launch_config, config)
        limits = compute_start_limits(config, launch_config.dtype, launch_config.device)
        ports, key = PortBlock.reserve(), os.urandom(32).hex()
        http = HttpClient(f"http://127.0.0.1:{ports.http}", launch_config.slots, key)
        server = cls(launch_config, http, os.urandom(16).hex(), key, host, clock)
        server._ports, server._report = ports, on_progress
        server._weights = weights
        server.limits = limits if deadline_s is None else replace(limits, total_s=deadline_s)
        server._log_bounder = host.run_periodically(
            LOG_CHECK_INTERVAL_S,
            lambda: rotate_file_if_long(launch_config.log_file),
            "rotate sglang.log",
        )
        try:
            await server.launch()
        except BaseException:
            await server.stop()
            raise
        return server

    async def launch(self) -> None:
        """Start the process, for the first time or after `end`, and wait until it is ready.

        After any error it has ended.
        """
        assert self._ports is not None
        write_secrets(self.launch_config.secrets_file, self.name, self._key)
        log_file = self.launch_config.log_file
        log_bytes = log_file.stat().st_size if log_file.exists() else 0
        self._child = self._host.spawn(
            self.launch_config.build_command(self._ports),
            name="sglang",
            env=self.launch_config.build_environment(),
            log=log_file,
            options=SpawnOptions(own_session=True),
        )
        try:
            await self._wait_until_ready(log_bytes)
            await self._check_server(self._weights)
        except BaseException:  # the next launch needs its ports and its memory
            await self.end()
            raise
        finally:
            self.launch_config.secrets_file.unlink(missing_ok=True)
            self.start_text = ""

    async def _wait_until_ready(self, log_bytes: int) -> None:
        """Wait until it answers; `log_bytes`: size of its log before this start."""
        measure = ServerProcesses(self.child.pid).measure
        log_file = self.launch_config.log_file
        progress = StartProgress(self.clock, log_file, measure, self.limits, log_bytes)
        observed_s = self.clock.monotonic()
        while True:
            if (code := self.child.poll()) is not None:
                raise ConfigError(
                    f"SGLang exited with status {code} before it was ready: {self.read_log_tail()}",
                    where=str(self.launch_config.log_file),
                    fix="Read the log; change SGLang's flags in rollout.sglang_options",
                )
            if not await self.http.probe(v0_5.READY, PROBE_TIMEOUT_S):
                return
            if self.clock.monotonic() - observed_s >= OBSERVE_S:
                observed_s = self.clock.monotonic()
                await self._host.run_blocking(progress.observe, deadline_s=OBSERVE_TIMEOUT_S)
                self.start_text = progress.text
                self._report(progress.text, [progress.output_bytes, progress.cpu_s // 1])
                if reason := progress.explain_failure():
                    raise DeadlineExceeded(
                        f"{reason}: {self.read_log_tail()}",
                        where=str(self.launch_config.log_file),
                        fix="Read the log; change SGLang's flags in rollout.sglang_options, or "
                        "start again: compiled kernels are kept",
                    )
            await self.clock.sleep(POLL_S)

    async def _check_server(self, weights: str) -> None:
        """Read the server's version, and check that it offers the operations that the adapter uses.

        Its port was free when it was chosen, and another server may have taken it since.
        """
        try:
            about = await self._fetch(v0_5.INFO)
        except RemoteFailure as error:
            if UNAUTHORIZED not in error.message:
                raise
            about = {}  # the server has another key
        if about.get("served_model_name") != self.name:
            raise PeerLost(
                "another server uses the port of this SGLang server", where=self.http.url
            )
        self.version = str(about.get("version", "unknown"))
        self.ranks = int(about.get("tp_size", 1)) * int(about.get("pp_size", 1))
        self.uses_seeds = bool(about.get("enable_deterministic_inference", False))
        self.push_devices = find_push_devices(
            about, self.launch_config.device, count_gpus(), os.environ
        )
        self.sleep_tags = v0_5.choose_sleep_tags(about)
        self.memory_bytes = v0_5.parse_memory_bytes(about)
        self.keeps_weights = v0_5.keeps_released_weights(about)
        if not self.version.startswith("0.5."):
            raise ConfigError(
                f"SGLang {self.version} is not supported",
                where=self.launch_config.python,
                fix="Install SGLang 0.5: `meshrl engine install sglang`",
            )
        if (
            self.launch_config.tensor_parallel_size > 1
            and self.ranks % self.launch_config.tensor_parallel_size
        ):
            raise ConfigError(
                f"SGLang runs {self.ranks} processes, not "
                f"{self.launch_config.tensor_parallel_size}",
                where="rollout.tensor_parallel",
                fix="Read its log, and check rollout.sglang_options",
            )
        if self.launch_config.read_back and self.ranks > 1:
            raise ConfigError(
                f"{self.ranks} processes of SGLang share the model, and weights are verified "
                "only with 1",
                where="rollout.verify_weights",
                fix="Remove it, or set rollout.tensor_parallel = [1]",
            )
        described = await self._fetch("/openapi.json", DESCRIBE_TIMEOUT_S)
        lacking = v0_5.find_missing(described, v0_5.REQUIRED_FIELDS)
        transport = self.choose_transport(weights).transport
        for needed in {transport, "disk"} if weights == "auto" else {transport}:
            lacking += v0_5.find_missing(described, v0_5.TRANSPORT_FIELDS[needed])
        if self.launch_config.adapter_limits is not None:
            lacking += v0_5.find_missing(described, v0_5.ADAPTER_FIELDS)
        if self.launch_config.read_back:
            lacking += v0_5.find_missing(described, v0_5.READBACK_FIELDS)
        if lacking:
            raise ConfigError(
                f"SGLang {self.version} does not offer {', '.join(lacking)}",
                where=self.launch_config.python,
                fix="Install the version of `meshrl engine install sglang`",
            )

    def choose_transport(self, requested: str) -> ServerTransportChoice:
        """Choose the transport of weights to this server; ConfigError if it is impossible."""
        return choose_server_transport(self.push_devices, requested)

    async def _fetch(self, path: str, deadline_s: float = PROBE_TIMEOUT_S) -> Mapping[str, Any]:
        answer = await self.http.get(path, deadline_s)
        if not isinstance(answer, dict):
            raise RemoteFailure(f"{path} did not answer with a JSON object", where=self.http.url)
        return answer

    def get_exit_error(self) -> PeerLost | None:
        """Return the error of a server that has exited by itself."""
        code = self._child.poll() if self._child is not None else None
        if code is None:
            return None
        return PeerLost(
            f"SGLang exited with status {code}: {self.read_log_tail()}",
            where=str(self.launch_config.log_file),
        )

    def read_log_tail(self) -> str:
        try:
            content = self.launch_config.log_file.read_text(errors="replace")
        except FileNotFoundError:
            return "SGLang wrote no log"
        lines = [line for line in re.split(r"[\r\n]+", content) if not is_progress_bar(line)]
        return "\n".join(line[:MAX_LINE_CHARS] for line in lines[-TAIL_LINES:]).strip()

    async def end(self) -> None:
        """Kill the process and all its children; it has no state that a slower stop would save."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            await child.wait(STOP_TIMEOUT_S)

    async def stop(self) -> None:
        """End the process, and release all that it had."""
        if self._log_bounder is not None:
            self._log_bounder.stop()
        try:
            await self.end()
        finally:  # of a cancellation too
            if self._ports is not None:
                self._ports.release()
            await self.http.close()


def _check_launch(launch_config: LaunchConfig) -> None:
    """Raise ConfigError for a missing interpreter, or an option that MeshRL sets itself."""
    if not os.access(launch_config.python, os.X_OK):
        raise ConfigError(
            f"there is no interpreter {launch_config.python}",
            where="rollout.sglang_python",
            fix="Run `meshrl engine install sglang`, or name the interpreter that has SGLang",
        )
    if reserved := RESERVED_OPTIONS & {
        option.partition("=")[0] for option in launch_config.options
    }:
        raise ConfigError(
            f"{', '.join(sorted(reserved))} is reserved: MeshRL sets it to identify and "
            "protect the server",
            where="rollout.sglang_options",
            fix="Remove it; give the content of a --config file as separate flags",
        )
