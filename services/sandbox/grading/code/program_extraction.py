"""Extraction of the program from an answer: one fenced block of it, or all of it.

Blocks follow CommonMark, with extensions for models' habits: a fence may follow a list's bullet,
and may stand in the text of a program. Of several blocks, `extract_program` takes the last that
fits the tests. The program is parsed, never run.

LeetCode, and the harness of LiveCodeBench (`import_string` of lcb_runner), run programs after star
imports of some modules. `build_prelude` imports only the names that a program uses and does not
bind, so a program with all its imports runs unchanged.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import re
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from meshrl.common.grading.cases import find_used_and_bound_names
from meshrl.common.grading.python_tests import parse_source

FUTURE = "__future__"
FENCE = "```"
TRAILING_TAGS = (
    r"(?:\s*<[^<>`]{1,40}>)*"  # as </answer> or an end-of-turn token, on the line of a fence
)
OPENING = re.compile(
    TRAILING_TAGS + r"([ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(`{3,}(?=[^`]*$)|~{3,})(.*)"
)
FENCE_BEHIND_TEXT = re.compile(r"(\s*)\S.*?(?<!`)(`{3,})((?:python|py)\w*)\s*", re.IGNORECASE)
TAG = re.compile(r"[{.\s]*([\w+#.-]*)")
STATEMENT = re.compile(r"\s*(?:(?:import|from|def|class|print)\b|\w+\s*=)")
PYTHON, BARE, OTHER = "python", "bare", "other"  # kinds of blocks, by the fence's info string
MARKDOWN = ("markdown", "md")
BARE_TAGS = ("", "code", "solution")
MAX_PARSED_CHARACTERS = 1 << 17  # most characters parsed of an answer, counted at each parse
MAX_PARSES = 100
READERS = frozenset({"input", "stdin", "open", "fileinput", "read", "readline"})
STDIN_PATHS = (0, "/dev/stdin")  # which `open` opens
PRINTERS = frozenset({"print", "stdout", "write", "open"})


@dataclass(frozen=True)
class CodeBlock:
    """Content between two fences; without a `tree`, it is no Python."""

    kind: str
    body: str
    tree: ast.Module | None


def extract_program(
    text: str, prefix: str = "", required_names: Collection[str] = (), reads_stdin: bool = False
) -> str:
    """Return the program, to be run after `prefix`; empty if the answer has none.

    The candidates are fenced blocks that parse as Python and whose fence names no other language.
    The last candidate wins that defines all `required_names`, or else one of them. For a program
    with `reads_stdin`, it is the last that reads input and prints, else that prints. Otherwise it
    is the last that defines or calls anything. Without a candidate, the last block counts. A last
    fence without an end makes a block too. Text without fences, and text that is Python with its
    fences, is the program itself.
    """
    text = text.replace("\r\n", "\n")
    only = _find_single_block(text)
    if only is not None:
        return only
    parser = _BudgetedParser(prefix)
    blocks = list(_find_blocks(text, parser))
    if not blocks:
        return _extract_inline_block(text)
    if parser.parse(text) is not None:  # its fences are in its strings
        return text
    own = [block for block in blocks if block.kind != OTHER] or blocks
    python = [(block, _collect_names(block.tree)) for block in own if block.tree is not None]
    for requirements in _list_requirements(required_names, reads_stdin):
        for block, words in reversed(python):
            if all(words & some for some in requirements):
                return block.body
    if not python and parser.parse(inline := _extract_inline_block(text)) is not None:
        return inline
    tagged = [block for block in own if block.kind == PYTHON]
    return (tagged or own)[-1].body


def prepend(prefix: str, program: str) -> str:
    """Return `prefix` and the program, after the `__future__` imports of both.

    They stay as they are if the program is no Python.
    """
    if not prefix or FUTURE not in program:
        return prefix + program
    trees = parse_source(prefix), parse_source(program)
    if trees[0] is None or trees[1] is None:
        return prefix + program
    before, own = _remove_future_imports(prefix, trees[0])
    behind, others = _remove_future_imports(program, trees[1])
    features = list(dict.fromkeys([*own, *others]))
    return "".join(f"from {FUTURE} import {name}\n" for name in features) + before + behind


def _remove_future_imports(source: str, tree: ast.Module) -> tuple[str, list[str]]:
    """Blank each import from `__future__`, and return the source and the names of the features."""
    features: list[str] = []
    lines = source.encode().splitlines(keepends=True)
    for node in reversed(tree.body):
        if isinstance(node, ast.ImportFrom) and node.module == FUTURE and not node.level:
            features[:0] = [alias.name for alias in node.names]
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            rest = lines[last][node.end_col_offset :]
            blanked_line = lines[first][: node.col_offset] + b"pass" + rest
            # Lines keep their numbers.
            lines[first : last + 1] = [blanked_line, b"\n" * (last - first)]
    return b"".join(lines).decode(), features


def _find_single_block(text: str) -> str | None:
    """Return the body of the only simple block: most answers have one and need no parsing."""
    if text.count(FENCE) != 2 or "~~~" in text:
        return None
    lines = text.split("\n")
    begin, *ends = (at for at, line in enumerate(lines) if FENCE in line)
    if not ends:
        return None
    end = ends[0]
    opening, closing = (
        OPENING.fullmatch(lines[begin]),
        list(_find_closing_fences(lines[: end + 1], end, FENCE)),
    )
    if opening is None or not closing or _classify_fence(opening[3].strip()) == OTHER:
        return None
    body = _dedent(lines[begin + 1 : end], len(opening[1]))
    in_text = any(quote in line for line in lines[:begin] for quote in ('"""', "'''"))
    return None if in_text or body[:1].isspace() else body


