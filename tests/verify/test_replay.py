"""A step is repeated bit by bit, and its cause is told: data, or state."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmexp.verify.replay import verdict
from tests.conftest import TINY, Result, llmexp, train
from tests.tools import run_here

STEP = 26
PLANTED = ["--allow", "plant"]
# The rate of one update is far too high; or the second moments are damaged; or neither.
PLANT = """
def jump(update, total_updates, **warmup):
    return 400.0 if update == 23 else 1.0

def damage(event, context):
    if event == "step_start" and context.step == 24:
        for state in context.optimizers[0].state.values():
            state["exp_avg_sq"].mul_(1e-6)

def wide(event, context):
    return {"mine/" + 16000 * "x": 1.0} if event == "step_end" else None
"""
SETTINGS = [
    "data=tokens", "data.shuffle=false", "data.val_ratio=0", "train.max_steps=32",
    "train.log_every=1", "train.eval_every=null", "batch.real_batch_size=4", "checkpoint.every=20",
    "batch.micro_batch_size=2", "optimizer.lr=0.01", "clip=none", *PLANTED,
]  # fmt: skip
CASES = {
    "garbage": ["schedule=constant"],
    "rate": ["schedule=constant", "schedule._target_=plant.jump"],
    "moments": ["schedule=constant", "hooks=[plant.damage,plant.wide]"],
}


def planted(folder: Path, case: str, seed: int, *more: str) -> Result:
    """Tokens that follow a rule, but for a window of chance in the case of garbage."""
    rng = np.random.default_rng(seed)
    ids = (np.cumsum(rng.integers(0, 2, 12 * 160 + 1)) * 5 % 60).astype(np.uint16)
    if case == "garbage":
        begin = 12 * 4 * (STEP - 1)
        ids[begin : begin + 48] = rng.integers(60, 320, 48)  # some have no text in the tokenizer
    name = f"{case}-{seed}"
    np.save(folder / f"{name}.npy", ids)
    (folder / "plant.py").write_text(PLANT)
    given = [f"data.train_files=[{name}.npy]", f"train.seed={seed}", *CASES[case]]
    return train(folder, name, *SETTINGS, *given, *more)


def replayed(result: Result, step: int, *more: str) -> dict:
    target = f"{result.folder.name}@{step}"
    found = llmexp("replay", target, *PLANTED, "--json", *more, cwd=result.folder.parent)
    assert found.code == 0, found.err
    return json.loads(found.out)


PLANTS = [(case, seed) for seed in range(1, 21) for case in CASES]
PLANTS.remove(("moments", 1))


# A rate and moments are both told by the state; here one of them is enough. A window of chance is
# told below, from the run that several tests share.
@pytest.mark.parametrize(
    ("case", "seed"),
    [("moments", 1), *(pytest.param(*c, marks=pytest.mark.slow) for c in PLANTS)],
)
def test_a_planted_cause_is_told(tmp_path, case, seed):
    result = planted(tmp_path, case, seed)
    # the window of chance, or the step with the largest norm soon after the damage
    norms = {row["step"]: row["grad_norm"] for row in result.rows()}
    step = STEP if case == "garbage" else max(range(24, 30), key=lambda step: norms[step])
    cause = "data" if case == "garbage" else "state"
    found = replayed(result, step)
    assert found["cause"] == cause, found["sentence"]
    assert found["equal"] == list(range(21, step + 1))
    found = replayed(result, step, "--from", "0")
    assert found["equal"] == list(range(1, step + 1))
    cannot_tell(found, cause, 20)
    # those rows of a wide run are more than an environment variable may hold
    assert case != "moments" or sum(len(json.dumps(row)) for row in result.rows()[:step]) > 2**17


def cannot_tell(found: dict, cause: str, nearer: int) -> None:
    """Weights that have learned nothing find no window unusual, which is no proof of the state."""
    assert found["cause"] in (None, cause)
    if found["cause"] is None:
        assert f"--from {nearer}" in found["sentence"]


@pytest.fixture(scope="module")
def garbage(tmp_path_factory) -> Result:
    return planted(tmp_path_factory.mktemp("replay"), "garbage", 1, "precision=fp64")


@pytest.fixture(scope="module")
def repeated(garbage) -> dict:
    found = replayed(garbage, STEP)
    assert found["cause"] == "data", found["sentence"]
    assert found["equal"] == list(range(21, STEP + 1))
    return found


def test_shares_are_those_of_the_gradient(garbage):
    """By an independent pass over each sequence, from the checkpoint of the step before."""
    found = replayed(garbage, 21)
    assert found["from"] == 20
    here, row = found["here"], garbage.rows()[20]
    assert (here["loss"], here["grad_norm"]) == (row["train/loss"], row["grad_norm"])
    import llmexp as api

    model = api.load(garbage.folder).model(20).double()
    ids = torch.from_numpy(np.load(garbage.folder.parent / "garbage-1.npy").astype(np.int64))
    gradients, losses = [], []
    for one in range(80, 84):
        tokens = ids[12 * one : 12 * one + 13]
        model.zero_grad()
        logits = model(tokens[None, :-1])[0]
        loss = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
        (loss / 48).backward()
        losses.append(loss.item() / 12)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    total = torch.stack(gradients).sum(0)
    assert here["grad_norm"] == pytest.approx(float(total.norm()), rel=1e-10)
    sequences = here["sequences"]
    assert [s["sequence"] for s in sequences] == [80, 81, 82, 83]
    assert [s["first_token"] for s in sequences] == [960, 972, 984, 996]
    for one, gradient, loss in zip(sequences, gradients, losses, strict=True):
        share = float(gradient @ total / (total @ total))
        found = [one[key] for key in ("loss", "grad_norm", "share")]
        assert found == pytest.approx([loss, float(gradient.norm()), share], rel=1e-8)
        assert sum(d["targets"] for d in one["documents"]) == one["targets"] == 12
    assert sum(s["share"] for s in sequences) == pytest.approx(1, rel=1e-10)


@pytest.mark.parametrize(
    "way", ["fsdp", *(pytest.param(w, marks=pytest.mark.slow) for w in ("ddp", "tp"))]
)
def test_ranks_find_the_same(repeated, tmp_path, way):
    one = repeated["here"]["sequences"]
    two = ["precision=fp64", f"parallelism={way}", "parallelism.nproc_per_node=2"]
    found = replayed(planted(tmp_path, "garbage", 1, *two), STEP)
    assert found["cause"] == "data"
    for here, there in zip(one, found["here"]["sequences"], strict=True):
        assert here["first_token"] == there["first_token"]
        for key in ("loss", "grad_norm", "share"):
            assert here[key] == pytest.approx(there[key], rel=1e-9)


def test_other_starts_rates_limits_and_without_the_window(garbage, repeated):
    first = replayed(garbage, STEP, "--from", "0")
    assert first["repeated_from"] == 0
    cannot_tell(first, "data", 20)
    later = replayed(garbage, STEP, "--from", "32")
    assert (later["from"], later["repeated_from"]) == (32, 20)
    assert later["times_here"] == repeated["times_here"]  # of the run itself
    changed = replayed(garbage, STEP, "--lr", "0.5", "--clip", "0.25", "--after", "2")["here"]
    assert changed["lr"] == pytest.approx(0.5)
    assert changed["grad_norm_post_clip"] == pytest.approx(0.25, rel=1e-4)
    assert changed["loss_after"] != repeated["here"]["loss_after"]
    without = replayed(garbage, STEP, "--skip")
    assert [step for step, _, _ in without["later"]] == list(range(STEP + 1, 33))

    # a rate that diverges shows what was found before
    assert replayed(garbage, STEP, "--lr", "1e300")["here"]["loss_after"] is None
    found = replayed(garbage, STEP, "--lr", "1e200", "--after", "5")
    assert "not finite" in found["ended"]
    assert found["here"]["sequences"]
    assert len(found["later"]) < 5


@pytest.mark.usefixtures("forking")
def test_what_cannot_be_repeated_is_refused(garbage, tmp_path, monkeypatch, capfd, words):
    monkeypatch.chdir(shutil.copytree(garbage.folder.parent, tmp_path / "copy"))
    name = garbage.folder.name

    def refused(part: str, *arguments: str) -> str:
        done = run_here(capfd, "replay", *arguments)
        assert done.code == 2, done.err
        words.places = {tmp_path: "HERE"}
        words("verify/replay", done.err, part)
        return done.err

    for part, arguments in {
        "beyond the end": [f"{name}@400"],
        "no step": [name],
        "no number": [f"{name}@x"],
        "no checkpoint": [f"{name}@{STEP}", "--from", "7"],
        "rate": [f"{name}@{STEP}", "--lr", "0"],
    }.items():
        refused(part, *arguments)
    rows = Path(name, "metrics.jsonl")
    lines = rows.read_text().splitlines(keepends=True)
    row = json.loads(lines[21])
    lines[21] = json.dumps(row | {"grad_norm": row["grad_norm"] * (1 + 1e-12)}) + "\n"
    rows.write_text("".join(lines))
    words.hidden[r"\d+\.\d{9,}"] = "N"
    assert repr(row["grad_norm"]) in refused("another row", f"{name}@{STEP}", *PLANTED)
    ids = np.load("garbage-1.npy")
    ids[5] += 1
    np.save("garbage-1.npy", ids)
    refused("other data", f"{name}@{STEP}", *PLANTED)


def test_a_fork_took_the_steps_after_its_parents(garbage):
    folder, name = garbage.folder.parent, garbage.folder.name
    fork = train(
        folder, "fork", *SETTINGS, "data.train_files=[garbage-1.npy]", "train.seed=1",
        *CASES["garbage"], "precision=fp64", f"fork.run={name}", "fork.step=20",
    )  # fmt: skip
    refused = llmexp("replay", "fork@3", *PLANTED, cwd=folder)
    assert (refused.code, "steps 21 to 32" in refused.err) == (2, True), refused.err
    assert replayed(fork, 21)["repeated_from"] == 20


def test_a_limit_of_ones_own_is_known_to_the_rule(tmp_path):
    """Where it clips as the rule does, not at all, the next steps are the run's."""
    rule = ["clip=quantile", "clip.quantile=0.5", "clip.window=2", "clip.warmup_steps=2"]
    result = planted(tmp_path, "rate", 1, *rule)
    rows = {row["step"]: row for row in result.rows()}
    free = {step for step, row in rows.items() if row["grad_norm"] == row["grad_norm_post_clip"]}
    step = next(s for s in range(21, 31) if s in free and s + 1 not in free)
    found = replayed(result, step, "--clip", "1e9", "--after", "2")
    for number, loss, norm in found["later"]:
        assert (loss, norm) == (rows[number]["train/loss"], rows[number]["grad_norm"])


