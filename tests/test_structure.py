"""Imports of the rooms, read from the source: what keeps the parts apart stays apart."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = ROOT / "llmexp"
MODULES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
    for p in PACKAGE.rglob("*.py")
}


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
            if not (top_level_only and (inside or is_main_guard(child))):
                visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(found)


def is_main_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


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
    sorter = graphlib.TopologicalSorter(graph)
    sorter.prepare()  # raises CycleError, with the circle


def test_only_commands_import_ours_inside_functions():
    """Training and its parts do so, too, with what few configs or starts ask for."""
    optional = ("llmexp.hf", "llmexp.tracker", "llmexp.tasks", "llmexp.metrics.plot")
    optional += ("llmexp.modes", "llmexp.data.hub", "llmexp.data.shards")
    optional += ("llmexp.optim.optimizers", "llmexp.optim.twin", "llmexp.optim.groups")
    optional += ("llmexp.mesh.sharding", "llmexp.run.rules", "llmexp.run.shape")
    optional += tuple(
        f"llmexp.models.{name}" for name in ("experts", "offload", "recompute", "rows")
    )
    for name in MODULES:
        late = ours(name) - ours(name, top_level_only=True)
        if name == "llmexp.sweep.answer":
            late.discard("llmexp.compare.page")  # plotly, which is needed at the end alone
        if room(name) in ("train", "features", "compose", "data", "mesh", "models", "run"):
            late = {module for module in late if not module.startswith(optional)}
        last = name.rpartition(".")[2]
        assert not late or room(name) in ("cli", "api", "__main__") or last == "__main__", name


def test_parts_do_not_import_each_others_private_names():
    for name, path in MODULES.items():
        for found in imports(path):
            module, _, last = found.rpartition(".")
            private = last.startswith("_") and not last.startswith("__")
            assert not (module.startswith("llmexp.") and private), f"{name} imports {found}"


def test_a_name_means_one_thing():
    """At most 25 public names are defined in several files: `main`, `show`, layers of models.

    Those by which a room collects its features, and the door of modes, are the same in each; the
    function of a command has its name."""
    files = defaultdict[str, set[str]](set)
    for module, path in MODULES.items():
        if module.startswith(("llmexp.features.", "llmexp.modes.")) or module.endswith(".settings"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            for target in targets:
                name = getattr(target, "name", None) or getattr(target, "id", "_")
                if module == f"llmexp.cli.{name}":
                    continue
                if not name.startswith("_") and name != "Knobs":  # likewise collected
                    files[name].add(module)
    several = sorted(name for name, modules in files.items() if len(modules) > 1)
    assert len(several) <= 25, {name: files[name] for name in several}


def test_a_step_is_read_in_an_evening():
    """What llmexp.train.step imports, itself included: at most 30 files with code, 5,200 lines."""
    known, open_ = set[str](), {"llmexp.train.step"}
    while open_:
        name = open_.pop()
        known.add(name)
        parents = {name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)}
        found = imports(MODULES[name], top_level_only=True) | parents
        open_ |= {module for module in found if module in MODULES} - known
    texts = {name: MODULES[name].read_text(encoding="utf-8") for name in known}
    code = {name for name, text in texts.items() if len(ast.parse(text).body) > 1}
    assert len(code) <= 30, sorted(code)
    assert sum(len(text.splitlines()) for text in texts.values()) <= 5_200


def test_config_and_run_import_the_standard_library_and_themselves_only():
    alone = {"config": ("llmexp.config", "llmexp.features"), "run": ("llmexp.config",)}
    for name, path in MODULES.items():
        if room(name) in alone or name == "llmexp.system.child":
            allowed = (*alone.get(room(name), ()), "llmexp.run.")
            for found in imports(path) - {"llmexp", "llmexp.run"}:
                standard = found.partition(".")[0] in sys.stdlib_module_names
                assert standard or found.startswith(allowed), f"{name}: {found}"


def test_distributed_stays_in_its_room():
    for name, path in MODULES.items():
        if room(name) != "mesh":
            assert "torch.distributed" not in path.read_text(encoding="utf-8"), name


def test_no_file_and_no_function_outgrows_its_purpose():
    for name, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 450, name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{name}.{node.name}"
