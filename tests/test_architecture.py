"""The rules that hold mpx together, read off its syntax trees.

A rule is a function from a source file to its violations, and carries examples that it must catch: a rule
that has gone blind fails as loudly as a file that breaks it. To change the architecture, change the tables.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each part of mpx may import of the others. The torch-free half knows nothing of the engine, but for the
# moment when a process imports torch: the launcher then starts it, by an import inside a function.
MAY_IMPORT = {
    "mpx": set(),
    "values": set(),
    "errors": {"values"},
    "gates": {"errors", "values"},
    "presets": {"errors", "gates", "values"},
    "loss_scale": {"errors", "presets"},
    "record": {"errors", "values"},
    "report": {"errors", "gates", "record", "values"},
    "monitors": {"errors", "loss_scale", "presets", "record"},
    "engine": {"errors", "gates", "loss_scale", "presets", "record", "monitors", "values"},
    "apex": {"errors", "loss_scale", "engine", "launch"},
    "launch": {"errors", "record", "values"},
    "cli": {"errors", "gates", "presets", "record", "report", "launch", "values"},
    "__main__": {"cli"},
}
MAY_IMPORT_INSIDE_A_FUNCTION = {"launch": {"engine"}}
TORCH_HALF = {"engine", "monitors", "apex"}
# The other third-party packages, and the parts that may use them: start-up pays for each.
HOME = {"click": {"cli"}, "rich": {"cli", "report"}, "yaml": {"presets", "engine", "cli"}}
MAY_PATCH_TORCH = "mpx/engine/intercepts.py"
LONGEST_FILE = 400
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}


@dataclass(frozen=True)
class Source:
    """A Python file of the repository, by its path from the root."""

    path: PurePosixPath
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def part(self) -> str:
        """The part of mpx that the file belongs to: a package, or a module beside them; `mpx` is its root."""
        inner = self.path.parts[1]
        return "mpx" if inner == "__init__.py" else inner.removesuffix(".py")

    @property
    def in_mpx(self) -> bool:
        return self.path.parts[0] == "mpx"


def sources() -> list[Source]:
    files = [file for folder in ("mpx", "scripts", "tests") for file in sorted((ROOT / folder).rglob("*.py"))]
    return [Source(PurePosixPath(f.relative_to(ROOT).as_posix()), f.read_text("utf-8")) for f in files]


@dataclass(frozen=True)
class Import:
    """One name that a file imports, in full, wherever it does so."""

    name: str
    line: int
    inside_function: bool

    @property
    def part(self) -> str:
        """The part of mpx that is imported, or the third-party package."""
        parts = self.name.split(".")
        if parts[0] != "mpx":
            return parts[0]
        return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "mpx"


def imports(source: Source) -> Iterator[Import]:
    """Yield every import, also relative ones and `importlib.import_module("literal")`."""
    package = source.path.with_suffix("").parts
    functions = [n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    spans = [(f.lineno, f.end_lineno or f.lineno) for f in functions]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level]) if node.level else []
            base += [node.module] if node.module else []
            names = [".".join([*base, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Call) and called(node) in {"import_module", "__import__"} and node.args:
            named = node.args[0]
            names = [str(named.value)] if isinstance(named, ast.Constant) else []
        else:
            continue
        inside = any(first < node.lineno <= last for first, last in spans)
        yield from (Import(name, node.lineno, inside) for name in names)


def called(node: ast.Call) -> str:
    """The last name of what is called: `import_module` for `importlib.import_module(...)`."""
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def root_name(node: ast.expr) -> str:
    """The name that a chain of attributes and subscripts starts from; empty for any other expression."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


Rule = Callable[[Source], Iterator[str]]
RULES: list[Rule] = []
CAUGHT: list[tuple[Rule, Source]] = []


def rule(*examples: tuple[str, str]) -> Callable[[Rule], Rule]:
    """Enter a rule, with (path, text) examples of files that break it."""

    def enter(function: Rule) -> Rule:
        RULES.append(function)
        CAUGHT.extend((function, Source(PurePosixPath(path), text)) for path, text in examples)
        return function

    return enter