def test_a_step_that_overflowed_is_shown_at_a_scale_that_does_not(tmp_path):
    result = planted(tmp_path, "garbage", 1, "precision=fp16", "precision.init_scale=1e9")
    rows = {row["step"]: row for row in result.rows()}
    skipped = [step for step, row in rows.items() if row["skipped"]]
    assert skipped[:2] == [1, 2]
    found = replayed(result, 2)
    assert found["equal"] == [1, 2]
    here, scale = found["here"], rows[2]["loss_scale"]
    assert here["loss"] == rows[2]["train/loss"]
    assert here["skipped"] == f"a gradient norm that is not finite at the loss scale {scale:g}"
    assert sum(one["share"] for one in here["sequences"]) == pytest.approx(1, rel=1e-2)
    # the first weights, as here, where a rate moves none of them
    (tmp_path / "still").mkdir()
    first = ["precision=fp32", "optimizer.lr=1e-30", "train.max_steps=2"]
    still = planted(tmp_path / "still", "garbage", 1, *first)
    assert here["grad_norm"] == pytest.approx(still.rows()[1]["grad_norm"], rel=1e-2)
    assert found["cause"] == "none"


def test_a_step_that_ended_the_run_is_shown(tmp_path):
    """Each update is far too large, so that some step has a loss that is not finite."""
    ids = np.cumsum(np.random.default_rng(1).integers(0, 2, 12 * 160 + 1)) * 5 % 60
    np.save(tmp_path / "ids.npy", ids.astype(np.uint16))
    (tmp_path / "plant.py").write_text(PLANT)
    given = ["data.train_files=[ids.npy]", "optimizer=sgd", "optimizer.lr=1e30"]
    given += ["schedule=constant", "checkpoint.every=1", "schedule.warmup_steps=0"]
    run = llmexp("train", *TINY, *SETTINGS, *given, "hydra.run.dir=ended", cwd=tmp_path)
    assert run.code == 3
    step = run.rows()[-1]["step"] + 1
    found = replayed(run, step)
    assert found["cause"] == "state"
    assert f"step {step} has a" in found["ended"]
    assert found["ended"] in run.json("status.json")["error"]
    sequences = found["here"]["sequences"]
    assert len(sequences) == 4
    assert any(None in (one["loss"], one["grad_norm"]) for one in sequences)
    assert all(one["documents"][0]["text"] for one in sequences)
    shown = llmexp("replay", f"ended@{step}", *PLANTED, cwd=tmp_path)
    assert (shown.code, "not finite" in shown.out) == (0, True)
    assert llmexp("replay", f"ended@{step + 1}", *PLANTED, cwd=tmp_path).code == 2


