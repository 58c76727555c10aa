"""SGLang's own hierarchical cache: what a job asks of it becomes flags of its server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError


@dataclass(frozen=True)
class Tiers:
    """Where a server keeps keys and values that have no room on its GPU; as SGLang 0.5's
    `--enable-hierarchical-cache` has it (HiCache).
    """

    memory_gib: float
    directory: Path | None = None  # on a disk, without a limit of its own; None: none there

    def flags(self, device: str) -> list[str]:
        """Those of the server. ConfigError where it has no such cache."""
        if device != "cuda":
            raise ConfigError(
                "SGLang keeps keys and values outside of its cache on GPUs alone",
                where="rollout.kv",
                fix="set memory and disk to 0, or take the built-in engine",
            )
        flags = [
            "--enable-hierarchical-cache",
            "--hicache-size",
            str(max(1, round(self.memory_gib))),
        ]
        return flags + (["--hicache-storage-backend", "file"] if self.directory else [])

    def environment(self) -> dict[str, str]:
        """What the server finds in its environment."""
        if self.directory is None:
            return {}
        return {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.directory)}
