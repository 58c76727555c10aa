"""Redis permissions of each role, and rules for every script."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from meshrl.common.api.calls import call_permissions
from meshrl.common.base.errors import NotAllowed, Refused
from meshrl.common.base.host.settings import make_redis_user
from meshrl.common.state import events, jobs
from meshrl.common.state.hosts import acl
from meshrl.common.state.hosts.acl import (
    COMMON_SCRIPTS,
    IDEMPOTENT_SCRIPTS,
    build_acl_rules,
    compute_role_permissions,
    list_role_scripts,
)
from meshrl.common.state.redis.client import SCRIPTS_DIR, StateClient, find_script, load_script
from tests.contract.state.state_bench import binary_of, running_server
from tests.load import scaled

ROOT = Path(__file__).parents[4]
# Packages whose code runs in processes of each key's roles, beside the common ones.
PACKAGES = {
    "engine": {"engine"},
    "gateway": {"gateway"},
    "node": {"node", "worker"},
    "planner": {"planner"},
    "rollout": {"rollout"},
    "sandbox": {"sandbox"},
    "scoring": {"scoring"},
    "trainer": {"trainer", "rank", "hybrid"},
    "weights": {"weights"},
}
# Exit reports of a sandbox never fail a job (`charge_job`).
UNREACHABLE_SCRIPTS = {"sandbox": {"charge_exit"}}
SUBMITTERS = {"gateway", "person"}  # roles that set a job's document
HOST, OTHER = "here-000001", "there-000002"
DIGEST = "5e" * 32
SUPERVISION = "meshrl.common.mesh.process.supervision."  # its modules report exits by a script
RECORDS = "meshrl.common.records."  # of slices: a script writes their profile
Symbol = tuple[str, str]  # module of common/state, name in it
# Methods of StateClient whose first argument is a script's name.
SCRIPT_METHODS = {"run_script", "run_script_sync", "run_job_script", "run_mesh_script"}
NAMES = sorted(path.stem for path in SCRIPTS_DIR.glob("*/*.lua"))
LOADED_SCRIPTS = [name for name in NAMES if not name.startswith("_") and name != "prelude"]


def list_scripts() -> set[str]:
    names = {path.stem for path in SCRIPTS_DIR.glob("*/*.lua")}
    return {name for name in names if not name.startswith("_") and name != "prelude"}


class SymbolUses(ast.NodeVisitor):
    """Symbols of common/state that a piece of code uses, and the scripts that it runs."""

    def __init__(self, modules: dict[str, str], names: dict[str, Symbol]) -> None:
        self.modules, self.names = modules, names
        self.symbols: set[Symbol] = set()
        self.scripts: set[str] = set()
        self._chosen: dict[str, set[str]] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        local_names = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        name_nodes = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
        local_names |= {one.id for one in name_nodes if isinstance(one.ctx, ast.Store)}
        outer_names, self.names = (
            self.names,
            {k: v for k, v in self.names.items() if k not in local_names},
        )
        self.generic_visit(node)
        self.names = outer_names

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.names:
            self.symbols.add(self.names[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id in self.modules:
            self.symbols.add((self.modules[node.value.id], node.attr))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        texts = {
            one.value
            for one in ast.walk(node.value)
            if isinstance(one, ast.Constant) and isinstance(one.value, str)
        }
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._chosen[target.id] = texts
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if method in SCRIPT_METHODS and node.args:
            self._add_script(node.args[0])
        elif isinstance(node.func, ast.Name) and node.func.id == "run_script_once":
            self._add_script(node.args[1])
        self.generic_visit(node)

    def _add_script(self, script: ast.expr) -> None:
        if isinstance(script, ast.Constant):
            self.scripts.add(str(script.value))
        elif isinstance(script, ast.Name):
            self.scripts |= self._chosen.get(script.id, set())


def find_imports(tree: ast.Module) -> tuple[dict[str, str], dict[str, Symbol]]:
    """Return modules of common/state by their names in a file, and symbols imported from them."""
    modules: dict[str, str] = {}
    names: dict[str, Symbol] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        for alias in node.names:
            local = alias.asname or alias.name
            folders = "meshrl.common.state.", SUPERVISION, RECORDS
            if not f"{node.module}.".startswith(folders):
                continue
            package_dir = ROOT / node.module.replace(".", "/")
            if (package_dir / f"{alias.name}.py").is_file():
                modules[local] = alias.name
            else:
                names[local] = (package_dir.name, alias.name)
    return modules, names


@pytest.fixture(scope="module")
def scripts_by_symbol() -> Callable[[set[Symbol]], set[str]]:
    graph: dict[Symbol, tuple[set[Symbol], set[str]]] = {}
    others = "mesh/process/supervision/exit_reports.py", "records/slice_records.py"
    paths = [ROOT / "common" / name for name in others]
    for path in [*(ROOT / "common/state").rglob("*.py"), *paths]:
        tree = ast.parse(path.read_text())
        modules, names = find_imports(tree)
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        definitions = [node for node in tree.body if isinstance(node, kinds)]
        names |= {node.name: (path.stem, node.name) for node in definitions}
        for node in definitions:
            uses = SymbolUses(modules, names)
            uses.visit(node)
            graph[path.stem, node.name] = uses.symbols, uses.scripts

    def find_scripts(symbols: set[Symbol]) -> set[str]:
        visited: set[Symbol] = set()
        pending, scripts = set(symbols), set()
        while pending:
            symbol = pending.pop()
            visited.add(symbol)
            used_symbols, scripts_run = graph.get(symbol, (set(), set()))
            scripts |= scripts_run & list_scripts()
            pending |= used_symbols - visited
        return scripts

    return find_scripts


def find_symbols(*folders: str) -> set[Symbol]:
    symbols: set[Symbol] = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            uses = SymbolUses(*find_imports(tree))
            uses.visit(tree)
            symbols |= uses.symbols
    return symbols


def test_permission_table_has_every_script_and_role() -> None:
    assert set(acl.SCRIPT_PERMISSIONS) == list_scripts()
    assert {
        name for name in list_scripts() if "previous_reply()" in find_script(name).read_text()
    } == (IDEMPOTENT_SCRIPTS)
    assert acl.ROLES == call_permissions.ROLES


@pytest.mark.rotating(3)
@pytest.mark.parametrize("package", PACKAGES)
def test_services_run_exactly_the_scripts_their_roles_may_run(
    package: str, scripts_by_symbol: Callable[[set[Symbol]], set[str]]
) -> None:
    scripts_run = scripts_by_symbol(find_symbols(f"services/{package}")) - UNREACHABLE_SCRIPTS.get(
        package, set()
    )
    allowed = set().union(*(list_role_scripts(role) for role in PACKAGES[package]))
    assert scripts_run <= allowed
    unused = (
        set().union(*(list_role_scripts(role) for role in PACKAGES[package]))
        - COMMON_SCRIPTS
        - scripts_run
    )
    assert not unused, "rights that nothing uses"


def test_common_scripts_are_allowed_to_all_roles(
    scripts_by_symbol: Callable[[set[Symbol]], set[str]],
) -> None:
    folders = (
        "common/mesh/runtime",
        "common/mesh/process",
        "common/mesh/wire",
        "common/mesh/transport",
        "common/weights/bulk",
    )
    single_user_scripts = {"admit_host"}  # a mesh without other hosts has one Redis user
    assert scripts_by_symbol(find_symbols(*folders)) - single_user_scripts <= COMMON_SCRIPTS


@pytest.mark.parametrize(
    ("role", "host", "digest"),
    [
        ("launcher", HOST, DIGEST),
        ("worker", "*", DIGEST),
        ("worker", "a b", DIGEST),
        ("worker", "a:b", DIGEST),
        ("worker", HOST, "none ~*"),
    ],
)
def test_user_with_wider_rights_than_its_role_is_rejected(
    role: str, host: str, digest: str
) -> None:
    with pytest.raises(Refused):
        build_acl_rules(role, host, digest, enabled=True)


def test_roles_write_only_their_own_credentials() -> None:
    for role in acl.ROLES - {"person"}:
        writable_keys = {
            key for key in compute_role_permissions(role, HOST).writes if ":credentials:" in key
        }
        assert writable_keys == {f"{{mesh}}:credentials:{role}:{HOST}"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server(binary_of("redis-server")) as server:
        yield server.url


@pytest.fixture
async def owner(url: str) -> AsyncIterator[StateClient]:
    """Yield a client of a server with all roles of a host, whose password is "secret"."""
    state = await StateClient.open(url)
    for role in acl.ROLES:
        words = build_acl_rules(role, HOST, DIGEST, enabled=True)
        await state.run_command("ACL", "SETUSER", make_redis_user(role, HOST), *words, ">secret")
    yield state
    await state.close()


async def is_allowed(owner: StateClient, role: str, *words: str) -> bool:
    """Return True if Redis allows the command to a role's user."""
    reply = await owner.run_command("ACL", "DRYRUN", make_redis_user(role, HOST), *words)
    return str(reply) == "OK"