def test_points_of_a_sweep_mixtures_and_masks_are_repeated(tmp_path):
    """A sweep over a mixture of documents, attention within each."""
    for name, words in (("one", "abc "), ("two", "xyz ")):
        texts = [json.dumps({"text": words * (3 + n % 7)}) for n in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(texts))
    sources = [f"data.sources.{name}.files={name}.jsonl" for name in ("one", "two")]
    sweep = llmexp(
        "train", "-m", *TINY, *sources, "data=corpus", "data.val_main=null", "tokenizer=bytes",
        "batch.document_mask=true", "batch.real_batch_size=4", "train.max_steps=6",
        "train.log_every=1", "precision=fp64", "checkpoint.every=2", "train.seed=1,2",
        "hydra.sweep.dir=sweep", cwd=tmp_path,
    )  # fmt: skip
    assert sweep.code == 0, sweep.err + sweep.out
    (run,) = (tmp_path / "sweep").glob("*seed_2")
    row = Result(0, "", "", run).rows()[4]
    found = llmexp("replay", f"sweep/{run.name}@5", "--json", "--text", cwd=tmp_path)
    assert found.code == 0, found.err
    told = json.loads(found.out)
    assert told["equal"] == [5]
    sequences = told["here"]["sequences"]
    assert sum(one["targets"] for one in sequences) == row["target_tokens"]
    total = sum(one["loss"] * one["targets"] for one in sequences)
    assert total / row["target_tokens"] == pytest.approx(row["train/loss"], rel=1e-12)
    assert sum(one["share"] for one in sequences) == pytest.approx(1, rel=1e-9)
    texts = [document["text"] for one in sequences for document in one["documents"]]
    assert any("abc" in text or "xyz" in text for text in texts)
    for one in sequences:  # each target belongs to one document
        assert sum(document["targets"] for document in one["documents"]) == one["targets"]


