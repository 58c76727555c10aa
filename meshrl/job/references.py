"""Resolution of `module:function` references of a job file: the module's file, names and imports.

Nothing is imported here: the author's code runs only in processes that contain it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.job import builtin
from meshrl.common.job.config import JobConfig
from meshrl.job.job_file import get_value

REFERENCE_KEYS = ("environment.use", "warm_start.demonstrations")
_REFERENCE_PATTERN = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)\Z")


def find_references(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, module:function) of all code that a job names."""
    named = [(key, get_value(config, key)) for key in (*REFERENCE_KEYS, "reward.use")]
    named += [("reward.parts", part.use) for part in config.reward.parts]
    tools = config.environment.tools.items()
    named += [(f"environment.tools.{tool}", use) for tool, use in tools]
    for key, use in named:
        if (key in REFERENCE_KEYS and use) or (":" in use and not builtin.is_mcp(use)):
            yield key, use


def check_reference(text: str, base: Path) -> None:
    """Raise ConfigError unless `text` names a module beside the job file (`base`) or an installed
    one.
    """
    match = _REFERENCE_PATTERN.match(text)
    if not match:
        raise ConfigError(f"{text!r} is not of the form module:function")
    module, function = match.groups()
    if module.endswith(".py"):
        raise ConfigError(
            f"{text!r} names a file", fix=f"Write {module.removesuffix('.py')}:{function}"
        )
    path = find_module_file(base, module)
    if path is None:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            module_file = module.replace(".", "/") + ".py"
            raise ConfigError(f"there is no module {module!r}: {base / module_file} does not exist")
        return
    names = set(find_top_level_names(parse_module(path)))
    if function not in names and "*" not in names:
        public = sorted(n for n in names if not n.startswith("_"))
        raise ConfigError(
            f"{path} defines no {function!r}; it has {', '.join(public) or 'nothing'}"
        )


def find_module_file(base: Path, module: str) -> Path | None:
    """Return the file that `import module` would read with `base` on the path, or None."""
    stem = base.joinpath(*module.split("."))
    for candidate in (stem / "__init__.py", stem.with_name(stem.name + ".py")):
        if candidate.is_file():
            return candidate
    return None


def parse_module(path: Path) -> ast.Module:
    """Return the syntax tree of a file; raise ConfigError with file and line of a syntax error."""
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:  # ValueError: a zero byte
        line = getattr(error, "lineno", None)
        message = getattr(error, "msg", str(error))
        raise ConfigError(f"{path}{f', line {line}' if line else ''}: {message}") from error


def find_top_level_names(tree: ast.Module) -> Iterator[str]:
    """Yield names that importing the module binds, also inside top-level blocks; `*`: a star
    import.
    """
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (a.asname or a.name.partition(".")[0] for a in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            pending.extend(child for child in ast.walk(node) if isinstance(child, ast.stmt))
            pending.remove(node)


def find_local_imports(base: Path, modules: list[str]) -> list[Path]:
    """Return the sorted files beside the job file that `modules` are and import, transitively."""
    found: set[Path] = set()
    pending = list(modules)
    while pending:
        module = pending.pop()
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            path = find_module_file(base, ".".join(parts[:depth]))
            if path is None or path in found:
                continue
            found.add(path)
            package = parts[:depth] if path.name == "__init__.py" else parts[: depth - 1]
            pending.extend(_find_imports(parse_module(path), package))
    return sorted(found)


def _find_imports(tree: ast.Module, package: list[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join(start + ([node.module] if node.module else []))
            if stem:
                yield stem
            yield from (f"{stem}.{alias.name}" if stem else alias.name for alias in node.names)
