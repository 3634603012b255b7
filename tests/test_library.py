"""Optimizers of libraries, by name and as shipped options: what a run needs of them;
tests/refusals/train.yaml has what is refused."""

import copy
import json
import math
import re
from importlib.util import find_spec

import pytest
import torch

from llmexp import mesh
from llmexp.checkpoint import loading, saving
from llmexp.config.sections import plain
from llmexp.config.values import ConfigError
from llmexp.forecast.dry_run import cut_of, rehearse
from llmexp.optim import eval_weights, groups, states, updating
from llmexp.optim.optimizers import library
from llmexp.optim.precision import settings_kept
from llmexp.optim.trying import TriedTensors, Unfit
from llmexp.train.assembly.assemble import assemble
from llmexp.train.beginning import restore
from llmexp.train.set_up import set_up
from llmexp.train.step import seed_step, train_step
from llmexp.train.windows import read_ahead
from tests.conftest import TINY, llmexp, train
from tests.tools import amend, composed, equal, run_here

for package in ("schedulefree", "torchao", "pytorch_optimizer"):
    if find_spec(package) is None:  # importing takes seconds
        pytest.skip(f"needs {package}", allow_module_level=True)

RUN = [*TINY, "data=synthetic", "data.n_tokens=4000", "precision=fp32", "train.max_steps=10",
       "model.d_model=32", "model.d_ff=128"]  # fmt: skip
OPTIONS = {
    "adafactor": ["optimizer=adafactor"],
    "schedule_free": ["optimizer=schedule_free"],
    "soap": ["optimizer=soap", "optimizer.precondition_frequency=3"],
    "adamw_8bit": ["optimizer=adamw_8bit"],
    "Lion": ["optimizer=library", "++optimizer.name=Lion", "++optimizer.betas=[0.8,0.9]"],
    "lion": ["optimizer=lion"],
    "AdamW4bit": ["optimizer=library", "++optimizer.name=AdamW4bit"],
    # It divides by a product that it reads: a plan takes that of the tiny copy.
    "NAdam": ["optimizer=library", "++optimizer.name=NAdam"],
}


def parts_of(*overrides: str):
    return assemble(composed(*RUN, *overrides))


@pytest.fixture
def joined():
    with settings_kept():
        yield mesh.join("cpu", "single", 1, 1, 1)


def steps(parts, s, first: int, last: int) -> list[float]:
    """Losses of the steps, from the state that is there."""
    windows, found = read_ahead(parts, s.mesh, first), []
    for number in range(first, last):
        seed_step(0, number, 0)
        seen = train_step(s, next(windows), lambda n=number: n).read()
        assert not seen.skipped
        found.append(seen.loss)
    return found


def saved(s, folder, step: int) -> loading.Loaded:
    with eval_weights.evaluating(s.optimizers, s.module) as trained:
        pieces = saving.snapshot(s.model, s.optimizers, 0, 1, True, None, trained)
    state = {
        "progress": {"step": step, "updates": step},
        "meter": {"tokens_seen": 0},
        "scaler": s.scaler.state_dict(),
    }
    saving.write_pieces(folder, step, pieces)
    path = saving.commit_checkpoint(folder, step, pieces, state, {"config": {}}, None)
    return loading.read_checkpoint(path)


def snapshot_of(s) -> dict:
    """All tensors and values of the model and its optimizers, copied."""
    found = {"model": {n: p.detach().clone() for n, p in s.model.named_parameters()}}
    for number, optimizer in enumerate(s.optimizers):
        for place, group in enumerate(optimizer.param_groups):
            plain = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
            found[f"{number}.{place}"] = {k: plain[k] for k in sorted(plain)}
            for n, p in enumerate(group["params"]):
                rest, held = states.apart(optimizer.state[p])
                found[f"{number}.{place}.{n}"] = {k: rest[k] for k in sorted(rest)}
                found[f"{number}.{place}.{n} tensors"] = {k: v.clone() for k, v in held.items()}
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_that_stops_goes_on_bit_for_bit(name, tmp_path, joined):
    """Ten steps, stopped at the fourth, against ten without a stop; saving changes nothing, nor
    does an update that is skipped. A plan counts the bytes of the states."""
    parts = parts_of(*OPTIONS[name])
    whole = set_up(parts, joined)
    losses = steps(parts, whole, 0, 10)
    cut = set_up(parts, joined)
    assert steps(parts, cut, 0, 4) == losses[:4]
    loaded = saved(cut, tmp_path, 4)
    assert steps(parts, cut, 4, 6) == losses[4:6]
    other = set_up(parts, joined, fresh=False)
    restore(parts, other, loaded, False)
    assert steps(parts, other, 4, 10) == losses[4:]
    assert equal(snapshot_of(other), snapshot_of(whole))
    for p in other.parameters:
        p.grad.fill_(math.nan)
    updating.update(other.optimizers, torch.tensor(True))
    for p in other.parameters:
        p.grad.zero_()
    assert equal(snapshot_of(other), snapshot_of(whole))
    of_parameters = [state for o in whole.optimizers for state in o.state.values()]
    held = [tensor for state in of_parameters for tensor in states.apart(state)[1].values()]
    planned = rehearse(parts, cut_of(parts), "fp32", None)["moments"]
    blocks = 512 * len(held)  # of the allocator, one each
    assert planned == pytest.approx(sum(t.nbytes for t in held), abs=blocks)


