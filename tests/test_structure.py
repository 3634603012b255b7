"""Imports of the rooms, read from the source: what keeps the parts apart stays apart."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.conftest import ROOT

MODULES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
    for p in (ROOT / "llmexp").rglob("*.py")
}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__main__"


@functools.cache
def imports(path: Path, top_level_only: bool = False) -> frozenset[str]:
    """Dotted names of what a file imports: modules, and `module.name` for what is taken from
    one."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            inside = inside or (isinstance(child, ast.If) and "__name__" in ast.unparse(child.test))
            if not (top_level_only and inside):
                visit(child)

    visit(tree(path))
    return frozenset(found)


def ours(name: str, top_level_only: bool = False) -> set[str]:
    """The modules of the product that one imports."""
    return {m for m in imports(MODULES[name], top_level_only) if m in MODULES} - {name, "llmexp"}


def test_rooms_keep_to_their_contracts():
    lint = "from importlinter.cli import lint_imports_command as run; run()"
    arguments = [sys.executable, "-c", lint, "--no-cache"]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_no_module_imports_itself_by_way_of_others():
    graph = {name: ours(name) for name in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


# What few configs or starts ask for; plotly is needed at the end of a sweep alone.
OPTIONAL = (
    "llmexp.hf", "llmexp.tracker", "llmexp.tasks", "llmexp.metrics.plot", "llmexp.modes",
    "llmexp.data.hub", "llmexp.data.shards", "llmexp.optim.optimizers", "llmexp.optim.twin",
    "llmexp.optim.groups", "llmexp.mesh.sharding", "llmexp.run.rules", "llmexp.run.shape",
    "llmexp.models.experts", "llmexp.models.offload", "llmexp.models.recompute",
    "llmexp.models.rows",
)  # fmt: skip


def test_only_commands_import_ours_inside_functions():
    """Training and its parts do so, too, with what is optional."""
    for name in MODULES:
        late = ours(name) - ours(name, top_level_only=True)
        if name == "llmexp.sweep.answer":
            late.discard("llmexp.compare.page")
        if room(name) in ("train", "features", "compose", "data", "mesh", "models", "run"):
            late = {module for module in late if not module.startswith(OPTIONAL)}
        command = room(name) in ("cli", "api", "__main__") or name.endswith(".__main__")
        assert command or not late, name


def test_parts_keep_to_what_they_may_name():
    """No private name of another file, torch.distributed in `mesh` alone, and in `config` and `run`
    the standard library and themselves."""
    alone = {"config": ("llmexp.config", "llmexp.features"), "run": ("llmexp.config",)}
    for name, path in MODULES.items():
        for found in imports(path):
            last = found.rpartition(".")[2]
            private = last.startswith("_") and not last.startswith("__")
            assert not (found.startswith("llmexp.") and private), f"{name} imports {found}"
        if room(name) != "mesh":
            assert "torch.distributed" not in path.read_text(encoding="utf-8"), name
        if room(name) in alone or name == "llmexp.system.child":
            allowed = (*alone.get(room(name), ()), "llmexp.run.")
            for found in imports(path) - {"llmexp", "llmexp.run"}:
                standard = found.partition(".")[0] in sys.stdlib_module_names
                assert standard or found.startswith(allowed), f"{name}: {found}"


def test_a_name_means_one_thing():
    """At most 25 public names are defined in several files: `main`, `show`, layers of models.

    Those by which a room collects its features, and the door of modes, are the same in each; the
    function of a command has its name."""
    files = defaultdict[str, set[str]](set)
    for module, path in MODULES.items():
        if module.startswith(("llmexp.features.", "llmexp.modes.")) or module.endswith(".settings"):
            continue
        for node in tree(path).body:
            for target in node.targets if isinstance(node, ast.Assign) else [node]:
                name = getattr(target, "name", None) or getattr(target, "id", "_")
                if not name.startswith("_") and module != f"llmexp.cli.{name}":
                    files[name].add(module)
    several = {name: modules for name, modules in files.items() if len(modules) > 1}
    several.pop("Knobs", None)  # likewise collected
    assert len(several) <= 25, several


def test_a_step_is_read_in_an_evening():
    """What llmexp.train.step imports, itself included: at most 30 files with code, 5,200 lines."""
    known, open_ = set[str](), {"llmexp.train.step"}
    while open_:
        name = open_.pop()
        known.add(name)
        parents = {name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)}
        found = imports(MODULES[name], top_level_only=True) | parents
        open_ |= {module for module in found if module in MODULES} - known
    code = {name for name in known if len(tree(MODULES[name]).body) > 1}
    assert len(code) <= 30, sorted(code)
    assert sum(MODULES[name].read_text("utf-8").count("\n") for name in known) <= 5_200


def test_no_file_and_no_function_outgrows_its_purpose():
    for name, path in MODULES.items():
        assert path.read_text(encoding="utf-8").count("\n") <= 450, name
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{name}.{node.name}"
