"""An engine of several workers: the server's command line, and who computes on them at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.engine.sglang.server import Launch, SGLangServer
from tests.load import scaled
from tests.unit.engine.sglang.test_secrets import MODEL, standing_in

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
    how = Launch("python", root, 4, 64, device="cuda", options=options, degree=degree)
    return how.command(30000)


def test_a_server_is_told_how_many_gpus_share_the_model(tmp_path: Path) -> None:
    found = words(tmp_path, 4)
    assert found[found.index("--tp-size") + 1] == "4"
    assert found.index("--tp-size") < found.index("--mem-fraction-static")
    assert "--tp-size" not in words(tmp_path, 1)


async def test_a_server_that_computes_on_fewer_is_refused(tmp_path: Path) -> None:
    how = Launch(standing_in(tmp_path, SAYS), tmp_path / "e", 4, 64, degree=2)
    with pytest.raises(ConfigError, match="computes with 1 processes, not with 2") as refused:
        await SGLangServer.start(SystemHost(), SystemClock(), how, MODEL, "auto", scaled(60.0))
    assert refused.value.where == "rollout.tensor_parallel"
