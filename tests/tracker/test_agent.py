"""wandb's variables and wandb's agent, from the command line: the real client, against a server
that records."""

import json
import re
import subprocess
import sys

import yaml

from llmexp.tracker.fields import read_position
from tests.conftest import HANG_S, ROOT, environment
from tests.tracker.fake_wandb import FakeWandb
from tests.tracker.made import QUICK, llmexp, login


def test_the_run_on_record_is_the_agents_and_sync_makes_no_twin(tmp_path):
    """`wandb agent` as it is, on the sweep file of the docs; the config asks for another
    project."""
    text = (ROOT / "docs/tracking.md").read_text()
    (found,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    sweep = yaml.safe_load(found)
    at = sweep["command"].index("${args_no_hyphens}")
    words = [w for w in sweep["command"][2:at] if not w.startswith("train.max_tokens")]
    # One point: each takes its time.
    sweep["parameters"]["optimizer.lr"]["values"] = [0.003]
    sweep["parameters"]["batch.gradient_accumulation_steps"]["values"] = [2]
    llmexp_train = [sys.executable, "-m", "llmexp", "train", *QUICK, "tracker.project=mine"]
    sweep["command"] = [*llmexp_train, *words, *sweep["command"][at:]]
    with FakeWandb(sweep=sweep) as server:
        env = {"WANDB_MODE": "online", "HOME": str(tmp_path)} | login(server.url)
        agent = [sys.executable, "-m", "wandb", "agent", "someone/theirs/sweep1"]
        done = subprocess.run(
            agent, env=environment(PYTHONPATH=str(ROOT), **env), cwd=tmp_path,
            capture_output=True, text=True, timeout=HANG_S,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert "tracker.project=mine is not used" in said, said
        assert list(server.runs) == ["agent001"], said
        (run,) = (tmp_path / "outputs" / "agent").iterdir()
        assert run.name == "agent001"
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert config["optimizer"]["lr"] == 0.003
        assert config["batch"]["gradient_accumulation_steps"] == 2
        assert config["tracker"]["project"] == "theirs"
        assert server.run.variables["project"] == "theirs"
        assert server.run.variables.get("sweep") == "sweep1"
        assert [row["step"] for row in server.run.rows] == [1, 2, 3]
        position = read_position(run)
        assert position is not None
        assert (position.run_id, position.sweep) == ("agent001", "sweep1")
        assert (position.project, position.entity) == ("theirs", "someone")
        assert position.uploaded is not None
        assert not (run.parent / "wandb").exists()

        # The rows never arrived; they are sent from another shell, which has a sweep and
        # a name of its own.
        server.run.rows.clear()
        server.run.summary.clear()
        saved = json.loads((run / "tracker.json").read_text())
        del saved["uploaded"]
        (run / "tracker.json").write_text(json.dumps(saved))
        names = ("WANDB_PROJECT", "WANDB_NAME", "WANDB_SWEEP_ID", "WANDB_RUN_ID")
        result = llmexp(tmp_path, server, "sync", run, **dict.fromkeys(names, "other"))
        assert result.code == 0, result.err
        assert "WANDB_RUN_ID, WANDB_SWEEP_ID, WANDB_NAME: not used here" in result.out
        assert "3 of 3 rows sent" in result.out
        assert server.run.variables["project"] == "theirs"
        assert len(server.run.rows) == 3


def test_the_variables_name_a_run_and_are_written_down(tmp_path):
    """Then a run with WANDB_MODE=disabled leaves nothing."""
    env = {
        "WANDB_PROJECT": "theirs", "WANDB_NAME": "a name", "WANDB_RUN_GROUP": "a group",
        "WANDB_NOTES": "why", "WANDB_TAGS": "one,two", "WANDB_RUN_ID": "Run_7",
        "WANDB_JOB_TYPE": "try", "WANDB_DIR": str(tmp_path / "w"),
    }  # fmt: skip
    (tmp_path / "w").mkdir()
    mine = ["hydra.run.dir=run", "tracker.tags=[mine]"]
    with FakeWandb() as server:
        result = llmexp(tmp_path, server, "train", *QUICK, *mine, **env)
        assert result.code == 0, result.err
        assert "wandb: WANDB_TAGS=one,two is not used" in result.out
        assert list(server.runs) == ["Run_7"]
        named = {"project": "theirs", "notes": "why", "tags": ["mine"]}
        there = {"displayName": "a name", "groupName": "a group", "jobType": "try"}
        assert (named | there).items() <= server.run.variables.items()
        tracker = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["tracker"]
        assert (named | {"name": "a name", "group": "a group"}).items() <= tracker.items()
        assert not (tmp_path / "run" / "wandb").exists()
        assert list((tmp_path / "w" / "wandb").iterdir())

        off = llmexp(tmp_path, server, "train", *QUICK, "hydra.run.dir=off", WANDB_MODE="disabled")
    assert (off.code, "wandb" in off.out + off.err) == (0, False)
    left = {path.name for path in (tmp_path / "off").iterdir()}
    assert {"config.yaml", "metrics.jsonl"} < left
    assert not {"wandb", "tracker.json", ".wandb-temporary"} & left
    assert list(server.runs) == ["Run_7"]


def test_without_a_login_wandb_is_not_started_and_sync_sends_it_later(tmp_path):
    """A file of wandb's settings that names no key is no login."""
    nobody = {"WANDB_MODE": "", "NETRC": "", "WANDB_CONFIG_DIR": str(tmp_path)}
    (tmp_path / "settings").write_text("[default]\nentity = someone\n")
    done = llmexp(tmp_path, None, "train", *QUICK, "hydra.run.dir=run", **nobody)
    assert done.code == 0, done.err
    assert "llmexp sync run\n" in done.out
    assert not {"wandb", ".wandb-temporary"} & {path.name for path in (tmp_path / "run").iterdir()}
    with FakeWandb() as server:
        later = llmexp(tmp_path, server, "sync", "run")
    assert later.code == 0, later.err
    assert len(server.run.rows) == 3
