import shutil
import socket
import threading
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from llmexp.data.tokenizers import tiktoken as published
from llmexp.data.tokenizers.base import Tokenizer, as_tokenizer
from llmexp.data.tokenizers.bytes import byte_level

from .common import SHARED


@given(text=st.text())
def test_a_byte_is_its_id_and_there_is_an_end_of_text(text: str) -> None:
    encoding = byte_level()
    assert encoding.encode_ordinary(text) == list(text.encode())
    assert encoding.decode(list(text.encode())) == text
    assert (encoding.n_vocab, encoding.eot_token) == (257, 256)
    assert encoding.encode("a<|endoftext|>", allowed_special="all") == [97, 256]
    assert encoding.is_byte_level


def test_byte_lengths_are_those_of_the_tokens(bpe: Tokenizer) -> None:
    lengths = bpe.byte_lengths
    assert lengths.shape == (bpe.n_vocab,)
    special = {bpe.encode_single_token(s) for s in bpe.special_tokens_set}
    for i in range(bpe.n_vocab):
        try:
            expected = 0 if i in special else len(bpe.decode_single_token_bytes(i))
        except KeyError:  # an id without a meaning
            expected = 0
        assert lengths[i] == expected
    assert not bpe.is_byte_level
    text = "Ünïcode, and more: 字\n"
    assert lengths[bpe.encode_ordinary(text)].sum() == len(text.encode())
    assert byte_level().byte_lengths.tolist() == [1] * 256 + [0]


def test_the_identity_sees_all_that_decides() -> None:
    ranks = {b"a": 0, b"b": 1}
    base = {"pat_str": "a|b", "mergeable_ranks": ranks, "special_tokens": {"<e>": 2}}
    seen = {
        as_tokenizer(tiktoken.Encoding(name, **{**base, **change})).identity
        for name, change in (
            ("x", {}), ("y", {}), ("x", {"pat_str": "b|a"}), ("x", {"special_tokens": {"<f>": 2}}),
            ("x", {"mergeable_ranks": {b"a": 1, b"b": 0}}),
            ("x", {"mergeable_ranks": {b"a": 0, b"c": 1}}),
        )
    }  # fmt: skip
    assert len(seen) == 5  # a new name alone changes nothing


def test_documents_need_an_end_of_text() -> None:
    encoding = tiktoken.Encoding("x", pat_str=".", mergeable_ranks={b"a": 0}, special_tokens={})
    with pytest.raises(ValueError, match=r"x has no end-of-text token, .*; add <\|endoftext\|>"):
        as_tokenizer(encoding).end_of_text()


class Padding:
    """Bytes, padded with 257 to the longest text of a call and to `least` ids; cut after `most`."""

    n_vocab, eot_token, byte_lengths = 258, 256, [1] * 256 + [0, 0]

    def __init__(self, least: int = 0, most: int = 1 << 30) -> None:
        self.least, self.most = least, most

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        ids = [list(text.encode())[: self.most] for text in texts]
        width = max([self.least, *map(len, ids)])
        return [one + [257] * (width - len(one)) for one in ids]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def test_pads_of_a_library_get_into_no_document() -> None:
    texts = ["a", "abcdefgh", ""]
    found = as_tokenizer(Padding()).encode_all(texts)
    assert [ids.tolist() for ids in found] == [list(text.encode()) for text in texts]
    for alone in (Padding(least=512), Padding(most=512)):
        with pytest.raises(ValueError, match=r"Padding\.encode_batch .* pads .* no_padding\(\)"):
            as_tokenizer(alone)


@pytest.fixture
def _nothing_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.mark.usefixtures("_nothing_cached")
@pytest.mark.parametrize("damaged", [False, True])
def test_a_network_that_refuses_is_a_clear_error(tmp_path, monkeypatch, damaged):
    if damaged and not (SHARED / "tiktoken").is_dir():
        pytest.skip("the tokenizer files are not there")
    if damaged:  # what is cached is not whole
        shutil.copytree(SHARED / "tiktoken", tmp_path, dirs_exist_ok=True)
    for file in tmp_path.iterdir():
        file.chmod(0o644)
        file.write_bytes(file.read_bytes()[:-1])

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("name resolution failed")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(ValueError, match=r"TIKTOKEN_CACHE_DIR.*tokenizer=bytes"):
        published.pretrained("gpt2")


@pytest.mark.usefixtures("_nothing_cached")
def test_a_network_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def silent(*args: object, **kwargs: object) -> None:
        over.wait(30)
        raise OSError("over")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    with pytest.raises(ValueError, match=r"within 0\.5 s.*TIKTOKEN_CACHE_DIR.*tokenizer=bytes"):
        published.pretrained("r50k_base", download_timeout_s=0.5)
    over.set()
