"""A submitted job on the host that runs it: its configuration, and where its bundle lies."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.job import bundle_files
from common.job.config import JobConfig


@dataclass(frozen=True)
class JobData:
    """A submitted job: its id and configuration, and its directories on this host."""

    id: str
    config: JobConfig
    bundle: Path
    run_dir: Path
    # What was packed, to check by what is read.
    files: bundle_files.Files = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, job: str, document: dict[str, Any], run_dir: str) -> JobData:
        """The job of a row in Redis, whose document holds the configuration and `bundle: {dir,
        digest, files}`.
        """
        values = {key: value for key, value in document.items() if key != "bundle"}
        bundle = Path(document["bundle"]["dir"])
        return cls(
            job, JobConfig.from_document(values), bundle, Path(run_dir), bundle_files.of(document)
        )

    def _whole(self, below: str) -> Path:
        """A file or folder of the bundle; Damaged if it is not what was packed."""
        bundle_files.check(self.bundle, self.files, below)
        return self.bundle / below

    @property
    def modules(self) -> Path:
        """Directory of the author's Python modules, which goes first on an import path. Damaged."""
        return self._whole("modules")

    @property
    def tokenizer(self) -> Path:
        """The bundled tokenizer.json; beside it lie the files that belong to it. Damaged."""
        name = self.config.model.tokenizer or "tokenizer.json"
        self._whole(bundle_files.folder(name))
        return self.bundle / name

    @property
    def origin(self) -> Path | None:
        """The bundled Hugging Face directory that the model begins from; None: from scratch.
        Damaged, as far as that shows without reading weights.
        """
        path = self.config.model.path
        return self._whole(path) if path else None

    def frozen(self, role: str) -> Path:
        """Where a frozen model of the job lies, if it was given as files. Damaged, as `origin`."""
        path: str = getattr(self.config.models, role).path
        return self._whole(path)

    def rows(self, which: str) -> list[dict[str, Any]]:
        """The rows of `train` or `held_out`; none when the job names no such file."""
        return self.rows_of(getattr(self.config.dataset, which))

    def rows_of(self, name: str) -> list[dict[str, Any]]:
        """The rows of a file of the bundle; none without a name. Damaged."""
        if not name:
            return []
        with self._whole(name).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]
