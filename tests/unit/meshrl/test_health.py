"""The probe that images without curl use."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

from meshrl.health import asked
from tests.load import scaled

HELD = Event()


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/drips":
            while not HELD.wait(0.1):
                self.wfile.write(b"H")
            return
        self.send_response(503 if self.path == "/readyz" else 200)
        self.end_headers()
        self.wfile.write(b"it is draining\n" if self.path == "/readyz" else b"ok\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_it_says_what_was_said_and_ends_in_time_whatever_answers() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert asked(f"{url}/livez") == (True, "ok")
            assert asked(f"{url}/readyz") == (False, "503 it is draining")
            began = time.monotonic()
            well, said = asked(f"{url}/drips")
            assert not well and "does not answer" in said
            assert time.monotonic() - began < scaled(30.0), "it drips until it is held"
        finally:
            HELD.set()
            server.shutdown()
    well, said = asked(f"{url}/livez")
    assert not well and "does not answer" in said
    for wrong in ("localhost:9400", "https://x/livez", "http://x:0/", "http://x:99999/"):
        well, said = asked(wrong)
        assert not well and "is no URL of a page" in said


def test_as_a_program_it_exits_by_the_answer_and_imports_little() -> None:
    code = (
        "import runpy, sys, json\n"
        "sys.argv = ['health', 'http://127.0.0.1:1/livez']\n"
        "try: runpy.run_module('meshrl.health', run_name='__main__')\n"
        "except SystemExit as end: print(json.dumps([end.code, sorted(sys.modules)]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(60)
    )
    said, ended = ran.stdout.splitlines()
    assert said.startswith("http://127.0.0.1:1/livez does not answer")
    exit_code, modules = json.loads(ended)
    assert exit_code == 1
    assert not {"torch", "redis", "typer", "structlog", "meshrl.common"} & set(modules)