LOSSES = [2.0, 2.1, 1.9, 2.05, 1.95, 2.0, 2.1]


def judged(here: dict, window: list, others: list, before: list = (), usual: float = 1.0) -> dict:
    start = {"window": window, "others": [[*others]] * 3}
    here = {"sequences": [0] * 4, **here}
    return verdict(9, {"from": 4, "start": start, "here": here}, [usual] * 8, [*before])


INFINITE = {"grad_norm": None, "loss": None}


@pytest.mark.parametrize(
    ("here", "window", "cause"),
    [
        # nearer on a logarithmic scale
        ({"grad_norm": 1.9}, [2.0, 1.9], "none"),
        *(({"grad_norm": 9.0}, [2.0, there], "state") for there in (1.0, 2.9)),
        *(({"grad_norm": 9.0}, [2.0, there], "data") for there in (3.1, 9.0)),
        # what is not finite is the state where its window is ordinary
        (INFINITE, [2.0, 1.2], "state"),
        *((INFINITE, [2.0, there], "data") for there in (5.0, None)),
        # an unusual loss counts where the norm is ordinary
        ({"loss": 2.4}, [5.0, 1.0], "none"),  # less than 6 x 1.4826 x 0.05 above 2.0
        ({"loss": 2.5}, [2.5, 1.0], "data"),
        ({"loss": 2.5}, [2.3, 1.0], "state"),
        # above others there, too, but by less than half as much
        ({"loss": 2.5}, [2.4, 1.0], None),
        ({"loss": 4.0}, [3.9, 1.0], "data"),
    ],
)
def test_the_cause_by_gradient_norms_and_losses(here, window, cause):
    losses = "grad_norm" not in here
    found = judged(
        {"grad_norm": 1.5, **here}, window, [2.2 if losses else 2.0, 1.0], LOSSES * losses
    )
    assert found["cause"] == cause
    if here is INFINITE:
        assert found["times_here"] is None


def test_without_gradients_nothing_is_judged():
    assert judged({"grad_norm": 0.0}, [2.0, 0.0], [2.0, 0.0], usual=0.0)["cause"] is None


@given(
    st.sampled_from([0, 90, 91, 99]),
    *[st.floats(2, 9)] * 3,
    st.floats(1, 20),
    st.sampled_from([[], [95], [10, 120]]),
)
def test_the_state_is_blamed_by_weights_that_know_the_usual_loss(
    begin, here, there, others, times, saved
):
    """Weights of the steps that the usual loss of 2 is of know it; earlier ones where their loss of
    other windows is above it by at most half of the step's rise."""
    before = [2.0 + 0.001 * n for n in range(8)]
    start = {"window": [there, 1.0], "others": [[others, 1.0]] * 8}
    step = {"grad_norm": times, "loss": here, "sequences": [0] * 4}
    found = verdict(100, {"from": begin, "start": start, "here": step}, [1.0] * 8, before, saved)
    rise = here - 2.0035
    if found["cause"] == "state":
        assert begin >= 91 or others - 2.0035 <= max(rise / 2, 6 * 0.02 * 1.01)
        assert there - others <= 6 * 0.01 * others * 1.01
    if found["cause"] is None:
        nearer = [s for s in saved if s > begin]
        assert ("--from" in found["sentence"]) == bool(nearer)
        assert "smaller checkpoint.every" in found["sentence"] or nearer
    if found["cause"] == "data":
        assert there - others > rise / 2
    assert (found["cause"] == "none") == (times < 2 and rise <= 6 * 0.02 * 1.01)