def _list_requirements(names: Collection[str], prints: bool) -> Iterator[list[frozenset[str]]]:
    """Yield the requirements for a program, the strictest first: it needs a word of each set."""
    for how in ("def", "set", "import") if names else ():
        yield [frozenset({f"{how} {name}"}) for name in names]  # all of them, or else one
        yield [frozenset(f"{how} {name}" for name in names)]
    if prints:
        yield [READERS - {"open"}, PRINTERS]  # a block that writes a file is no program
        yield [READERS, PRINTERS]
        yield [PRINTERS]
    yield [frozenset({"()"})]


def _collect_names(tree: ast.Module) -> set[str]:
    """Return the names that a program uses.

    `def NAME`, `set NAME` or `import NAME` where it makes one, `()` if it calls or defines
    anything.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found |= {f"def {node.name}", "()"}
        elif isinstance(node, ast.Name):
            stored = isinstance(node.ctx, ast.Store)
            found.add(f"set {node.id}" if stored else node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found |= {f"import {node.asname or node.name}", node.name}
        elif isinstance(node, ast.Call):
            opens = isinstance(node.func, ast.Name) and node.func.id == "open" and node.args
            place = node.args[0] if opens else None
            reads = isinstance(place, ast.Constant) and place.value in STDIN_PATHS
            found |= {"()", "stdin"} if reads else {"()"}
    return found


class _BudgetedParser:
    """Parser that stops at a budget of characters."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._characters_left, self._parses_left = (
            prefix,
            MAX_PARSED_CHARACTERS,
            MAX_PARSES,
        )

    @property
    def is_exhausted(self) -> bool:
        return self._characters_left < 0 or self._parses_left <= 0

    def parse(self, body: str) -> ast.Module | None:
        source = prepend(self._prefix, body)
        self._characters_left -= len(source)
        self._parses_left -= 1
        if self._characters_left < 0 or self._parses_left < 0 or not body.strip():
            return None  # unknown content: the rules for other text apply
        return parse_source(source)


def _find_blocks(
    text: str, parser: _BudgetedParser, is_nested: bool = False
) -> Iterator[CodeBlock]:
    """Yield the blocks of a text; a Markdown block is replaced by the blocks inside of it."""
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        found = OPENING.fullmatch(lines[at]) or FENCE_BEHIND_TEXT.fullmatch(lines[at])
        at += 1
        if found is None:
            continue
        indent, fence, info_string = len(found[1]), found[2], found[3].strip()
        kind = _classify_fence(info_string)
        first = [found[3]] if kind == OTHER and STATEMENT.match(info_string) else []
        kind = BARE if first else kind
        block, end = _read_block(lines, at, first, indent, fence, kind, parser)
        inner = info_string.lower() in MARKDOWN and not is_nested
        yield from (inner and list(_find_blocks(block.body, parser, True))) or [block]
        at = end + 1