ADMIN_COMMANDS = """ACL LIST|CONFIG GET dir|CONFIG SET dir /|FLUSHALL|FLUSHDB|KEYS *|SHUTDOWN|SCAN 0
DEBUG SLEEP 1|REPLICAOF a 1|SAVE|BGSAVE|BGREWRITEAOF|MONITOR|CLIENT LIST|CLIENT KILL ID 1|INFO|
CLIENT TRACKING ON|CLIENT REPLY OFF|CLIENT CACHING YES|EVAL return 0|SCRIPT FLUSH|SCRIPT KILL|
FUNCTION LIST|MODULE LIST|SWAPDB 0 1|SUBSCRIBE a|
PUBLISH a b|RANDOMKEY|LATENCY LATEST|SLOWLOG GET|MIGRATE a 1 k 0 1|FAILOVER|CLUSTER INFO"""


@pytest.mark.needs("redis-server")
@pytest.mark.parametrize("role", sorted(acl.ROLES))
async def test_roles_cannot_administer_the_server_or_write_other_credentials(
    owner: StateClient, role: str
) -> None:
    for command in filter(None, ADMIN_COMMANDS.replace("\n", "|").split("|")):
        words = command.split(" ", 1) if command.startswith("EVAL") else command.split()
        words += ["0"] if command.startswith("EVAL") else []
        assert not await is_allowed(owner, role, *words), command
    assert await is_allowed(
        owner, role, "HSET", f"{{mesh}}:credentials:{role}:{HOST}", "key", "name"
    )
    if role == "person":
        return
    for credential in (f"{role}:{OTHER}", *(f"{one}:{HOST}" for one in acl.ROLES - {role})):
        assert not await is_allowed(
            owner, role, "HSET", f"{{mesh}}:credentials:{credential}", "key", "name"
        )
    for key in ("admitted", "revocations", "revoked", "run_host", "settings"):
        assert not await is_allowed(owner, role, "SET", f"{{mesh}}:{key}", "1"), key
    assert not await is_allowed(owner, role, "SET", "other", "1")


