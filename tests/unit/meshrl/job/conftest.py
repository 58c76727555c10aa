"""Jobs that tests of job files vary: a path with additional settings."""

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
class JobVariant:
    """Job file with additional settings."""

    path: Path
    settings: tuple[str, ...] = ()

    def load(self, *settings: str) -> JobConfig:
        """Load the job with further settings."""
        return self.read(*settings).config

    def read(self, *settings: str) -> JobFile:
        """Read the job with further settings for checks of this host."""
        return read_job_file(self.path, [*self.settings, *settings])

    def get_error(self, *settings: str, check: Check | None = None) -> str:
        """Return the error of a check, or of reading, with further settings."""
        found = self.read(*settings) if check else None
        with pytest.raises(MeshError) as caught:
            check(found) if check and found else self.read(*settings)
        assert not check or ("\n" not in str(caught.value) and caught.value.fix)
        return str(caught.value)


@pytest.fixture
def tiny(job: Path) -> JobVariant:
    """Make the job of two rows."""
    return JobVariant(job)


@pytest.fixture
def small(job: Path) -> JobVariant:
    """Make the job of two rows with token ids 0 to 11 and a model of 16 embedding rows."""
    build_character_tokenizer("0123456789+=", job.parent / "tokenizer.json")
    return JobVariant(job, SMALL)


@pytest.fixture
def calculator() -> JobVariant:
    """Make the example job, which has its own environment, tools and reward."""
    return JobVariant(EXAMPLE)


@pytest.fixture
def ranks(job: Path) -> JobVariant:
    """Make a job of a dense model whose core has four ranks."""
    return JobVariant(job, RANKS)


@pytest.fixture
def mixture(job: Path) -> JobVariant:
    """Make a job of a mixture of experts whose core has four ranks."""
    return JobVariant(job, MIXTURE)


@pytest.fixture
def chat(job: Path) -> JobVariant:
    """Make a job whose tokenizer has the tokens of a chat format."""
    qwen3_tokenizer(job.parent)
    return JobVariant(job)


@pytest.fixture
def frozen(job: Path, shape: str) -> JobVariant:
    """Make the job of two rows beside a teacher, an unrelated model and another dataset."""
    build_character_tokenizer("0123456789+=", job.parent / "tokenizer.json")
    write_model(job.parent / "teacher", "0123456789+=abc", shape)
    write_model(job.parent / "stranger", "abc0123456789+=", shape)
    (job.parent / "more.jsonl").write_text('{"prompt": "2+3="}\n{"prompt": "2+4="}\n')
    (job.parent / "given.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    (job.parent / "ask.txt").write_text("Is {answer} right?\nyes or no\n")
    return JobVariant(job)


def write_model(directory: Path, characters: str, shape: str) -> Path:
    """Write the files of a Hugging Face directory that the checks read."""
    directory.mkdir()
    (directory / "config.json").write_text(shape)
    (directory / "model.safetensors").write_bytes(NO_TENSORS)
    build_character_tokenizer(characters, directory / "tokenizer.json")
    return directory
