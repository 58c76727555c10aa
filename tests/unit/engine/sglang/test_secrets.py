"""Key of an SGLang server: passed in a file that is removed once it was read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, PeerLost
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.services.engine.sglang.launch_config import LaunchConfig
from meshrl.services.engine.sglang.ports import PortBlock
from meshrl.services.engine.sglang.server import SGLangServer
from tests.load import scaled
from tests.unit.common.generation.engines_under_test import TINY

MODEL: ModelConfig = TINY
# Replacement of SGLang's interpreter: writes its arguments to a file, then exits.
NOTES = """
import json, sys
from pathlib import Path
path = Path(sys.argv[sys.argv.index("--config") + 1])
about = [sys.argv, json.loads(path.read_text()), path.stat().st_mode & 0o777]
Path(__file__).with_name("noted").write_text(json.dumps(about))
"""


# Replacement of SGLang's interpreter: a foreign server with another key.
OTHER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Other(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Other).serve_forever()
"""


def create_interpreter(directory: Path, program: str) -> str:
    """Create an interpreter that runs `program` with any arguments."""
    (directory / "program.py").write_text(program)
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {directory}/program.py "$@"\n')
    python.chmod(0o755)
    return str(python)


async def test_server_with_another_key_is_foreign(tmp_path: Path) -> None:
    python = create_interpreter(tmp_path, OTHER)
    launch_config = LaunchConfig(python, tmp_path / "engine", 4, 64)
    with pytest.raises(PeerLost, match="another server"):
        await SGLangServer.start(
            SystemHost(), SystemClock(), launch_config, MODEL, "auto", scaled(60.0)
        )


async def test_command_line_contains_neither_name_nor_key(tmp_path: Path) -> None:
    launch_config = LaunchConfig(create_interpreter(tmp_path, NOTES), tmp_path / "engine", 4, 64)
    with pytest.raises(ConfigError, match="before it was ready"):
        await SGLangServer.start(SystemHost(), SystemClock(), launch_config, MODEL)
    build_command, secrets, mode = json.loads((tmp_path / "noted").read_text())
    assert set(secrets) == {"served-model-name", "api-key"} and mode == 0o600
    assert not any(secret in word for word in build_command for secret in secrets.values())
    assert not launch_config.secrets_file.exists(), "it has been read"


@pytest.mark.parametrize("option", ["--api-key=abc", "--config", "--served-model-name"])
async def test_options_that_expose_the_key_are_rejected(tmp_path: Path, option: str) -> None:
    launch_config = LaunchConfig(sys.executable, tmp_path, 4, 64, options=(option, "x"))
    with pytest.raises(ConfigError, match=option.partition("=")[0]) as refused:
        await SGLangServer.start(SystemHost(), SystemClock(), launch_config, MODEL)
    assert refused.value.where == "rollout.sglang_options"


SINGLE_PROCESS_SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
secrets = json.load(open(sys.argv[sys.argv.index("--config") + 1]))
class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        about = {"version": "0.5.9", "tp_size": 1}
        about["served_model_name"] = secrets["served-model-name"]
        body = json.dumps(about).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Server).serve_forever()
"""


def build_command(root: Path, degree: int) -> list[str]:
    options = ("--mem-fraction-static", "0.7")
    launch_config = LaunchConfig(
        "python", root, 4, 64, device="cuda", options=options, tensor_parallel_size=degree
    )
    return launch_config.build_command(PortBlock(30000))


def test_server_gets_the_tensor_parallel_size(tmp_path: Path) -> None:
    command_line = build_command(tmp_path, 4)
    assert command_line[command_line.index("--tp-size") + 1] == "4"
    assert command_line.index("--tp-size") < command_line.index("--mem-fraction-static")
    assert "--tp-size" not in build_command(tmp_path, 1)


async def test_server_with_fewer_processes_is_rejected(tmp_path: Path) -> None:
    launch_config = LaunchConfig(
        create_interpreter(tmp_path, SINGLE_PROCESS_SERVER),
        tmp_path / "e",
        4,
        64,
        tensor_parallel_size=2,
    )
    with pytest.raises(ConfigError, match="runs 1 processes, not 2") as refused:
        await SGLangServer.start(
            SystemHost(), SystemClock(), launch_config, MODEL, "auto", scaled(60.0)
        )
    assert refused.value.where == "rollout.tensor_parallel"