# Commands outside of scripts: those that roles need, and some that they must not run.
ALLOWED = [
    ("worker", "HMGET {mesh}:worker:w0 gang"),
    ("node", "GET {mesh}:services:here"),
    ("planner", "HGET {mesh}:planner memory"),
    ("sandbox", "ZSCORE {mesh}:jobs:paused job"),
    ("trainer", "ZSCORE {mesh}:jobs:paused job"),
    ("rollout", "HGET {job}:shard:rollout/job/0 place"),
    ("weights", "ZRANGE {mesh}:jobs:in_store 0 -1"),
    ("weights", "ZREM {mesh}:jobs:in_store job"),
    ("gateway", "XRANGE {mesh}:events - +"),
    ("gateway", "GET {mesh}:trimmed"),
    ("gateway", "GET {mesh}:settings"),
    ("gateway", "ZRANGE {mesh}:jobs:deleted 0 -1"),
    ("gateway", "EXISTS {job}:op:delete_job:1"),
    *((role, "HSET {job}:submission document {}") for role in sorted(SUBMITTERS)),
    ("planner", "DEL {job}:submission"),
    ("person", "SET {mesh}:probe 1 PX 1000"),
    ("person", "HGETALL {mesh}:draining"),
    ("person", "XREVRANGE {mesh}:events + -"),
    *((role, "GET {mesh}:run_host") for role in sorted(acl.ROLES)),
]


