"""`llmexp evaluate`: the losses of the rows, standard errors by the units that are independent;
tests/refusals/evaluate.yaml has what is refused."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from llmexp.__main__ import run as command
from llmexp.cli import running
from llmexp.mesh import ranks
from llmexp.metrics.ratio import ratio
from llmexp.system.child import FAILED, PASSED_ON, STOP_SIGNALS, signals_held
from llmexp.train.assembly.opening import open_run
from tests.conftest import train
from tests.tools import by_kernel
from tests.train.resumed import ends

END = 256  # of the tokenizer bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in fp64 on documents of many lengths, with two named validation sets."""
    path = tmp_path_factory.mktemp("evaluate")
    rng = np.random.default_rng(3)
    for name, count in (("web", 60), ("code", 25), ("other", 9)):
        with open(path / f"{name}.jsonl", "w") as file:
            for _ in range(count):
                words = rng.choice(["ab", "cde ", "fgh\n", "\u00fc", "xyz"], rng.integers(3, 40))
                file.write(json.dumps({"text": "".join(words)}) + "\n")
    train(
        path, "run", "data=corpus", "data.sources.web.files=web.jsonl", "tokenizer=bytes",
        "data.val.held.share=0.3", "data.val.code.files=code.jsonl", f"data.cache_dir={path}/cache",
        "train.max_steps=4", "checkpoint.every=2", "train.eval_every=2", "optimizer.lr=0.02",
        "precision=fp64", "batch.micro_batch_size=3", "train.eval_tokens=null",
    )  # fmt: skip
    return path


@pytest.fixture
def there(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


def evaluated(capsys, *arguments: str) -> dict:
    assert command(["evaluate", *arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", [pytest.param("fsdp", marks=pytest.mark.slow), "tp"])
def test_ranks_that_share_a_model_find_the_losses_of_one(there, capsys, kind):
    words = ["run", "--tokens", "200"]
    two = [f"parallelism={kind}", "parallelism.nproc_per_node=2"]
    alone = evaluated(capsys, *words)
    shared = json.loads(ends(there, "evaluate", *words, "--json", *two).out)  # printed once
    for one, other in zip(alone.pop("sets"), shared.pop("sets"), strict=True):
        figures = {key: value for key, value in one.items() if isinstance(value, float)}
        assert {key: other[key] for key in figures} == pytest.approx(figures, rel=1e-11)
        assert one.keys() == other.keys()
    assert alone == shared


def test_ranks_that_share_a_model_write_the_text_of_one(there, capsys):
    words = ["sample", "run", "--prompt", "ab", "--tokens", "12", "--temperature", "0"]
    two = ["parallelism=fsdp", "parallelism.nproc_per_node=2"]
    shared = ends(there, *words, *two).out
    for single in ([], ["parallelism=single"]):
        assert command([*words, *single]) == 0
        assert capsys.readouterr().out == shared


TERMINATED = f"os.kill(os.getppid(), {int(signal.SIGTERM)}); time.sleep(9e5)"
ONE_STOPPED = "raise SystemExit(75 if RANK else time.sleep(9e5))"
KILLED = "signal.signal({0}, 0) if {0} != 9 else 0; os.kill(os.getpid(), {0})"


@pytest.mark.parametrize(
    ("code", "wanted", "named"),
    [
        (TERMINATED, 128 + signal.SIGTERM, ""),
        (ONE_STOPPED, 75, ""),
        *((KILLED.format(n), FAILED, f"rank 0 was ended by signal {n}") for n in (2, 3, 9)),
    ],
)
def test_ranks_and_the_command_end_together(monkeypatch, capfd, code, wanted, named):
    """A signal to the command is its exit code; 75 is that of a training with a checkpoint, and no
    good end. The other rank would wait for ever. A killed rank is named; its number would be
    another exit code: 2 that of a refusal. Ranks share the processors that the command may use,
    which may be fewer than the host has."""
    threads: list[str] = []

    def start(*words: str, env: dict[str, str], **more: object) -> subprocess.Popen:
        program = f"import os, signal, time; RANK = {len(threads)}; {code}"
        threads.append(env["OMP_NUM_THREADS"])
        return subprocess.Popen([sys.executable, "-c", program])

    before = {number: signal.getsignal(number) for number in PASSED_ON}
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4))
    monkeypatch.setattr(ranks, "start", start)
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)
    if wanted == 75:  # its log
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: "why")
    try:
        assert ranks.run_alike(["evaluate"], 2) == wanted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert threads == ["2", "2"]
    assert named in capfd.readouterr().err


