"""Runs on data=corpus: any number of ranks and any cut see the same sequences and targets, document
masks included; a run goes on inside a stage as if it had not been stopped."""

import json
import re
from pathlib import Path

import pytest

from llmexp.cli.running import run_command
from llmexp.config.values import ConfigError
from tests.conftest import TINY, Result, train
from tests.train.resumed import ends, goes_on_from
from tests.train.test_branches import planned


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for name in ("web", "code", "far"):
        texts = [f"{name} {i} " + "many words " * (i % 4) for i in range(150)]
        texts += ["web 0 "] if name == "far" else []
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def settings(files: Path) -> list[str]:
    stage = "{from_tokens: 200, weights: {web: 1, code: 3}}"
    return [
        "data=corpus", f"data.sources.web.files={files}/web.jsonl", "data.sources.web.weight=0.7",
        f"data.sources.code.files={files}/code.jsonl", "data.sources.code.weight=0.3",
        f"data.stages=[{stage}]", f"data.val.far.files={files}/far.jsonl",
        "data.val.near.share=0.1", "data.val_main=near", "batch.document_mask=true",
        "precision=fp64", "train.max_steps=8", "batch.real_batch_size=6", "train.data_digest=true",
        "train.log_every=1", "train.eval_every=4", "optimizer.lr=0.01", "checkpoint.every=2",
        "checkpoint.keep=null",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def one(files, tmp_path_factory) -> Result:
    return train(tmp_path_factory.mktemp("one"), "run", *settings(files))


def test_the_start_and_prepare_warn_of_documents_in_training_and_validation(one, files, capsys):
    assert run_command("prepare", [*TINY, *settings(files)]) == 0
    for printed in (one.out, capsys.readouterr().out):
        (text,) = re.findall(r"warning:? +(the validation set .*?;)", " ".join(printed.split()))
        assert text == (
            "the validation set far shares documents with training: 1 of its 151 are trained on, "
            "as documents of web 1;"
        )


@pytest.mark.parametrize(
    ("ranks", "micro"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow), (3, 2)]
)
def test_ranks_and_cuts_see_the_same_and_compute_the_same(one, files, tmp_path, ranks, micro):
    several = ["parallelism=ddp", f"parallelism.nproc_per_node={ranks}"] if ranks > 1 else []
    cut = f"batch.micro_batch_size={micro}"
    other = train(tmp_path, "run", *settings(files), *several, cut)
    for ours, theirs in zip(one.rows(), other.rows(), strict=True):
        for key in ("data_digest", "target_tokens"):
            assert ours[key] == theirs[key]
        keys = [k for k in ours if k in ("train/loss", "grad_norm") or k.startswith("val/")]
        found = {k: theirs[k] for k in keys}
        assert {k: ours[k] for k in keys} == pytest.approx(found, rel=1e-9, abs=0)
    assert any(row["target_tokens"] < 6 * 12 for row in one.rows())  # the mask hides some


def test_a_set_beside_the_main_one_is_evaluated_on_as_many_tokens(files, tmp_path):
    """The sets differ in their last document alone, which so few tokens do not come to."""
    text, sets = (files / "far.jsonl").read_text(), list[str]()
    for number, name in enumerate(("main", "beside"), 1):
        (tmp_path / f"{name}.jsonl").write_text(text.replace("web 0", f"web{number}0"))
        sets.append(f"data.val.{name}.files={name}.jsonl")
    given = ["train.max_steps=2", "data.val_main=main", *sets, "train.eval_tokens=60"]
    row = train(tmp_path, "run", *settings(files), *given).rows()[-1]
    assert row["val/loss"] == row["val/beside/loss"]


def test_named_sets_have_rows_of_their_own(one):
    (row,) = [row for row in one.rows() if row["step"] == 4]
    assert row["val/loss"] == row["val/near/loss"] != row["val/far/loss"]
    assert row["val/far/bits_per_byte"] > 0
    summary, log = one.json("status.json")["summary"], (one.folder / "train.log").read_text()
    assert f"| val far loss {summary['final val/far/loss']:>7.4f}" in log
    sources = one.json("run.json")["sources"]
    assert [source["name"] for source in sources] == ["web", "code"]
    assert sum(source["sequences"] for source in sources) == 48
    web, code = (source["sequences"] for source in sources)
    out = " ".join(one.out.split())
    assert f"source web: {web} of 48 sequences ({web / 48:.4g} of them), " in out
    assert f"source code: {code} of 48 sequences ({code / 48:.4g} of them), " in out


