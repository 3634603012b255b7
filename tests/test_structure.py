"""Who may import whom, read from the source: what keeps the parts apart stays apart."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "llmexp"
MODULES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in PACKAGE.rglob("*.py")
}
# The parts: they take plain arguments and know neither the configuration nor the run.
PARTS = [
    name for name in MODULES
    if name.startswith(("llmexp.models", "llmexp.data", "llmexp.metrics"))
    or name.split(".")[1:2] in [["mesh"], ["precision"], ["optim"], ["schedule"], ["clip"], ["checkpoint"], ["saving"]]
]  # fmt: skip
SWEEP = [name for name in MODULES if name.startswith("llmexp.sweep")]
HYDRA_SIDE = (
    "llmexp.launch",
    "llmexp.guard",
    "llmexp.origin",
    "llmexp.hints",
    *SWEEP,
    "llmexp.commands",
    "llmexp.explain",
    "llmexp.flags",
    "llmexp.help",
)
LIGHT = (
    "llmexp.budgets",
    "llmexp.derived",
    "llmexp.labels",
    *HYDRA_SIDE,
    "llmexp.config",
    "llmexp.environment",
    "llmexp.knobs",
    "llmexp.run",
    "llmexp.folder",
    "llmexp.process",
    "llmexp.targets",
    "llmexp.values",
    "llmexp.__main__",
)


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Dotted names of what a file imports: modules, and `module.name` for what is taken from one."""
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
    return found


def is_main_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def uses(name: str, *packages: str, top_level_only: bool = False) -> set[str]:
    found = imports(MODULES[name], top_level_only)
    return {f for f in found if any(f == p or f.startswith(p + ".") for p in packages)}


def test_the_reader_of_imports_sees_all_forms(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("import a.b\nfrom c import d\ndef f():\n    import e\nif __name__ == '__main__':\n    import g\n")
    assert imports(file) == {"a.b", "c", "c.d", "e", "g"}
    assert imports(file, top_level_only=True) == {"a.b", "c", "c.d"}


@pytest.mark.parametrize("name", PARTS)
def test_parts_know_neither_config_nor_run_nor_the_loop(name):
    folders = ("llmexp.models", "llmexp.data", "llmexp.metrics", "llmexp.mesh")
    others = [m for m in MODULES if m.count(".") == 1 and m not in folders]
    others = [m for m in others if m not in (*PARTS, "llmexp.process")] + ["hydra", "omegaconf"]
    assert uses(name, *others) == set()


def test_parts_do_not_import_each_others_private_names():
    for name, path in MODULES.items():
        for found in imports(path):
            module, _, last = found.rpartition(".")
            private = last.startswith("_") and not last.startswith("__")
            assert not (module.startswith("llmexp.") and private), f"{name} imports {found}"


def test_config_imports_the_standard_library_only_and_run_config_besides():
    after_config = {"llmexp.config", "llmexp.values"}
    for name, allowed in (
        ("llmexp.values", set()),
        ("llmexp.config", {"llmexp.values"}),
        ("llmexp.process", set()),
        ("llmexp.knobs", after_config),
        ("llmexp.run", after_config),
    ):
        for found in imports(MODULES[name]):
            top = found.partition(".")[0]
            assert top in sys.stdlib_module_names or any(found.startswith(a) for a in allowed), f"{name}: {found}"


def test_distributed_and_wandb_stay_in_their_files():
    for name, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        if name.split(".")[1:2] != ["mesh"]:
            assert uses(name, "torch.distributed") == set(), name
            assert "torch.distributed" not in text, name
        if name != "llmexp.metrics.tracker":
            assert uses(name, "wandb") == set(), name


@pytest.mark.parametrize("name", LIGHT)
def test_what_starts_first_imports_nothing_slow(name):
    assert uses(name, "torch", "wandb", "matplotlib", "plotly", "numpy", "tiktoken", top_level_only=True) == set()
    # Nor by way of another file of ours, as far as it is not light itself.
    ours = {f for f in uses(name, "llmexp", top_level_only=True) if f in MODULES and f != "llmexp"}
    assert ours <= set(LIGHT)


def test_hydra_stops_at_the_door():
    for name in MODULES:
        if name not in HYDRA_SIDE:
            assert uses(name, "hydra", "omegaconf") == set(), name
            assert uses(name, *SWEEP) == set(), name


def test_the_worker_never_meets_the_launcher():
    for name in MODULES:
        if name.startswith("llmexp.train") or name in ("llmexp.assemble", "llmexp.building", "llmexp.sample"):
            assert uses(name, *HYDRA_SIDE, "llmexp.__main__") == set()


def test_no_file_outgrows_its_purpose():
    for name, path in MODULES.items():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 450, name