@rule(
    ("mpx/record/a.py", "import torch"),
    ("mpx/presets/a.py", "def f():\n    from torch import nn"),
    ("mpx/loss_scale.py", "if TYPE_CHECKING:\n    import torch.nn as nn"),
    ("mpx/launch/boot/sitecustomize.py", "import importlib\nimportlib.import_module('torch')"),
)
def torch_free_half_never_imports_torch(source: Source) -> Iterator[str]:
    if source.in_mpx and source.part not in TORCH_HALF:
        for found in imports(source):
            if found.part == "torch":
                yield f"line {found.line}: imports `{found.name}`"


@rule(
    ("mpx/record/a.py", "from mpx.report import findings"),
    ("mpx/record/a.py", "from mpx import report"),
    ("mpx/record/deep/a.py", "from ...cli import run"),
    ("mpx/monitors/a.py", "def f():\n    import mpx.engine.session"),
    ("mpx/launch/a.py", "import mpx.engine"),
    ("mpx/new_part/a.py", ""),
)
def parts_import_only_what_is_below_them(source: Source) -> Iterator[str]:
    if not source.in_mpx:
        return
    if source.part not in MAY_IMPORT:
        yield f"`{source.part}` has no place: add it to MAY_IMPORT"
        return
    for found in imports(source):
        if not found.name.startswith("mpx") or found.part in {source.part, "mpx"}:
            continue
        lazily = MAY_IMPORT_INSIDE_A_FUNCTION.get(source.part, set()) if found.inside_function else set()
        if found.part not in MAY_IMPORT[source.part] | lazily:
            yield f"line {found.line}: `{source.part}` imports `{found.name}`"


@rule(("mpx/record/a.py", "import yaml"), ("mpx/presets/a.py", "def f():\n    import rich.table"))
def third_party_packages_stay_in_their_home(source: Source) -> Iterator[str]:
    if source.in_mpx:
        for found in imports(source):
            if source.part not in HOME.get(found.part, {source.part}):
                yield f"line {found.line}: imports `{found.name}`"


@rule(
    ("mpx/engine/a.py", "import torch\ntorch.Tensor.backward = f"),
    ("mpx/engine/a.py", "from torch import nn\nsetattr(nn.Module, '__call__', f)"),
    ("mpx/engine/a.py", "from torch.optim import Optimizer as Opt\ndel Opt.step"),
    ("mpx/monitors/a.py", "import torch.autograd as ag\nag.table['x'] += 1"),
    ("mpx/engine/a.py", "import torch\ntype.__setattr__(torch.Tensor, 'x', 1)"),
)
def only_the_intercepts_assign_to_torch(source: Source) -> Iterator[str]:
    if not source.in_mpx or source.path == PurePosixPath(MAY_PATCH_TORCH):
        return
    bound = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0] == "torch"
    }
    for node in ast.walk(source.tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and called(node).strip("_") in {"setattr", "delattr"}:
            targets = [ast.Attribute(node.args[0], "any")] if node.args else []
        for target in targets:
            if not isinstance(target, ast.Name) and root_name(target) in bound:
                yield f"line {node.lineno}: `{ast.unparse(target)}` changes outside {MAY_PATCH_TORCH}"


@rule(("mpx/engine/a.py", "def f():\n    print(1)"))
def only_commands_print(source: Source) -> Iterator[str]:
    if source.in_mpx and source.part != "cli":
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield f"line {node.lineno}: print"


@rule(("mpx/cli/a.py", "assert x"), ("scripts/a.py", "def f(x):\n    assert x, 'text'"))
def only_tests_assert(source: Source) -> Iterator[str]:
    if source.path.parts[0] != "tests":
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Assert):
                yield f"line {node.lineno}: assert; raise an error that `python -O` keeps"