def test_a_fork_with_another_validation_reads_on(one, files, monkeypatch):
    """A share is cut from the training documents, so it is another order."""
    monkeypatch.chdir(one.folder.parent)
    fork, new = ["fork.run=run", "fork.step=4"], f"+data.val.new.files={files}/new.jsonl"
    (files / "new.jsonl").write_text((files / "far.jsonl").read_text().replace("far", "new"))
    for more in (["data.val_main=far"], [new, "data.on_bad_record=skip"]):
        parent = planned([*fork, *more]).run.parent
        assert parent.sequences == 24
        assert parent.order == "continue at sequence 24, where the parent was"
    parent = planned([*fork, "data.val.near.share=0.2"]).run.parent
    assert parent.order.startswith("start again at sequence 0: data.val.near.share differs from")


def test_a_fork_with_another_tokenizer_is_refused(one, monkeypatch):
    monkeypatch.chdir(one.folder.parent)
    monkeypatch.setenv("LLMEXP_ALLOW", "own")
    other = ["tokenizer._target_=own.nets.byte_tokens", "+tokenizer.kind=turned"]
    with pytest.raises(ConfigError, match=r"^fork.run=run: its tokenizer \(bytes\) gives other"):
        planned(["fork.run=run", *other])


@pytest.mark.parametrize("step", [2, 4])
def test_a_run_goes_on_inside_a_stage(one, tmp_path, step):
    """The other weights begin with sequence 17, in step 3."""
    goes_on_from(step, one, tmp_path)


def test_a_stage_of_data_that_begins_with_the_end_is_said_never_to_begin(one, monkeypatch):
    monkeypatch.chdir(one.folder.parent)
    first, last = (f"{{from_tokens: {n}, weights: {{web: 1, code: 0}}}}" for n in (1080, 1152))
    fork = ["fork.run=run", "fork.step=4", "train.max_steps=16", f"data.stages=[{first}, {last}]"]
    found = [text for text in planned(fork).run.warnings if "never begins" in text]
    assert [re.findall("data.stages|1,15.", text)[:2] for text in found] == [
        ["data.stages", "1,152"]
    ]


def test_several_tokenizers_compare_by_bits_per_byte(files, tmp_path):
    pytest.importorskip("tokenizers")
    source = ["data=corpus", f"data.sources.web.files={files}/web.jsonl"]
    for size in ("260", "300"):
        ends(tmp_path, "tokenizer", f"--vocab-size={size}", *source)
    out = ends(
        tmp_path, "train", "-m", *TINY, *source, f"data.val.far.files={files}/far.jsonl",
        f"data.val.code.files={files}/code.jsonl", "train.max_tokens=800", "train.log_every=5",
        "tokenizer=file", "tokenizer.path=tokenizers/bpe-260,tokenizers/bpe-300",
        "train.eval_every=10", "hydra.sweep.dir=sweep",
    ).out  # fmt: skip
    answer, bits = " ".join(out.split()), {}
    for run in (tmp_path / "sweep").glob("*/status.json"):
        summary = json.loads(run.read_text())["summary"]
        bits[run.parent.name.partition("bpe-")[2]] = summary["final val/bits_per_byte"]
        facts = json.loads((run.parent / "run.json").read_text())
        assert facts["data_fingerprint"]["tokenizer_sha256"]
    first = re.search(r"one seed each: path=(\S+), val bits/byte", answer)[1]
    assert first.endswith(min(bits, key=bits.get))
    assert "losses per token do not compare" in answer
    shown = ends(tmp_path, "compare", "sweep", "--sort=val/code/bits_per_byte").out
    assert ", val code bits/byte " in " ".join(shown.split())
