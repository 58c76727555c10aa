"""How a process starts and ends."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.host.settings import SETTINGS_ENV, MeshSettings
from tests.load import scaled

SERVICE = """
import asyncio
from meshrl.common.mesh.runtime.mesh import run

async def main():
    print("up", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("cleaned up", flush=True)

run(main)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_service_cleanly(number: signal.Signals) -> None:
    argv = [sys.executable, "-c", SERVICE]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.stdout.read() == "cleaned up\n"
        assert process.wait(timeout=scaled(20)) == 0


def test_settings_come_from_the_file_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.json"
    settings = MeshSettings(
        redis_url="redis://localhost", run_root="/runs", stall_s=5.0, secret="5e1f"
    )
    path.write_text("{}")
    path.chmod(0o644)
    settings.to_file(path)
    assert path.stat().st_mode & 0o777 == 0o600, "the URL may hold a password"
    assert "localhost" not in repr(settings) and "5e1f" not in repr(settings)
    monkeypatch.setenv(SETTINGS_ENV, str(path))
    assert MeshSettings.from_env() == settings
    path.write_text(json.dumps({**dataclasses.asdict(settings), "colour": "blue"}))
    with pytest.raises(ConfigError, match="colour"):
        MeshSettings.from_env()
    monkeypatch.delenv(SETTINGS_ENV)
    with pytest.raises(ConfigError, match=SETTINGS_ENV):
        MeshSettings.from_env()


def test_settings_that_others_can_read_or_have_made_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.json"
    MeshSettings(redis_url="redis://localhost", run_root="/runs").to_file(path)
    monkeypatch.setenv(SETTINGS_ENV, str(path))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 640") as refused:
        MeshSettings.from_env()
    assert "chmod 600" in refused.value.fix
    if os.geteuid() == 0:
        path.chmod(0o600)
        os.chown(path, 65534, 65534)
        with pytest.raises(ConfigError, match="user 65534"):
            MeshSettings.from_env()
