"""How an SGLang server is told the key that its clients need: by a file, and not for long."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, PeerLost
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.services.engine.sglang.server import LaunchConfig, SGLangServer
from tests.load import scaled
from tests.unit.common.generation.engines_under_test import TINY

MODEL: ModelConfig = TINY
# Stands where SGLang's interpreter would: notes how it was started, then ends.
NOTES = """
import json, sys
from pathlib import Path
path = Path(sys.argv[sys.argv.index("--config") + 1])
about = [sys.argv, json.loads(path.read_text()), path.stat().st_mode & 0o777]
Path(__file__).with_name("noted").write_text(json.dumps(about))
"""


# Stands where SGLang's interpreter would: as a server of somebody else's, who has another key.
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


def standing_in(directory: Path, program: str) -> str:
    """An interpreter that runs a program of ours, whatever it is told."""
    (directory / "program.py").write_text(program)
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {directory}/program.py "$@"\n')
    python.chmod(0o755)
    return str(python)


async def test_a_server_with_another_key_is_somebody_elses(tmp_path: Path) -> None:
    python = standing_in(tmp_path, OTHER)
    how = LaunchConfig(python, tmp_path / "engine", 4, 64)
    with pytest.raises(PeerLost, match="another server"):
        await SGLangServer.start(SystemHost(), SystemClock(), how, MODEL, "auto", scaled(60.0))


async def test_neither_name_nor_key_is_in_its_command_line(tmp_path: Path) -> None:
    how = LaunchConfig(standing_in(tmp_path, NOTES), tmp_path / "engine", 4, 64)
    with pytest.raises(ConfigError, match="before it was ready"):
        await SGLangServer.start(SystemHost(), SystemClock(), how, MODEL)
    words, secrets, mode = json.loads((tmp_path / "noted").read_text())
    assert set(secrets) == {"served-model-name", "api-key"} and mode == 0o600
    assert not any(secret in word for word in words for secret in secrets.values())
    assert not how.secrets_file.exists(), "it has been read"


@pytest.mark.parametrize("option", ["--api-key=abc", "--config", "--served-model-name"])
async def test_options_that_would_undo_it_are_refused(tmp_path: Path, option: str) -> None:
    how = LaunchConfig(sys.executable, tmp_path, 4, 64, options=(option, "x"))
    with pytest.raises(ConfigError, match=option.partition("=")[0]) as refused:
        await SGLangServer.start(SystemHost(), SystemClock(), how, MODEL)
    assert refused.value.where == "rollout.sglang_options"


SAYS = """
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


def words(root: Path, degree: int) -> list[str]:
    options = ("--mem-fraction-static", "0.7")
    how = LaunchConfig(
        "python", root, 4, 64, device="cuda", options=options, tensor_parallel_size=degree
    )
    return how.build_command(30000)


def test_a_server_is_told_how_many_gpus_share_the_model(tmp_path: Path) -> None:
    found = words(tmp_path, 4)
    assert found[found.index("--tp-size") + 1] == "4"
    assert found.index("--tp-size") < found.index("--mem-fraction-static")
    assert "--tp-size" not in words(tmp_path, 1)


async def test_a_server_that_computes_on_fewer_is_refused(tmp_path: Path) -> None:
    how = LaunchConfig(standing_in(tmp_path, SAYS), tmp_path / "e", 4, 64, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="computes with 1 processes, not with 2") as refused:
        await SGLangServer.start(SystemHost(), SystemClock(), how, MODEL, "auto", scaled(60.0))
    assert refused.value.where == "rollout.tensor_parallel"
