"""Mistakes as users make them: each is told with its line, its key, what is wrong and the fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.job.config import JobConfig
from common.job.schema import JOB
from meshrl.job.jobfile import load
from meshrl.job.toml_lines import key_lines
from tests.load import scaled


def refusal(job: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(job, list(overrides))
    return str(caught.value)


def test_every_default_keeps_to_its_own_declaration() -> None:
    def fail(key: str, message: str, fix: str) -> ConfigError:
        return ConfigError(message)

    assert JOB.validated(JobConfig().document(), fail) == JobConfig()


def test_processes_that_read_jobs_do_without_pydantic() -> None:
    code = "import sys, common.job.bundle.job_data; sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=scaled(60))


@pytest.mark.parametrize(
    ("written", "line", "says"),
    [
        # other types
        ("[mesh]\nworkers = '3'", 19, "mesh.workers must be a whole number, not '3'. Write 3 with"),
        ("[mesh]\nworkers = true", 19, "mesh.workers must be a whole number, not true"),
        ("[mesh]\nworkers = 3.0", 19, "mesh.workers must be a whole number, not 3.0"),
        ("[mesh]\nbind = 9400", 19, "mesh.bind must be a string, not 9400"),
        ("[mesh]\ndevice = 2024-01-01", 19, "= the date 2024-01-01 must be one of cpu, cuda"),
        ("[evaluation]\nafter = 'false'", 19, "true or false, not 'false'. Write false without"),
        ("[rollout]\nstop = ']'", 19, "rollout.stop must be a list of strings, not ']'. Write [']"),
        ("[rollout]\nstop = [']', 1]", 19, "rollout.stop[1] must be a string, not 1"),
        ("[tracking]\ntensorboard = 3", 19, "must be true or false, or a string, not 3"),
        ("[environment]\ntools = ['a:b']", 19, "environment.tools must be a table, not a list"),
        ("[environment.mcp]\nweb = 'run'", 19, "web must be a list of strings, not 'run'. Write ["),
        # tables
        ("[[mesh]]\nworkers = 3", 18, "mesh must be a table, not a list. Write [mesh]"),
        ("[rollout]\nbuckets = [3]", 19, "buckets[0] must be a table, not 3. Write [[rollout.buc"),
        ("[rollout.buckets]\nbatch = 3", 18, "a list of tables, not a table. Write [[rollout.buck"),
        ("[optimiser]\nmuon_lr = 0.1", 18, "unknown key optimiser. Did you mean optimizer?"),
        ("[generation]\ntemperature = 0.5", 19, "Did you mean rollout.temperature?"),
        ("[rollout]\ntemp = 0.5", 19, "Did you mean rollout.temperature?"),
        ("[budget]\ngiraffe = 1", 19, "unknown key budget.giraffe. budget has steps"),
        ("[optimizer]\nlr = 0.1", 19, "unknown key optimizer.lr. Did you mean optimizer.muon_lr?"),
        # ranges
        ("[rollout]\ntemperature = nan", 19, "must be a finite number, not nan"),
        ("[rollout]\ntemperature = 0", 19, "rollout.temperature = 0 must be above 0"),
        ("[rollout]\ntop_p = 1.5", 19, "rollout.top_p = 1.5 must be at most 1"),
        ("[rollout]\nlengths = [3, 0]", 19, "rollout.lengths[1] = 0 must be at least 1"),
        ("[rollout]\nslots = 99999999999999999999", 19, "at most 9223372036854775807"),
        ("[optimizer]\nmuon_lr = -0.1", 19, "optimizer.muon_lr = -0.1 must be at least 0"),
        ("[sandbox]\nopen_files = 2000", 19, "sandbox.open_files = 2000 must be at most 1024"),
        ("[mesh]\nbind = 'localhost'", 19, "= 'localhost' must be tcp://INTERFACE:PORT"),
        ("[lora]\nrank = 1000", 19, "lora.rank: adapters of rank 1000"),
        ("[pool]\nshare = 0", 19, "pool.share = 0 must be above 0"),
        ("[pool]\nworkers = 3", 19, "pool.workers must be a table, not 3. Write [pool.workers]"),
        ("[pool.workers]\nleast = 4\nmost = 3", 20, "most = 3 is below pool.workers.least = 4"),
        (
            "[pool.workers]\nmost = 1\n[training]\nranks = 2",
            19,
            "pool.workers.most = 1, and the job takes 2: one",
        ),
        # choices
        ("[rollout]\nengine = 'Torch'", 19, "must be one of torch, sglang. Did you mean torch?"),
        ("[mesh]\ndevice = 'gpu'", 19, "mesh.device = 'gpu' must be one of cpu, cuda"),
        ("[rollout]\nstop_text = ['']", 19, "rollout.stop_text[0] must not be empty"),
        # values that would not arrive
        ("[environment.chat_options]\nday = 2024-01-01", 19, "options.day must not be a date: wri"),
        ("[environment.chat_options]\na = {b = [nan]}", 19, "options.a.b[0] must be a finite num"),
        ("[sandbox]\npython = 'a\\u0000'".replace("'", '"'), 19, "holds a zero byte"),
        (
            "[models.teacher]\npath = '~nobody_here/x'",
            19,
            "home directory of a user that this host",
        ),
        # twice
        ("[budget]\nsteps = 1\nsteps = 2", 20, "Cannot overwrite a value: steps = 2. A key or tab"),
        ("[reward]\nuse = 'math'", 18, "Cannot declare ('reward',) twice: [reward]. A key or tab"),
        # syntax
        ("[budget]\nsteps = True", 19, "Invalid value: steps = True. Text takes quotes"),
    ],
)
def test_a_mistake_is_told_with_its_line(job: Path, written: str, line: int, says: str) -> None:
    job.write_text(f"{job.read_text()}\n{written}\n")
    message = refusal(job)
    assert message.startswith(f"{job}, line {line}")
    assert says in message


def test_a_mistake_in_a_table_of_a_list_names_the_line_of_that_table(job: Path) -> None:
    part = '[[reward.parts]]\nuse = "math"\n'
    job.write_text(f"{job.read_text()}\n{part}{part}wieght = 2.0\n")
    assert f"{job}, line 22: unknown key reward.parts[1].wieght" in refusal(job, "reward.use=")
    job.write_text(job.read_text().replace("wieght", "weight"))
    with job.open("a") as file:
        file.write('[reward.parts.options]\ngold = "x"\n')
    message = refusal(job, "reward.use=")
    assert f"{job}, line 24: reward.parts[1].options: math has no option 'gold'" in message
    inline = "reward.parts=[{use='math', weight='1'}]"
    assert refusal(job, inline).startswith(f"--set {inline}: reward.parts[0].weight must be a numb")


def test_the_misspelt_key_is_told_before_what_is_missing_for_it(job: Path) -> None:
    buckets = "rollout.buckets=[{max_token=60, batch=8}]"
    assert "Did you mean rollout.buckets[0].max_tokens?" in refusal(job, buckets)


def test_of_two_mistakes_the_upper_one_is_told(job: Path) -> None:
    job.write_text(f"{job.read_text()}\n[planner]\ngain = -1\n[mesh]\nworkers = 1\n")
    assert "planner.gain" in refusal(job)


def test_a_file_that_is_not_utf8_names_its_line(job: Path) -> None:
    job.write_bytes(b"# caf\n# caf\xe9\n" + job.read_bytes())
    assert f"{job}, line 2: not UTF-8" in refusal(job)


def test_tables_of_lists_have_lines_of_their_own() -> None:
    text = "[[a]]\nb = 1\n[[a]]\nb = 2\n[a.c]\nd = 3\n[[a.e]]\n[[a.e]]\nf = 4\n[g]\n"
    assert key_lines(text) == {
        **{"a": 1, "a[0]": 1, "a[0].b": 2, "a[1]": 3, "a[1].b": 4, "a[1].c": 5, "a[1].c.d": 6},
        **{"a[1].e": 7, "a[1].e[0]": 7, "a[1].e[1]": 8, "a[1].e[1].f": 9, "g": 10},
    }