def _read_block(
    lines: list[str],
    at: int,
    first: list[str],
    indent: int,
    fence: str,
    kind: str,
    parser: _BudgetedParser,
) -> tuple[CodeBlock, int]:
    """Return the block that begins here, and the line of its closing fence.

    That is the first fence after which the block is Python, or else the first.
    """
    earliest = None
    for end in _find_closing_fences(lines, at, fence):
        block = _parse_block(kind, _dedent([*first, *lines[at:end]], indent), parser)
        earliest = earliest or (block, end)
        if block.tree is not None:
            return block, end
        if kind == OTHER or parser.is_exhausted:
            break
    if earliest is not None:
        return earliest
    rest = "\n".join([*first, *lines[at:]]).rstrip("\n").split("\n")
    return _parse_block(kind, _dedent(rest, indent), parser), len(lines)


def _find_closing_fences(lines: list[str], start: int, fence: str) -> Iterator[int]:
    """Yield the lines that may close a block; lines in a program's strings never do."""
    closing = re.compile(rf"[ \t]*{re.escape(fence[0])}{{{len(fence)},}}{TRAILING_TAGS}\s*")
    for at in range(start, len(lines)):
        if closing.fullmatch(lines[at]):
            yield at


def _parse_block(kind: str, body: str, parser: _BudgetedParser) -> CodeBlock:
    if kind == OTHER:
        return CodeBlock(kind, body, None)
    tree = parser.parse(body)
    flush = textwrap.dedent(body)
    if tree is None and flush != body:  # all of it is indented, its fence is not
        tree = parser.parse(flush)
        body = flush if tree is not None else body
    return CodeBlock(kind, body, tree)


def _classify_fence(info_string: str) -> str:
    match = TAG.match(info_string)
    tag = match[1].lower() if match else ""
    if tag.startswith("python") or tag in ("py", "py3", "ipython") or tag.endswith(".py"):
        return PYTHON
    return BARE if tag in BARE_TAGS else OTHER


def _dedent(lines: list[str], indent: int) -> str:
    """Return the lines without the indentation of their fence."""
    if not lines:
        return ""
    return "\n".join(re.sub(rf"^[ \t]{{0,{indent}}}", "", line) for line in lines) + "\n"


def _extract_inline_block(text: str) -> str:
    """Return the last block of a text whose fences are all within lines; else the whole text."""
    parts = text.split(FENCE)
    if len(parts) < 3:
        return text
    body = parts[-2 if len(parts) % 2 else -3]  # an open fence is no block
    tag, space, rest = body.partition("\n")
    if not space:
        tag, space, rest = body.partition(" ")
    return rest if space and _classify_fence(tag) == PYTHON and " " not in tag.strip() else body


# ---- imports that a program lacks and that judges of `class Solution` provide -----------------

# In LiveCodeBench's order: of a name in two modules, the later module's is taken.
PRELUDE_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json", "typing"),
)


def build_prelude(program: str) -> str:
    """Return the import statements that `program` needs and lacks; empty if it is no Python."""
    if (tree := parse_source(program)) is None:
        return ""
    used, bound = find_used_and_bound_names(tree)
    modules: set[str] = set()  # of which it takes attributes
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            modules.add(node.value.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used |= _names_in_annotation(node.value)
    lines = []
    for name in sorted(used - bound - vars(builtins).keys()):
        source = _modules_by_name().get(name)
        if name in PRELUDE_MODULES and (name in modules or source is None):
            lines.append(f"import {name}\n")
        elif source is not None:  # an older interpreter may lack it
            lines.append(f"try:\n from {source} import {name}\nexcept ImportError: pass\n")
    return "".join(lines)


def _names_in_annotation(text: str) -> set[str]:
    """Return the names in a text that may be an annotation, as `"List[int]"`."""
    tree = parse_source(text) if text[:1].isupper() and len(text) <= 200 else None
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} if tree else set()


@functools.cache
def _modules_by_name() -> dict[str, str]:
    """Map each name that the star imports bind to its module."""
    found: dict[str, str] = {}
    for module in PRELUDE_MODULES:
        names = vars(importlib.import_module(module))
        public = names.get("__all__") or [name for name in names if not name.startswith("_")]
        found |= dict.fromkeys(public, module)
    return found
