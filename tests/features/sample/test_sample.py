"""Text from a model: only of ids that have a meaning, at the length that was trained, and never the
end of a run."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import tiktoken
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from llmexp.__main__ import run as command
from llmexp.data.tokenizers.base import Tokenizer, as_tokenizer
from llmexp.features.sample.forecast import counts
from llmexp.features.sample.train import Sample
from llmexp.folders.naming import named_checkpoint
from llmexp.models.gpt2 import GPT2
from llmexp.train.assembly.opening import _build, open_run
from llmexp.train.sampling import sample
from tests.conftest import train
from tests.tools import composed


class Eager(nn.Module):
    """Likes the ids with the higher numbers; notes the lengths that it was called with."""

    def __init__(self, vocabulary: int = 320) -> None:
        super().__init__()
        self.gain, self.vocabulary = nn.Parameter(torch.ones(())), vocabulary
        self.lengths: list[int] = []

    def forward(self, tokens_bt: Tensor) -> Tensor:
        self.lengths.append(tokens_bt.shape[1])
        return (self.gain * torch.arange(float(self.vocabulary))).expand(*tokens_bt.shape, -1)


def holed(**special: int) -> Tokenizer:
    """Bytes, the pair `ab` with the id 299, and nothing in between, as some published encodings
    have it."""
    ranks = {bytes([b]): b for b in range(256)} | {b"ab": 299}
    given = tiktoken.Encoding(
        name="holed", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens=special
    )
    return as_tokenizer(given)


class Words:
    """A word an id; as sentencepiece's, the first word of a text has no space before it."""

    n_vocab, eot_token, byte_lengths = 4, None, (1, 4, 6, 4)
    words = ("?", "the", "quick", "fox")

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        known = {word: number for number, word in enumerate(self.words)}
        return [[known.get(word, 0) for word in text.split()] for text in texts]

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[i] for i in ids)


def test_what_is_drawn_of_a_tokenizer():
    """Never an id without a meaning, nor without a prompt where no token begins a text; the space
    behind a prompt stays."""
    encoding = holed(**{"<|endoftext|>": 280, "<|other|>": 310})
    drawn = [
        sample(encoding, Eager(), 12, "fp32", "", 60, temperature=heat, top_k=None)
        for heat in (0.0, 30.0)
    ]
    assert drawn[0] == "<|other|>" * 60
    assert drawn[1]
    with pytest.raises(ValueError, match=r"tokenizer: holed has no <\|endoftext\|> .* --prompt"):
        sample(holed(), Eager(), 12, "fp32", "", 5)
    assert sample(holed(), Eager(), 12, "fp32", "a", 3, temperature=0) == "aababab"
    found = sample(as_tokenizer(Words()), Eager(4), 12, "fp32", "the  quick", 2, temperature=0)
    assert found == "the  quick fox fox"


def looped(encoding: Tokenizer, model: nn.Module, said: list[str], *, sharded: bool = False) -> Any:
    run = SimpleNamespace(sequence_length=12, max_position_embeddings=32, parameters=64)
    corpus = SimpleNamespace(is_text=False)
    parts = SimpleNamespace(document_end=None, precision="fp32", tokenizer=encoding, corpus=corpus)
    setup = SimpleNamespace(loss=model, model=model, module=model, optimizers=[])
    mesh, console = SimpleNamespace(sharded=sharded, distributed=False), SimpleNamespace()
    console.line = said.append
    out = {"main": True, "console": console}
    made = Sample(SimpleNamespace(sample_every=1, sample_tokens=20))  # type: ignore[arg-type]
    made.loop = SimpleNamespace(setup=setup, parts=parts, run=run, mesh=mesh, **out)  # type: ignore[assignment]
    return made


def test_in_mid_run_a_sample_is_as_long_as_the_sequences_and_ends_no_run():
    said: list[str] = []
    model, whole = Eager(), holed(**{"<|endoftext|>": 280})
    looped(whole, model, said).act()
    assert max(model.lengths) == 12 < len(model.lengths)
    assert said.pop().startswith("sample: ab")
    for sharded in (False, True):
        looped(holed(), model, said, sharded=sharded).act()
        assert said.pop().startswith("sample: none: ConfigError")
    broken = nn.Linear(2, 2)
    looped(whole, broken, said).act()
    assert said.pop().startswith("sample: none: ")
    with pytest.raises(RuntimeError):  # another rank may be in its part of the same pass
        looped(whole, broken, said, sharded=True).act()


