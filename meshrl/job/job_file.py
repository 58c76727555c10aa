"""Job as its file describes it, with the line of each key for messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import JobConfig
from meshrl.common.job.named_files import NamedFile, list_named_files
from meshrl.job.row_files.data_source import DataSource, list_sources

MakeError = Callable[..., ConfigError]  # (key, message, fix): the error that names the key's line
MESSAGE_WITH_LOCATION = "{key}: {error.message}{place}"
HELD_OUT_KEY = "dataset.held_out"
MESSAGE_WITH_FIX = "{key}: {error}"  # with what to do


@dataclass(frozen=True)
class Choice:
    """Value that was chosen for a key which the job file leaves open."""

    key: str
    value: bool | int | float | str
    reason: str


@dataclass(frozen=True, eq=False)
class JobFile:
    """Job file as read; equal to itself alone."""

    config: JobConfig  # its paths are absolute
    base: Path  # directory of the file
    make_error: MakeError
    raw_document: Mapping[str, Any] = field(default_factory=dict)  # the tables and keys of the file
    choices: tuple[Choice, ...] = ()  # values of `config` that the file leaves open

    def with_config(self, config: JobConfig) -> JobFile:
        return replace(self, config=config)

    @contextmanager
    def locate_errors(
        self, key: str, message_format: str = "{key}: {error.message}"
    ) -> Iterator[None]:
        """Add the line of `key` to a ConfigError of the block.

        `message_format` makes the message from `key`, `error` and `place`, which is the error's own
        location in brackets.
        """
        try:
            yield
        except ConfigError as error:
            place = f" ({error.where})" if error.where else ""
            message = message_format.format(key=key, error=error, place=place)
            raise self.make_error(
                key, message, "" if message_format == MESSAGE_WITH_FIX else error.fix
            ) from error

    @property
    def datasets(self) -> list[DataSource]:
        """Sources of the job's rows."""
        return list_sources(self.config)

    @property
    def scored_datasets(self) -> list[DataSource]:
        """Sources of rows whose answers are sampled."""
        return [source for source in self.datasets if not self.is_supervised(source.key)]

    def is_supervised(self, key: str) -> bool:
        """Return True for a dataset whose answers are learned, or give the loss of an evaluation.

        With a reward, the model answers the held-out set, too.
        """
        is_sampled = key == HELD_OUT_KEY and self.config.has_reward
        return self.config.is_supervised and key.startswith("dataset.") and not is_sampled

    @property
    def models(self) -> list[NamedFile]:
        return [file for file in list_named_files(self.config) if file.is_model and file.path]

    @property
    def uses_row_prompts(self) -> bool:
        """True if the prompts are those of the rows, and not an environment's."""
        return not (self.config.environment.use or self.config.environment.verifiers)


Check = Callable[[JobFile], None]


def get_value(config: Any, key: str) -> Any:
    return attrgetter(key)(config)