DENIED = [
    ("sandbox", "HGETALL {job}:job"),
    ("sandbox", "HGETALL {job}:step:0:1"),
    ("sandbox", "XRANGE {mesh}:events - +"),
    ("engine", "HSET {job}:job version 9"),
    ("worker", "HSET {job}:step:0:1 manifest m"),
    ("rank", "HSET {job}:job version 9"),
    ("rollout", "HSET {mesh}:gang:g0 workers []"),
    ("rollout", "HSET {job}:step:0:1 manifest m"),
    ("trainer", "HSET {mesh}:worker:w0 gang g1"),
    ("scoring", "ZADD {job}:ready 1 1"),
    ("worker", "SET {mesh}:host_answers:op yes"),
    *((role, "HSET {job}:submission document {}") for role in sorted(acl.ROLES - SUBMITTERS)),
    ("planner", "RENAME {job}:submission {job}:job"),
    ("node", "HSET {mesh}:host_requests id join"),
    ("gateway", "SET {mesh}:host_answers:op yes"),
    ("gateway", "HSET {mesh}:gang:g0 workers []"),
    ("weights", "HSET {job}:job version 9"),
    ("planner", "HSET {mesh}:host_requests id join"),
]


@pytest.mark.needs("redis-server")
async def test_roles_may_run_their_own_commands_only(owner: StateClient) -> None:
    for role, command in ALLOWED:
        assert await is_allowed(owner, role, *command.split()), (role, command)
    for role, command in DENIED:
        assert not await is_allowed(owner, role, *command.split()), (role, command)


@pytest.mark.needs("redis-server")
async def test_role_runs_only_scripts_loaded_by_the_owner(owner: StateClient, url: str) -> None:
    user = make_redis_user("sandbox", HOST).replace("@", "%40")
    sandbox = await StateClient.open(url.replace("unix://", f"unix://{user}:secret@"))
    await owner.run_command("SCRIPT", "FLUSH")
    with pytest.raises(NotAllowed, match="eval"):
        await events.append(sandbox, "hello", {})
    for script in ("append", "read_row"):
        await owner.run_command("SCRIPT", "LOAD", load_script(script)[0])
    await events.append(sandbox, "hello", {})
    with pytest.raises(NotAllowed, match="key"):
        await asyncio.wait_for(jobs.read_job(sandbox, "job"), scaled(10.0))
    await sandbox.close()


def test_script_names_are_unique_across_folders() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert {find_script(name) for name in NAMES} == set(SCRIPTS_DIR.rglob("*.lua"))


@pytest.mark.parametrize("name", NAMES)
def test_script_has_a_header_comment_and_no_globals(name: str) -> None:
    source = find_script(name).read_text()
    lines = [line for line in source.splitlines() if not line.startswith("-- uses:")]
    assert lines[0].startswith("-- ")
    assert not re.search(r"^\s*function \w", source, re.MULTILINE)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", LOADED_SCRIPTS)
def test_loaded_script_includes_the_prelude_and_its_fragments(name: str) -> None:
    source, sha = load_script(name)
    assert source.startswith(f"local SCRIPT = '{name}'") and len(sha) == 40
    for fragment in re.findall(r"-- uses: (.+)", source):
        for part in fragment.split():
            assert find_script(f"_{part}").read_text() in source


def test_non_idempotent_scripts_replay_by_operation() -> None:
    replayed_scripts = {
        name for name in LOADED_SCRIPTS if "previous_reply()" in find_script(name).read_text()
    }
    assert {
        "admit_groups",
        "mark_group_ready",
        "return_group",
        "write_decisions",
        "open_lineage",
    } <= replayed_scripts
    assert {"submit", "append", "submit_request"} <= replayed_scripts