def test_schedule_free_is_trained_at_one_point_and_evaluated_at_another(tmp_path, joined):
    """Against the formulas in float64 (Defazio et al. 2024, arXiv 2405.15682, algorithm 1)."""
    parts = parts_of("optimizer=schedule_free", "optimizer.weight_decay=0.1", "precision=fp64",
                     "schedule=constant", "schedule.warmup_steps=3", "clip=none")  # fmt: skip
    s = set_up(parts, joined)
    named = dict(s.model.named_parameters())
    z = {n: p.detach().clone() for n, p in named.items()}
    x, v = copy.deepcopy(z), {n: torch.zeros_like(p) for n, p in z.items()}
    sums, gradients = 0.0, {}
    s.optimizers[0].register_step_pre_hook(
        lambda *_: gradients.update({n: p.grad.clone() for n, p in named.items()})
    )
    for t in range(1, 7):
        y = {n: p.detach().clone() for n, p in named.items()}
        steps(parts, s, t - 1, t)
        rate = 2.5e-3 * min(1, t / 3)
        sums += rate**2
        for n, g in gradients.items():
            v[n] = 0.999 * v[n] + 0.001 * g**2
            decay = 0.1 if g.ndim > 1 else 0.0
            step = g / ((v[n] / (1 - 0.999**t)).sqrt() + 1e-8) + decay * y[n]
            z[n] = z[n] - rate * step
            x[n] = x[n] + rate**2 / sums * (z[n] - x[n])
            want = 0.1 * z[n] + 0.9 * x[n]
            torch.testing.assert_close(named[n].detach(), want, rtol=1e-11, atol=1e-12)
    at = {n: p.detach().clone() for n, p in named.items()}
    with eval_weights.evaluating(s.optimizers, s.module) as kept:
        for n, p in named.items():
            torch.testing.assert_close(p.detach(), x[n], rtol=1e-11, atol=1e-12)
            assert torch.equal(kept[id(p)], at[n])
    assert all(torch.equal(p, at[n]) for n, p in named.items())
    loaded = saved(s, tmp_path, 6)
    other = set_up(parts, joined, fresh=False)
    loading.restore_model(loaded, other.model)
    for n, p in other.model.named_parameters():  # for evaluate, export and sample
        torch.testing.assert_close(p.detach(), x[n], rtol=1e-11, atol=1e-12)
    loading.restore_optimizers(loaded, other.model, other.optimizers)
    assert all(torch.equal(p, at[n]) for n, p in other.model.named_parameters())


@pytest.mark.parametrize("name", ["Prodigy", "RAdamScheduleFree"])
def test_a_fork_with_the_settings_of_its_parent_goes_on_as_it(name, tmp_path, joined):
    """Also where the first steps leave a number in its groups alone, which later ones change."""
    parts = parts_of("optimizer=library", f"++optimizer.name={name}", "optimizer.lr=1")
    s, other = set_up(parts, joined), set_up(parts, joined, fresh=False)
    steps(parts, s, 0, 8)
    restore(parts, other, saved(s, tmp_path, 8), True)
    assert steps(parts, s, 8, 10) == steps(parts, other, 8, 10)
    assert all(torch.equal(p, q) for p, q in zip(s.parameters, other.parameters, strict=True))


