"""What is refused has a code for programs, wherever it is refused."""

from __future__ import annotations

import pytest

import llmexp as program
from llmexp.__main__ import run as command
from tests.conftest import TINY, llmexp
from tests.tools import printed

pytestmark = pytest.mark.usefixtures("suggestions_are_read")

SPLIT = ["batch.real_batch_size=7", "batch.micro_batch_size=2"]
NO_FILE = ["data=text", "data.train_files=nope"]


@pytest.mark.parametrize(
    ("words", "code", "key"),
    [
        (["plan", "optimizer.lr=-1"], "E-CONVERT-CHECK_RANGE", "optimizer.lr"),
        (["plan", *SPLIT], "E-BATCH-DIVIDE", "batch.real_batch_size"),
        (["plan", "-m", "train.max_steps=1,2", "a.b"], "E-COMMAND_LINE-CHECK_OVERRIDES", None),
        (["plan", "batch={max_steps: 3}"], "E-ERRORS-USER_ERRORS", "batch.max_steps"),
        (["explain", "train.sed"], "E-EXPLAIN-OF_NO_KNOB", "train.sed"),
        (["train", "optimizer.lr=x"], "E-CONVERT-SCALAR", "optimizer.lr"),
        (["plan", "model=hf"], "E-HF-CONFIG", "model.path"),
        (["compare", "nothing-here"], "E-COMPARE-MAIN", None),
        (["compare", "--bogus"], "E-VALUES-ERROR", None),
        (["next", "nothing-here"], "E-NEXT-PROPOSED", None),
        (["bogus"], "E-MAIN-DISPATCH", None),
    ],
)
@pytest.mark.usefixtures("forking")
def test_a_refusal_is_an_object_with_code_message_and_key(words, code, key, capfd):
    assert command([*words, "--json"]) == 2
    out, err = capfd.readouterr()
    error = printed("error", out)["error"]
    assert (error["code"], error["key"]) == (code, key)
    assert f"llmexp: {error['message']}\n" in err


@pytest.mark.usefixtures("forking")
def test_so_is_one_of_the_process_that_trains(tmp_path):
    done = llmexp("train", "--json", *TINY, *NO_FILE, cwd=tmp_path)
    assert done.code == 2
    assert printed("error", done.out)["error"]["code"] == "E-MATCHING-MATCH_FILES"
    assert done.err.count("no file matches") == 1
    with pytest.raises(program.ConfigError, match="no file matches") as refused:
        program.train([*TINY, *NO_FILE], quiet=True)
    assert (refused.value.code, refused.value.key) == ("E-MATCHING-MATCH_FILES", "data.train_files")
