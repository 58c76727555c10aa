"""Trajectories as lines of a terminal, and what the person at it types."""

from __future__ import annotations

import json
import sys
from typing import Any

from common.base.host.terminal import behind, visible
from common.mesh.process.host import SystemHost
from services.rollout.talking.partner import Played

THINKING_S = 7 * 86_400.0  # that a person may take for what they say
COLORS = {"prompt": "2", "environment": "2", "tool": "36", "model": "1"}  # of the terminal


class ChatConsole:
    """Turns as lines on standard output, and what the person types; `quiet`: no turns."""

    def __init__(self, host: SystemHost, quiet: bool) -> None:
        self._host, self._quiet = host, quiet
        self._colored = sys.stdout.isatty()

    def show(self, turn: dict[str, Any]) -> None:
        role, text = str(turn["role"]), str(turn["text"])
        if self._quiet or (role == "environment" and not text):
            return
        if role == "tool":
            text = f"{turn['name']}({json.dumps(turn['input'], ensure_ascii=False)}) -> {text}"
        if turn.get("truncated"):
            text += " [cut: no room for more]"
        label, out = f"{role + ':':<13}", behind(sys.stdout)
        print(f"{label}{self._painted(role, visible(text))}", file=out, flush=True)

    def _painted(self, role: str, text: str) -> str:
        return f"\033[{COLORS.get(role, '0')}m{text}\033[0m" if self._colored else text

    async def hear(self, ask: str) -> str | None:
        """A line; None at the end of the input."""
        try:
            line = await self._host.run_blocking(input, ask, deadline_s=THINKING_S)
        except EOFError:
            return None
        return line.strip() or await self.hear(ask)

    def tell(self, played: Played, as_json: bool) -> None:
        """How a trajectory ended."""
        if as_json:
            told = {"prompt": played.prompt, "turns": played.turns, "reason": played.reason}
            print(json.dumps(told | {"score": played.score}, ensure_ascii=False), flush=True)
        elif played.score is not None:
            print(f"{'reward:':<13}{played.score:g}", flush=True)