def test_a_fork_keeps_the_counters_and_takes_its_own_settings(tmp_path, joined):
    """The moments of the parent go on at the rates and the decay of the fork."""
    parts = parts_of("optimizer=schedule_free", "optimizer.beta2=0.9")
    fork = parts_of("optimizer=schedule_free", "optimizer.beta2=0.8", "optimizer.lr=1e-3")
    s, other = set_up(parts, joined), set_up(fork, joined, fresh=False)
    steps(parts, s, 0, 3)
    restore(fork, other, saved(s, tmp_path, 3), True)
    [there], [here] = s.optimizers, other.optimizers
    for old, new in zip(there.param_groups, here.param_groups, strict=True):
        assert (new["k"], new["weight_sum"], new["train_mode"]) == (3, old["weight_sum"], True)
        assert (new["betas"], new["initial_lr"]) == ((0.9, 0.8), 1e-3)
    for p, q in zip(s.parameters, other.parameters, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(there.state[p]["z"], here.state[q]["z"])


def test_a_fork_may_give_an_argument_that_its_parent_left_out(tmp_path):
    betas, parent = "optimizer.betas=[0.8,0.9]", tmp_path / "parent"
    (parent / "checkpoints" / "step_00000004").mkdir(parents=True)
    (parent / "checkpoints" / "step_00000004" / "manifest.json").write_text("{}")
    fork = [f"fork.run={parent}", betas]
    for option in (OPTIONS["Lion"], ["optimizer=adamw"]):
        (parent / "config.yaml").write_text(json.dumps(plain(composed(*RUN, *option))))
        if option == OPTIONS["Lion"]:
            assert composed(*fork).optimizer["betas"] == [0.8, 0.9]
        else:
            with pytest.raises(ConfigError, match=r"^optimizer\.betas"):
                composed(*fork)
    amend(parent / "config.yaml", optimizer=3)
    with pytest.raises(ConfigError, match=r"parent/config\.yaml: optimizer"):
        composed(*fork)


def test_that_gradients_are_0_is_said_only_where_they_are():
    for gradient in (0.0, 1.0):
        p = torch.nn.Parameter(torch.ones(1))
        broken = torch.optim.SGD([p], lr=math.inf)
        trial = TriedTensors([p], [broken], lambda step, g=gradient: [torch.tensor([g])])
        with pytest.raises(Unfit, match="not finite") as said:
            trial.take_steps(range(1))
        assert ("where gradients are 0" in str(said.value)) == (gradient == 0)


@pytest.mark.parametrize("given", [["schedule_free"], ["library", "AdamWScheduleFree"]])
def test_a_rate_that_falls_beside_a_schedule_free_optimizer_is_warned_of(given):
    optimizer = [f"optimizer={given[0]}", *(f"++optimizer.name={name}" for name in given[1:])]
    for schedule in ("cosine", "constant"):
        warnings = parts_of(*optimizer, f"schedule={schedule}").run.warnings
        told = any("schedule=constant with a warm-up is advised" in w for w in warnings)
        assert told == (schedule == "cosine")


def test_a_package_that_is_not_there_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(library, "PACKAGES", ("torch.optim", "no_such_package"))
    for name in ("Lion", "no_such_package.Lion"):
        with pytest.raises(ConfigError, match=r"not installed: pip install 'llmexp\[optimizers\]'"):
            library.dotted_name(name)
    assert library.dotted_name("AdamW") == "torch.optim.AdamW"


def test_a_name_gets_its_package_and_explain_shows_the_defaults(capfd):
    parts = parts_of(*OPTIONS["Lion"])
    assert parts.config.optimizer["name"] == "pytorch_optimizer.Lion"
    asked = ["optimizer=library", "optimizer.name=Lion"]
    shown = run_here(capfd, "explain", "optimizer", *asked, "--json")
    known = {knob["key"]: knob for knob in json.loads(shown.out)["knobs"]}
    assert known["optimizer.betas"]["value"] == [0.9, 0.99]
    assert known["optimizer.weight_decay"]["from"] == "the default of pytorch_optimizer.Lion"
    one = run_here(capfd, "explain", "optimizer.betas", *asked, "optimizer.betas=[0.8,0.9]")
    assert one.out.splitlines()[0] == "optimizer.betas = [0.8, 0.9]"
    assert "Decay rates" in one.out


def names_in(pattern: re.Pattern[str]) -> list[str]:
    """The optimizers of the libraries that a pattern names."""
    found = []
    for package in library.PACKAGES:
        names = [f"{package}.{name}" for name in vars(library._imported(package))]
        found += [name for name in names if pattern.fullmatch(name)]
    return found


def moved(name: str, parts: int, factor: float) -> list[torch.Tensor]:
    """What four steps by a multiple of gradients do to tensors, or to their parts."""

    def cut(seed: int) -> list[torch.Tensor]:
        return [one.clone() for tensor in library._tiny(seed) for one in tensor.chunk(parts)]

    held = [torch.nn.Parameter(tensor) for tensor in cut(0)]
    plain = {"weight_decay": 0.0} if "weight_decay" in library._kind(name)[1] else {}
    optimizer = library._constructed(name, held, 1e-3, plain)
    TriedTensors(held, [optimizer], lambda step: [factor * g for g in cut(step + 1)]).take_steps(
        range(4)
    )
    return [p.detach() for p in held]


def test_what_is_said_to_update_each_entry_by_itself_does():
    """To the bit: halves of tensors become the halves of what the whole ones become."""
    for name in names_in(library.EACH_ENTRY):
        a, b, c, d = moved(name, 2, 1)
        assert equal(moved(name, 1, 1), [torch.cat((a, b)), torch.cat((c, d))]), name


def test_gradients_64_times_as_large_make_one_update_where_it_is_said():
    start = library._tiny(0)[0]
    for name in {*names_in(library.EACH_ENTRY), *names_in(library.LIKE_ADAM)}:
        one, other = (moved(name, 1, factor)[0] - start for factor in (1, 64))
        alike = bool((other - one).norm() <= 0.01 * one.norm())
        said = library.LIKE_ADAM.fullmatch(name) is not None
        if name.startswith("torch."):  # of torch's those count that `groups.ADAM_LIKE` has
            said = issubclass(library._kind(name)[0], groups.ADAM_LIKE)
        assert alike == said, name


def test_groups_have_rates_of_their_own_where_the_rate_is_a_tensor(joined):
    """torchao's groups would have one tensor in common."""
    groups = "++optimizer.groups=[{match: '*.mlp.*', lr: 0.5}, {match: '*.attention.*', lr: 2}]"
    parts = parts_of("optimizer=adamw_8bit", "schedule=constant", "optimizer.lr=0.25", groups)
    s = set_up(parts, joined)
    steps(parts, s, 0, 1)
    rates = {float(group["lr"]) for group in s.optimizers[0].param_groups}
    assert rates == {0.25, 0.125, 0.5}


def test_a_checkpoint_of_schedule_free_is_what_the_rows_have_evaluated(tmp_path):
    given = ["optimizer=schedule_free", "data=synthetic", "data.n_tokens=4000", "precision=fp32",
             "train.max_steps=6"]  # fmt: skip
    whole = train(tmp_path, "whole", *given)
    found = llmexp("evaluate", "whole@6", "--json", cwd=tmp_path)
    assert found.code == 0, found.err
    [one] = json.loads(found.out)["sets"]
    assert whole.rows()[-1]["val/loss"] == pytest.approx(one["loss"], rel=1e-6)


def test_soap_amplifies_noise_by_its_own_arithmetic():
    """In float64: a change of the last bits of the gradients gives another eigenbasis where their
    second moments leave it open: a gradient of 12 x 6 has a rank of 6 and 12 rows. QR is done in
    float32, too. AdamW stays near."""
    far = {}
    for name in ("pytorch_optimizer.SOAP", "torch.optim.AdamW"):
        ends = []
        for noise in (0.0, 2**-51):
            p = torch.nn.Parameter(torch.zeros(12, 6, dtype=torch.float64))
            holder = torch.nn.ParameterList([p])
            optimizer = library.built(holder, name, 1e-3)
            numbers = torch.Generator().manual_seed(0)
            for _ in range(4):
                g = torch.randn(12, 6, generator=numbers, dtype=torch.float64)
                p.grad = g * (1 + noise * torch.randn(12, 6, generator=numbers).double().sign())
                optimizer.step()
            ends.append(p.detach().clone())
        far[name] = float((ends[0] - ends[1]).abs().max())
    assert far["torch.optim.AdamW"] < 1e-15, far
    assert far["pytorch_optimizer.SOAP"] > 1e-6, far