def test_a_rank_lets_the_signals_in_that_were_held_at_its_start(there, monkeypatch):
    held: set[int] = set(STOP_SIGNALS)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(
        running, "call", lambda *_: held.intersection_update(signal.pthread_sigmask(0, ()))
    )
    with signals_held():
        ranks = ["parallelism=fsdp", "parallelism.nproc_per_node=2"]
        assert command(["evaluate", "run", "--json", *ranks]) == 0
    assert not held


def by_hand(folder: Path, ids: np.ndarray, length: int = 12) -> tuple[float, float, float, float]:
    """Return loss, bits per byte and their standard errors, target by target in float64."""
    model = open_run(folder / "run", 4).model.double().eval()
    # of each document: the sum of its losses, its targets, and those that are bytes
    sums: dict[int, list[float]] = {}
    documents = np.cumsum(ids == END) - (ids == END)  # so many ends stand before each id
    for first in range(0, (len(ids) - 1) // length * length, length):
        row = torch.from_numpy(ids[first : first + length + 1].astype(np.int64))
        with torch.no_grad():
            logp = torch.log_softmax(model(row[None, :-1])[0], -1)
        for place, target in enumerate(row[1:].tolist()):
            one = sums.setdefault(int(documents[first + 1 + place]), [0.0, 0, 0])
            one[0] -= float(logp[place, target])
            one[1] += 1
            one[2] += target != END
    nll, targets, size = (math.fsum(s[i] for s in sums.values()) for i in range(3))
    loss, bits, n = nll / targets, nll / size / math.log(2), len(sums)
    spread = sum((s[0] - loss * s[1]) ** 2 for s in sums.values())
    spread_bits = sum((s[0] / math.log(2) - bits * s[2]) ** 2 for s in sums.values())
    errors = [math.sqrt(n / (n - 1) * some) for some in (spread, spread_bits)]
    return loss, errors[0] / targets, bits, errors[1] / size


def ids_of(path: Path) -> np.ndarray:
    texts = [json.loads(line)["text"].encode() for line in path.read_text().splitlines()]
    return np.array([i for text in texts for i in [*text, END]])


def test_losses_are_those_of_the_rows_and_errors_those_of_documents(there, capsys):
    rows = [json.loads(line) for line in (there / "run/metrics.jsonl").read_text().splitlines()]
    rows = {row["step"]: row for row in rows}
    before = {p: p.stat().st_mtime_ns for p in (there / "run").rglob("*")}
    for step in (2, 4):
        found = evaluated(capsys, f"run@{step}")
        assert found["step"] == step
        assert [one["set"] for one in found["sets"]] == ["held", "code"]
        for one in found["sets"]:
            # float64 sums of some hundred terms, in another order
            for key in ("loss", "bits_per_byte"):
                wanted = rows[step][f"val/{one['set']}/{key}"]
                assert math.isclose(one[key], wanted, rel_tol=1e-13), key
            assert one["unit"] == "documents"
        assert math.isclose(found["sets"][0]["ppl"], rows[step]["val/ppl"], rel_tol=1e-12)
    code = found["sets"][1]
    wanted = by_hand(there, ids_of(there / "code.jsonl"))
    keys = ("loss", "loss_stderr", "bits_per_byte", "bits_per_byte_stderr")
    assert [code[key] for key in keys] == pytest.approx(wanted, rel=1e-10)
    assert code["ppl_stderr"] == pytest.approx(math.exp(wanted[0]) * wanted[1], rel=1e-10)
    assert {p: p.stat().st_mtime_ns for p in (there / "run").rglob("*")} == before

    found = evaluated(capsys, "run", "--by", "document")
    for one in found["sets"]:
        assert len(one["documents"]) == one["units"]
        assert sum(d["tokens"] for d in one["documents"]) == one["tokens"]
        nll = sum(d["loss"] * d["tokens"] for d in one["documents"])
        assert nll / one["tokens"] == pytest.approx(one["loss"], rel=1e-12)
    first = json.loads((there / "code.jsonl").read_text().splitlines()[0])["text"]
    begins = found["sets"][1]["documents"][0]["begins"]
    assert " ".join(first.split()).startswith(begins[:8])


def test_other_data(there, capsys):
    whole = ids_of(there / "other.jsonl")
    given = ["data=corpus", "data.sources.new.files=other.jsonl", f"data.cache_dir={there}/cache"]
    found = evaluated(capsys, "run", *given)
    (one,) = found["sets"]
    wanted = by_hand(there, whole)
    assert (one["loss"], one["loss_stderr"]) == pytest.approx(wanted[:2], rel=1e-10)
    assert one["tokens"] == one["tokens_there"] == (len(whole) - 1) // 12 * 12
    # values of the run's own data
    (_, one) = evaluated(capsys, "run", "data.val.code.files=other.jsonl")["sets"]
    assert one["loss"] == pytest.approx(wanted[0], rel=1e-10)
    # token files know no documents
    np.save(there / "ids.npy", whole[whole != END].astype(np.uint16))
    given = ["data=tokens", "data.train_files=ids.npy", "data.val_ratio=0"]
    (one,) = evaluated(capsys, "run", *given)["sets"]
    assert (one["unit"], one["units"]) == ("sequences", one["tokens"] // 12)
    assert "bits_per_byte" not in one
    (part,) = evaluated(capsys, "run", *given, "--tokens", "30")["sets"]
    assert (part["tokens"], part["units"]) == (36, 3)


def test_a_folder_of_hugging_face_is_evaluated_with_its_own_tokenizer(there, capsys, tmp_path):
    """The figures are those of transformers' own logits, target by target in float64; a family that
    none of our models computes goes through model=hf."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    assert command(["export", "run", str(tmp_path / "gpt2"), "--to", "hf", "--keep-padding"]) == 0
    capsys.readouterr()
    shutil.copytree(tmp_path / "gpt2", tmp_path / "neox")
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 320}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 32}
    config = transformers.GPTNeoXConfig(**sizes, bos_token_id=0, eos_token_id=0)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "neox")
    text = "abc\nünf zwölf " * 40
    (tmp_path / "t.txt").write_text(text)
    given = [
        "data=text", f"data.train_files={tmp_path / 't.txt'}", "data.val_ratio=0",
        "precision=fp64", "batch.sequence_length=12", "--tokens", "all",
        f"data.cache_dir={tmp_path}/cache",
    ]  # fmt: skip
    ids = np.array([*text.encode(), END])
    for name in ("gpt2", "neox"):
        found = evaluated(capsys, str(tmp_path / name), *given)
        (one,) = found["sets"]
        whole = (len(ids) - 1) // 12 * 12
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).double().eval()
        rows = torch.from_numpy(np.stack([ids[i : i + 13] for i in range(0, whole, 12)]))
        with torch.no_grad():
            logits = model(rows[:, :-1]).logits
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        assert one["tokens"] == whole
        # its norms and rotary tables compute in fp32: relative errors of 2^-24, some per layer
        assert one["loss"] == pytest.approx(float(nll), rel=2e-6), name
        assert found["folder"] == str(tmp_path / name)


def test_the_table(there, capsys, words):
    words.hidden |= {r"\d+\.\d+": "N"}
    assert command(["evaluate", "run"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    words("evaluate/table", shown.out, "evaluate run")
    found = evaluated(capsys, "run")["sets"][0]
    (line,) = [line for line in shown.out.splitlines() if line.startswith("held ")]
    value, error = line.split("documents")[1].split()[0:3:2]
    assert abs(float(value) - found["loss"]) < 0.1 * found["loss_stderr"]
    assert float(error) == pytest.approx(found["loss_stderr"], rel=0.05)


def test_the_error_of_a_ratio():
    """One unit has none; equal units have none to speak of; x = 1 is the error of a mean."""
    assert ratio(np.array([3.0]), np.array([2.0])) == (1.5, None)
    assert ratio(np.array([3.0, 6]), np.array([2.0, 4])) == (1.5, 0.0)
    y = np.random.default_rng(0).normal(size=50)
    assert ratio(y, np.ones(50)) == pytest.approx((y.mean(), y.std(ddof=1) / math.sqrt(50)))


@pytest.mark.parametrize("kernel", ["plain", "chunked"])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_terms_of_the_loss_are_what_the_sum_is_of(folder, kernel, bf16):
    model = open_run(folder / "run", 4).model.float().eval()
    loss = by_kernel(model, kernel)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (50, 12), generator=generator)
    targets = torch.randint(0, 256, (50, 12), generator=generator)
    targets[::3, 5:] = -100
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        each, whole = loss(tokens, targets, each=True), loss(tokens, targets)
    assert each.dtype == torch.float32
    assert not each.requires_grad
    assert (each[targets == -100] == 0).all()
    # sums of 600 terms in fp32
    assert each.double().sum().item() == pytest.approx(whole.item(), rel=600 * 2**-24)
    if not bf16:
        wanted = torch.nn.functional.cross_entropy(
            model.double()(tokens).flatten(0, 1), targets.flatten(), reduction="none"
        )
        assert torch.allclose(each.flatten().double(), wanted, atol=1e-5)
