"""Runs of wandb that llmexp compares: the real client against a server, and offline folders."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmexp import compare
from llmexp.config.values import ConfigError
from tests.conftest import HANG_S, Result, llmexp
from tests.scaling.planted import LAWS
from tests.tools import printed
from tests.tracker.fake_wandb import FakeRun, FakeWandb
from tests.tracker.test_answer import MARKS
from tests.tracker.test_sync import KEY

LOSSES = {0.1: (3.3, 3.312, 3.304), 0.2: (3.1, 3.111, 3.109), 0.3: (3.105, 3.121, 3.11)}
ALL = [(lr, seed, y) for lr, losses in LOSSES.items() for seed, y in enumerate(losses, 1)]
PROJECT = ("compare", "wandb:someone/p/g/1", "--figure", "val_loss")


def filled(server: FakeWandb) -> None:
    """Three settings and three seeds, each of three rows; an answer, and a run of another group."""
    for lr, seed, loss in ALL:
        config = {"optim": {"value": {"lr": lr}}, "seed": {"value": seed}}
        rows = [
            {"_step": i, "iter": 10 * i, "val_loss": loss + 1.0 - i / 2, "other": 1.0}
            for i in range(3)
        ]
        about = {"displayName": f"r{lr}-{seed}", "groupName": "g/1"}
        last = {"val_loss": loss, "iter": 20, "_step": 2, "text": "x"}
        server.runs[f"{lr}-{seed}"] = FakeRun(about, rows, summary=last, config=config)
    server.runs["answer"] = FakeRun({"jobType": "compare", "groupName": "g/1"})
    server.runs["stray"] = FakeRun({"groupName": "h"}, summary={"val_loss": 1.0})


def environment(where: Path, server: FakeWandb) -> dict[str, str]:
    login = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "HOME": str(where)}
    return login | {"WANDB_MODE": "online", "LLMEXP_CACHE_DIR": str(where / "cache")}


def asked(where: Path, server: FakeWandb, *words: str) -> tuple[Result, Any]:
    """What `llmexp WORDS --json` prints."""
    done = llmexp(*words, "--json", cwd=where, **environment(where, server))
    return done, json.loads(done.out)


def judged(data: dict[str, Any]) -> dict[str, Any]:
    keys = ("mark", "difference", "half", "val_loss")
    return {run["label"]: [run[key] for key in keys] for run in data["runs"]}


def in_a_table(path: Path) -> dict[str, Any]:
    lines = ["run,lr,seed,iter,val_loss"]
    for lr, seed, loss in ALL:
        lines += [f"{lr}-{seed},{lr},{seed},{10 * i},{loss + 1.0 - i / 2}" for i in range(3)]
    path.write_text("\n".join(lines))
    return judged(compare(path).data)


def in_a_process(where: Path, server: FakeWandb, code: str) -> Any:
    """What a program prints that compares runs of the server."""
    begin = "import json, llmexp; from llmexp.compare import projects; "
    env = os.environ | environment(where, server)
    words = [sys.executable, "-c", begin + code]
    done = subprocess.run(words, cwd=where, env=env, capture_output=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_project_is_judged_as_a_table_is_and_read_once(tmp_path: Path) -> None:
    with FakeWandb() as server:
        filled(server)
        first, data = asked(tmp_path, server, *PROJECT)
        assert first.code == 0, first.err
        assert judged(printed("compare", first.out)) == in_a_table(tmp_path / "t.csv")
        before = server.requests
        again, _ = asked(tmp_path, server, *PROJECT)
        assert again.out == first.out
        spent, before = server.requests - before, server.requests
        assert not any(MARKS[0] in r.summary for r in server.runs.values())
        # marks are written back when asked
        done, data = asked(tmp_path, server, *PROJECT, "--answer")
        assert done.code == 0, done.err
        marks = {path.rpartition("/")[2]: r["mark"] for r in data["runs"] for path in r["paths"]}
        assert len(marks) == 9
        for name, mark in marks.items():
            assert server.runs[name].summary[MARKS[0]] == mark
        assert MARKS[0] not in server.runs["stray"].summary
        # one that has changed is read anew, and no other
        server.runs["0.1-1"].heartbeat = "2030-01-02T00:00:00Z"
        server.runs["0.1-1"].rows[-1]["val_loss"] = 3.4
        before = server.requests
        changed, _ = asked(tmp_path, server, *PROJECT)
        assert changed.out != first.out
        assert server.requests - before > spent


def test_runs_come_in_pages_and_as_they_are_chosen(tmp_path: Path) -> None:
    code = "projects._PAGE = 4; print(json.dumps(llmexp.compare('wandb:someone/p/g/1').data))"
    with FakeWandb() as server:
        filled(server)
        data = in_a_process(tmp_path, server, code)
        assert judged(data) == in_a_table(tmp_path / "t.csv")
        assert server.pages == 3  # of ten runs, one of them an answer
        server.runs["0.1-1"].state = server.runs["0.3-1"].state = "crashed"
        for chosen, left in (("config.seed=1", 3), ("config.seed=1,state=finished", 1)):
            _, data = asked(tmp_path, server, *PROJECT, "--filter", chosen)
            assert len(data["runs"]) == left
        for wrong, said in (
            ('{"state": "running"}', "none that --filter takes"),
            ("seed", "is neither KEY=VALUE nor JSON"),
        ):
            _, data = asked(tmp_path, server, *PROJECT, "--filter", wrong)
            assert said in data["error"]["message"]


def test_laws_are_fitted_to_a_project(tmp_path: Path) -> None:
    law = LAWS["hoffmann"]
    with FakeWandb() as server:
        for i, n in enumerate((1e7, 3e7, 1e8, 3e8)):
            for ratio in (5, 20, 80):
                config = {"model": {"value": {"n_params": n}}}
                last = {"val_loss": law.loss(n, n * ratio), "tokens": n * ratio, "_step": 1}
                rows = [{"_step": 0, "val_loss": 9.0, "tokens": n}, last]
                run = FakeRun({"groupName": "g"}, rows, summary=last, config=config)
                server.runs[f"{i}-{ratio}"] = run
        server.runs["0-5"].state = "crashed"
        (one,) = asked(tmp_path, server, "fit", "wandb:someone/p")[1]["ladders"]
    assert (one["runs"], one["left_out"]) == (11, {"failed": ["0-5"]})
    assert one["law"]["alpha"]["value"] == pytest.approx(law.alpha, rel=1e-3)


def test_a_server_that_fails_or_is_gone_ends_in_time_with_words(tmp_path: Path) -> None:
    answers, behaviours = [], ("hangs", "rate limited")
    for behaviour in behaviours:
        with FakeWandb(behaviour) as server:
            filled(server)
            answers.append(asked(tmp_path, server, *PROJECT))
    answers.append(asked(tmp_path, server, *PROJECT))
    for done, data in answers:
        assert done.code == 2
        assert data["error"]["code"] == "network"
        assert "wandb:someone/p/g/1" in data["error"]["message"]


def test_a_server_that_falls_silent_at_the_rows_is_left_in_time(tmp_path: Path) -> None:
    code = """projects.SILENT_S = 3
