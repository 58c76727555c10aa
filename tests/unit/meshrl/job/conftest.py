"""Jobs that tests of job files vary: each is a path, and settings that belong to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from meshrl.common.base.errors import MeshError
from meshrl.common.job.config import JobConfig
from meshrl.common.model.tokens.tokenizer import build_character_tokenizer
from meshrl.job.job_file import Check, JobFile
from meshrl.job.job_reader import read_job_file
from tests.unit.common.model.chatting import qwen3_tokenizer
from tests.unit.meshrl.conftest import NO_TENSORS

EXAMPLE = Path(__file__).parents[4] / "examples/calculator.toml"
SMALL = ("rollout.max_tokens=64",)
RANKS = ("training.ranks=4", "mesh.workers=9")
MIXTURE = (
    *RANKS,
    "model.config.model_type=qwen3_moe",
    "model.config.num_key_value_heads=2",
    "model.config.num_experts=6",
    "model.config.num_experts_per_tok=2",
    "model.config.moe_intermediate_size=16",
)


@dataclass(frozen=True)
class Given:
    """A job file with settings."""

    path: Path
    settings: tuple[str, ...] = ()

    def load(self, *settings: str) -> JobConfig:
        """The job with further settings."""
        return self.read(*settings).config

    def read(self, *settings: str) -> JobFile:
        """The same, for checks that look at this host."""
        return read_job_file(self.path, [*self.settings, *settings])

    def refusal(self, *settings: str, check: Check | None = None) -> str:
        """What is said of the job with further settings, by a check or when it is read."""
        found = self.read(*settings) if check else None
        with pytest.raises(MeshError) as caught:
            check(found) if check and found else self.read(*settings)
        assert not check or ("\n" not in str(caught.value) and caught.value.fix)
        return str(caught.value)


@pytest.fixture
def tiny(job: Path) -> Given:
    """The job of two rows."""
    return Given(job)


@pytest.fixture
def small(job: Path) -> Given:
    """The job of two rows, whose tokenizer has the ids 0 to 11 and whose model has 16 rows."""
    build_character_tokenizer("0123456789+=", job.parent / "tokenizer.json")
    return Given(job, SMALL)


@pytest.fixture
def calculator() -> Given:
    """The example, which has an environment, tools and a reward of its own."""
    return Given(EXAMPLE)


@pytest.fixture
def ranks(job: Path) -> Given:
    """A job of a dense model, whose core has four ranks."""
    return Given(job, RANKS)


@pytest.fixture
def mixture(job: Path) -> Given:
    """A job of a mixture of experts, whose core has four ranks."""
    return Given(job, MIXTURE)


@pytest.fixture
def chat(job: Path) -> Given:
    """A job whose tokenizer has the tokens of a chat format."""
    qwen3_tokenizer(job.parent)
    return Given(job)


@pytest.fixture
def frozen(job: Path, shape: str) -> Given:
    """The job of two rows with a teacher, a stranger and another dataset beside it."""
    build_character_tokenizer("0123456789+=", job.parent / "tokenizer.json")
    model(job.parent / "teacher", "0123456789+=abc", shape)
    model(job.parent / "stranger", "abc0123456789+=", shape)
    (job.parent / "more.jsonl").write_text('{"prompt": "2+3="}\n{"prompt": "2+4="}\n')
    (job.parent / "given.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    (job.parent / "ask.txt").write_text("Is {answer} right?\nyes or no\n")
    return Given(job)


def model(directory: Path, characters: str, shape: str) -> Path:
    """What the checks look at of a Hugging Face directory."""
    directory.mkdir()
    (directory / "config.json").write_text(shape)
    (directory / "model.safetensors").write_bytes(NO_TENSORS)
    build_character_tokenizer(characters, directory / "tokenizer.json")
    return directory