@pytest.mark.parametrize("every", [None, 1, 3, 4, 9])
@pytest.mark.parametrize(("first", "steps"), [(0, 1), (0, 8), (3, 8), (5, 9)])
def test_a_plan_counts_what_the_loop_writes(first, steps, every):
    """That at the end is no part of it."""
    chosen: Any = SimpleNamespace(sample_every=every, sample_tokens=5)

    def times(n: int | None) -> int:
        return steps // n - first // n if n else 0

    found = counts(SimpleNamespace(train=chosen), times, lambda n: bool(n) and steps % n == 0)
    written = [s for s in range(first + 1, steps + 1) if Sample(chosen).due(s, s == steps)]
    assert found == {"sample": len(written)}


@pytest.mark.parametrize(
    ("files", "begins"),
    [
        (["train_files=one.txt", "val_ratio=0.5"], "the second half"),
        (["train_files=one.txt", "val_files=other.txt"], "Another text stands"),
        (["train_files=[one.txt,other.txt]", "val_files=other.txt"], ""),
    ],
)
def test_a_sample_begins_with_what_was_trained(tmp_path, files, begins):
    """The token between two documents is not in a corpus of one document."""
    first = "First come these words. " * 20
    (tmp_path / "one.txt").write_text(first + "the second half is left. ".ljust(len(first), "x"))
    (tmp_path / "other.txt").write_text("Another text stands in this file. " * 20)
    more = ["train.max_steps=1", "train.sample_tokens=3"]
    done = train(tmp_path, "run", "data=text", *(f"data.{f}" for f in files), *more)
    (line,) = [line for line in done.out.splitlines() if line.startswith("sample")]
    text = line.removeprefix("sample").strip()
    assert text.startswith(begins)
    assert begins or not text.startswith(("the second", "Another"))


def test_a_run_whose_tokenizer_has_no_end_ends_well_and_the_command_says_what_it_needs(
    runs, monkeypatch, capsys
):
    mine = ["tokenizer._target_=own.nets.byte_tokens", "+tokenizer.kind=endless", "--allow=own"]
    data = ["data=synthetic", "data.n_tokens=4000", "train.max_steps=2", "train.sample_every=1"]
    done = runs(*mine, *data, "train.sample_tokens=5")
    assert done.out.count("sample: none: ConfigError") == 1
    monkeypatch.setenv("LLMEXP_ALLOW", "own")
    assert command(["sample", str(done.folder)]) == 2
    assert "bytes of mine has no <|endoftext|> token to begin with" in capsys.readouterr().err
    lengths: list[int] = []

    def noted(*given: Any, **knobs: Any) -> str:
        lengths.append(given[2])
        return sample(*given, **knobs)

    monkeypatch.setattr("llmexp.train.sampling.sample", noted)
    assert command(["sample", str(done.folder), "--prompt", "x", "--tokens", "15"]) == 0
    assert set(lengths) == {12}


def test_a_named_step_is_opened(runs, tmp_path, monkeypatch, capsys):
    """One that is not there is refused: tests/refusals/train.yaml."""
    data = ["data=synthetic", "data.n_tokens=4000", "train.max_steps=4", "checkpoint.every=2"]
    made = runs.copy(tmp_path / "odd@name", *data, "optimizer.lr=0.1")
    monkeypatch.chdir(tmp_path)
    texts = []
    for run in ("odd@name@2", "odd@name@4", "odd@name", "odd@name@0000000004"):
        opened = open_run(*named_checkpoint(run))
        assert opened.step == (2 if run.endswith("2") else 4)
        saved = load_file(made.checkpoint(opened.step) / "model.safetensors")
        for key, tensor in opened.model.state_dict().items():
            assert torch.equal(tensor, saved[key]), key
        assert command(["sample", run, "--prompt", "a", "--tokens", "20"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1] == texts[2] == texts[3]
    # what is not read is not looked at
    (made.checkpoint(2) / "optimizer.safetensors").write_bytes(b"")
    assert command(["sample", "odd@name@2", "--prompt", "a"]) == 0


class Scaled(GPT2):
    """GPT2 with what a checkpoint does not restore: a buffer, and a parameter that is another."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.register_buffer("scale", torch.full((16,), 0.5), persistent=False)
        self.again = nn.Linear(16, 320, bias=False)
        self.again.weight = self.token_embedding.weight

    def hidden(self, tokens_bt: Tensor) -> Tensor:
        return super().hidden(tokens_bt) * self.scale


def test_a_subclass_of_our_model_is_opened_as_it_builds_itself(monkeypatch):
    monkeypatch.setenv("LLMEXP_ALLOW", "tests")
    sizes = {"max_position_embeddings": 12, "n_layers": 1, "n_heads": 2, "d_model": 16, "d_ff": 24}
    section = {"_target_": f"{__name__}.Scaled", "vocab_size": 320} | sizes
    config = dataclasses.replace(composed("precision=fp32"), model=section)
    model: Any = _build(config)[1]
    assert model.scale.tolist() == [0.5] * 16
    assert model.again.weight is model.token_embedding.weight