try:
    llmexp.compare("wandb:someone/p/g/1", figure="val_loss")
except llmexp.ConfigError as error:
    print(json.dumps([error.kind, str(error)]))"""
    with FakeWandb("hangs at rows") as server:
        filled(server)
        kind, text = in_a_process(tmp_path, server, f"exec({code!r})")
    assert kind == "network"
    assert "no answer for 3 s" in text
    assert "wandb/offline-run-*" in text


OFFLINE = """
import sys, wandb
for lr, seed, loss in eval(sys.argv[1]):
    run = wandb.init(mode="offline", project="p", name=f"{lr}-{seed}",
                     config={"optim": {"lr": lr}, "seed": seed})
    for i in range(3):
        run.log({"iter": 10 * i, "val_loss": loss + 1.0 - i / 2, "text": "x" * 20_000})
    run.finish()
"""


def test_offline_folders_are_read_without_a_network(tmp_path: Path) -> None:
    env = os.environ | {"WANDB_SILENT": "true", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    words = [sys.executable, "-c", OFFLINE, repr(ALL)]
    subprocess.run(words, cwd=tmp_path, env=env, check=True, timeout=HANG_S)
    for where in ("wandb", "wandb/offline-run-*"):
        answer = compare(tmp_path / where, figure="val_loss")
        assert judged(answer.data) == in_a_table(tmp_path / "t.csv")
    one = next(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    one.write_bytes(one.read_bytes()[:-3000])  # as a kill leaves it
    assert len(compare(tmp_path / "wandb").comparison.runs) == 9
    one.write_bytes(one.read_bytes()[:25_000])  # after its first row
    runs = compare(tmp_path / "wandb", figure="val_loss").comparison.runs
    assert sorted(r.columns["val_loss"].size for r in runs) == [1, *[3] * 8]
    assert all(r.steps["steps"].size for r in runs if r.columns["val_loss"].size > 1)
    one.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="is not a file of wandb"):
        compare(one.parent)
