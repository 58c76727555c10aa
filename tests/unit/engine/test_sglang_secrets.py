"""How an SGLang server is told the key that its clients need: by a file, and not for long."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from common.clock import SystemClock
from common.errors import ConfigError
from common.model.config import ModelConfig
from common.process.host import SystemHost
from services.engine.sglang import startup
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


async def test_neither_name_nor_key_is_in_its_command_line(tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text(NOTES)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/notes.py "$@"\n')
    python.chmod(0o755)
    how = startup.launch(str(python), MODEL, tmp_path / "engine", 4, 64)
    with pytest.raises(ConfigError, match="before it was ready"):
        await startup.start(SystemHost(), SystemClock(), how, "auto")
    words, secrets, mode = json.loads((tmp_path / "noted").read_text())
    assert set(secrets) == {"served-model-name", "api-key"} and mode == 0o600
    assert not any(secret in word for word in words for secret in secrets.values())
    assert not how.secrets.exists(), "it has been read"


@pytest.mark.parametrize("option", ["--api-key=abc", "--config", "--served-model-name"])
async def test_options_that_would_undo_it_are_refused(tmp_path: Path, option: str) -> None:
    how = startup.launch(sys.executable, MODEL, tmp_path, 4, 64, options=(option, "x"))
    with pytest.raises(ConfigError, match=option.partition("=")[0]) as refused:
        await startup.start(SystemHost(), SystemClock(), how, "auto")
    assert refused.value.where == "rollout.sglang_options"
