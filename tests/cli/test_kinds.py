"""What is refused has a kind for programs, wherever it is refused."""

import pytest

import llmexp as program
from llmexp.__main__ import run as command
from tests.conftest import TINY, llmexp
from tests.tools import printed

pytestmark = pytest.mark.usefixtures("suggestions_are_read")

NO_FILE = ["data=text", "data.train_files=nope"]


@pytest.mark.parametrize(
    ("words", "kind", "key"),
    [
        (["plan", "optimizer.lr=-1"], "out_of_range", "optimizer.lr"),
        (["plan", "-m", "train.max_steps=1,2", "a.b"], "wrong_type", None),
        (["plan", "train.sed=1"], "unknown_key", "train.sed"),
        (["compare", "nothing-here"], "not_a_run", None),
        (["bogus"], "unknown_key", None),
    ],
)
@pytest.mark.usefixtures("forking")
def test_a_refusal_is_an_object_with_its_kind_message_and_key(words, kind, key, capfd):
    assert command([*words, "--json"]) == 2
    out, err = capfd.readouterr()
    error = printed("error", out)["error"]
    assert (error["code"], error["key"]) == (kind, key)
    assert f"llmexp: {error['message']}\n" in err


@pytest.mark.usefixtures("forking")
def test_so_is_one_of_the_process_that_trains(tmp_path):
    done = llmexp("train", "--json", *TINY, *NO_FILE, cwd=tmp_path)
    assert done.code == 2
    assert printed("error", done.out)["error"]["code"] == "unknown_file"
    assert done.err.count("no file matches") == 1
    with pytest.raises(program.ConfigError, match="no file matches") as refused:
        program.train([*TINY, *NO_FILE], quiet=True)
    assert (refused.value.kind, refused.value.key) == ("unknown_file", "data.train_files")
