"""What processes import: each as much as it needs, as sys.modules of real ones show."""

import importlib.util
import subprocess
import sys

from tests import forks
from tests.conftest import PATHS, TINY, environment, llmexp

DATA = ["data=synthetic", "data.n_tokens=5000"]

# Imports of a second or two of processor time each; what has run may have imported the rest.
STARTS = """
import sys
import llmexp
from llmexp.__main__ import run

def none_of(*packages):
    assert not {*packages} & {*sys.modules}, {*packages} & {*sys.modules}

llmexp.load
none_of("torch", "wandb", "matplotlib", "numpy", "tiktoken", "plotly", "rich", "hydra", "omegaconf")
assert run(["train", "--help"]) == run(["plan", "--help"]) == run(["prepare", "--help"]) == 0
none_of("torch", "numpy", "rich", "hydra", "omegaconf")
import llmexp.cli.train, llmexp.cli.resume, llmexp.cli.plan, llmexp.cli.sample, llmexp.cli.evaluate
import llmexp.cli.prepare, llmexp.cli.explain, llmexp.cli.help, llmexp.cli.verify
assert run(["train", "--cfg", "job", "--resolve", "name=x"]) == 0
none_of("torch", "wandb", "matplotlib", "numpy", "tiktoken", "plotly", "rich")
import llmexp.tracker.mirror, llmexp.system.console, llmexp.metrics.plot
none_of("torch", "wandb", "matplotlib", "rich")
overrides = [OVERRIDES]
assert run(["prepare", *overrides]) == 0
none_of("torch")
assert run(["plan", *overrides]) == 0
import torch
from llmexp.optim import held, updating
from llmexp.optim.optimizers import adamw, lion, muon, sgd
for make in (adamw.adamw, sgd.sgd, muon.muon, lion.lion):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    for optimizer in (optimizers := held.as_list(make(model, lr=0.1))):
        optimizer.load_state_dict(optimizer.state_dict())
    updating.update(optimizers, torch.tensor(False))
    optimizers[0].zero_grad()
from llmexp.models.llama import Llama
from llmexp.train.assembly.assemble import assemble
from tests.tools import composed
model = Llama(9, 4, d_model=8, n_heads=1, n_kv_heads=1, n_layers=1, d_ff=8, n_experts=2, d_expert=8)
model(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
own = ["~model", "+model={_target_: own.nets.Bigram, vocab_size: null}"]
assemble(composed(*own, *(text for text in overrides if not text.startswith("model"))))
none_of("torch._dynamo", "sympy")
"""


def test_commands_models_and_optimizers_import_no_more_than_they_need(tmp_path):
    script = STARTS.replace("[OVERRIDES]", repr([*TINY, *DATA]))
    env = environment(PYTHONPATH=PATHS, LLMEXP_ALLOW="own")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, check=True)


# Python imports it at its start; a command ends by way of atexit, a worker without.
NOTING = """
import atexit, os, sys

def note():
    name = f"{'worker' if 'llmexp.train' in sys.orig_argv else 'command'}.modules"
    with open(os.path.join(FOLDER, name), "w") as out:
        out.write("\\n".join(sys.modules))

def leave(code, end=os._exit):
    note()
    end(code)

atexit.register(note)
os._exit = leave
"""
# Packages that a run may import, with those that Hydra and torch import where they are there.
ALLOWED = {
    "command": {"antlr4", "attr", "hydra", "hydra_plugins", "omegaconf", "packaging", "yaml"},
    "worker": {
        "dill", "numpy", "tiktoken", "tiktoken_ext", "torch", "torchgen", "tqdm", "triton",
        "typing_extensions", "yaml",
    },
}  # fmt: skip
PLAIN = ["train.max_steps=2", "metrics.noise_scale_every=null", "metrics.outlier_sigma=null"]


def test_a_plain_run_imports_what_it_asks_for(tmp_path, monkeypatch):
    """Neither the command nor its worker reads a line of what few runs ask for."""
    monkeypatch.setattr(forks, "ALLOWED", False)
    (tmp_path / "sitecustomize.py").write_text(NOTING.replace("FOLDER", repr(str(tmp_path))))
    command = ["train", *TINY, *DATA, *PLAIN, "hydra.run.dir=run"]
    result = llmexp(*command, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{PATHS}")
    assert result.code == 0, result.err
    rooms = ("hf", "tracker", "tasks", "compare", "sweep", "verify", "scaling", "evaluate")
    parts = ("run.shape", "mesh.sharding", "mesh.sequence", "optim.groups", "optim.trying")
    parts += tuple(f"optim.optimizers.{name}" for name in ("library", "lion", "muon", "sgd"))
    parts += tuple(f"models.{name}" for name in ("hf", "llama", "offload", "recompute", "rows"))
    few = tuple(f"llmexp.{name}" for name in (*(f"{room}." for room in rooms), *parts))
    few += ("torch._dynamo", "torch._inductor")
    assert all(importlib.util.find_spec(name.rstrip(".")) for name in few)
    for process in ("command", "worker"):
        found = (tmp_path / f"{process}.modules").read_text().split()
        assert "llmexp.config.sections" in found
        asked = {m for m in found if m.startswith("llmexp.features.") and m.endswith(".train")}
        asked -= {f"llmexp.features.{name}.train" for name in ("clip_table", "weight_norm")}
        assert [m for m in found if m.startswith(few)] == [], process
        packages = {m for m in found if m.isidentifier() and not m.startswith(("_", "cython_"))}
        ours = {"llmexp", "sitecustomize"} | ALLOWED[process]
        assert packages - sys.stdlib_module_names - ours == set(), process
        assert not asked, process  # but for what each run has