@rule(("mpx/launch/a.py", "try:\n    f()\nexcept:\n    pass"))
def no_except_is_bare(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"line {node.lineno}: bare except"


@rule(("tests/a.py", "x = 1\n" * (LONGEST_FILE + 1)))
def files_stay_short(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > LONGEST_FILE:
        yield f"{lines} lines, more than {LONGEST_FILE}"


@rule(("mpx/engine/utils.py", ""), ("mpx/common/a.py", ""))
def names_say_what_is_inside(source: Source) -> Iterator[str]:
    for name in source.path.with_suffix("").parts:
        if name in EMPTY_NAMES:
            yield f"`{name}` says nothing"


@rule(
    ("mpx/a.py", "x = 1"),
    ("mpx/a.py", '"""Doc."""\nclass Thing:\n    pass'),
    ("mpx/a.py", '"""Doc."""\nclass Thing:\n    """Doc."""\n    def method(self):\n        return 1'),
)
def what_is_public_is_documented(source: Source) -> Iterator[str]:
    if not source.in_mpx or not source.text.strip():
        return
    if not ast.get_docstring(source.tree):
        yield "the module has no docstring"
    yield from undocumented(source.tree)


def undocumented(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the public classes, functions and methods without a docstring.

    Exempt is what is documented elsewhere: a method may be its base's, an overload or a setter has its first
    declaration, a property's name and type may say it all. What is inside a function is nobody's business.
    """
    for node in scope.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
        if node.name.startswith("_") or marks & {"overload", "setter", "property", "cached_property"}:
            continue
        if not ast.get_docstring(node):
            yield f"line {node.lineno}: `{node.name}` has no docstring"
        if isinstance(node, ast.ClassDef) and not node.bases:
            yield from undocumented(node)


@rule(
    ("mpx/a.py", "__all__ = ['gone']"),
    ("mpx/report/__init__.py", "from mpx.report.findings import findings"),
    ("mpx/report/__init__.py", "from .findings import findings\n__all__ = []"),
)
def all_tells_the_truth(source: Source) -> Iterator[str]:
    """Check that `__all__` names what exists, and all that a package imports for others: without using it."""
    if not source.in_mpx:
        return
    body = source.tree.body
    listed = {name for node in body for name in listed_by(node)}
    bound = {name for node in body for name in bound_by(node)}
    if "__getattr__" not in bound:  # a package may load what it exports at first use
        yield from (f"`__all__` lists `{name}`, which does not exist" for name in sorted(listed - bound))
    if source.path.name == "__init__.py":
        own = [n for n in body if isinstance(n, ast.ImportFrom)]
        own = [n for n in own if n.level or (n.module or "").split(".")[0] == "mpx"]
        exported = {name for node in own for name in bound_by(node) if not name.startswith("_")}
        used = {n.id for n in ast.walk(source.tree) if isinstance(n, ast.Name)}
        yield from (f"`__all__` lacks `{name}`" for name in sorted(exported - used - listed))


def listed_by(node: ast.stmt) -> set[str]:
    """The names in `__all__ = [...]`; nothing for any other statement."""
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
        return set(ast.literal_eval(node.value))
    return set()


def bound_by(node: ast.stmt) -> set[str]:
    """The names that a statement of a module's top level defines, assigns or imports."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


@pytest.mark.parametrize("law", RULES, ids=lambda law: law.__name__)
def test_every_file_keeps(law: Rule):
    assert [f"{source.path}: {text}" for source in sources() for text in law(source)] == []


@pytest.mark.parametrize(("law", "source"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_violation_is_seen_by(law: Rule, source: Source):
    assert list(law(source))


def test_the_tables_name_only_parts_that_exist():
    parts = {source.part for source in sources() if source.in_mpx}
    assert parts == set(MAY_IMPORT)


def loaded_by(statements: str) -> set[str]:
    """Return the top-level names of the modules that a fresh interpreter has loaded after `statements`."""
    code = f"import sys\n{statements}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(child.stdout.split())


def test_the_torch_free_half_loads_without_torch():
    modules = sorted(
        ".".join(source.path.with_suffix("").parts).removesuffix(".__init__")
        for source in sources()
        if source.in_mpx and source.part not in TORCH_HALF | {"__main__"} and "boot" not in source.path.parts
    )
    loaded = loaded_by("\n".join(f"import {module}" for module in modules))
    assert "mpx" in loaded
    assert not loaded & {"torch", "numpy"}


def test_what_every_child_process_loads_is_the_standard_library():
    """The torch import hook runs in processes that never use torch: it may cost them next to nothing."""
    loaded = loaded_by("import mpx.launch.torch_import")
    assert not loaded & {"torch", "numpy", "click", "rich", "yaml"}
