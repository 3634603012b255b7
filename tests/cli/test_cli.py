"""The command line as users drive it: help, completion, folders, sweeps, signals, closed streams.

What is refused is in tests/refusals/cli.yaml.
"""

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from llmexp.__main__ import COMMANDS, run
from llmexp.system.workers import start_worker
from llmexp.tasks import make
from tests import suggestions
from tests.conftest import HANG_S, ROOT, TINY, environment, llmexp, start
from tests.tools import run_here, session, wait_for

RUN = [*TINY, "data=synthetic", "data.n_tokens=5000", "train.max_steps=3", "train.log_every=1",
       "checkpoint.every=null"]  # fmt: skip


def shell(text: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What bash does with a line, in which LLMEXP stands for the command."""
    line = text.replace("LLMEXP", f"{sys.executable} -m llmexp")
    env = environment(PYTHONPATH=str(ROOT))
    return subprocess.run(["bash", "-c", line], cwd=cwd, env=env, capture_output=True, text=True)


def experiments(folder: Path, **files: str) -> None:
    """Write files conf/experiment/NAME.yaml."""
    (folder / "conf" / "experiment").mkdir(parents=True)
    for name, text in files.items():
        path = folder / "conf" / "experiment" / f"{name}.yaml"
        path.write_text(f"# @package _global_\n{text}\n")


# --- what is printed


@pytest.mark.parametrize("columns", [60, 100])
def test_help_is_grouped_and_fits(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(["train", "--help"]) == 0
    text = capsys.readouterr().out
    usage, _, rest = re.split("EXAMPLES|KNOBS", text)
    assert max(map(len, (usage + rest).splitlines())) <= columns
    for part in ("GROUPS", "llama_100m", "FLAGS", "--allow", "hydra.run.dir"):
        assert part in rest
    if columns == 100:  # what is needed first stands on the first screen
        assert len(text.partition("FLAGS")[0].splitlines()) <= 30
    # Every knob has its text, beside or below it.
    for knob in ("train.max_steps", "optimizer.lr", "model.d_model", "data.train_files"):
        assert re.search(rf"^  {re.escape(knob)}(  +\S|\n      \S)", text, re.M), knob


@pytest.mark.parametrize("command", ["train", "plan", "prepare", "explain", "verify", "tokenizer"])
def test_help_offers_what_the_command_takes(capsys, command):
    with contextlib.suppress(SystemExit):
        assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "--config-dir DIR" in text
    assert ("--multirun" in text) == (command in ("train", "plan"))
    examples = text.partition("EXAMPLES\n")[2].partition("\n\n")[0].splitlines()
    for words in map(shlex.split, examples):
        assert words[:2] == ["llmexp", command]
        suggestions.read(words[1:])
    assert sum(" -m " in line for line in examples) == ("--multirun" in text)


@pytest.mark.parametrize("command", [*COMMANDS, "verify data", "tasks.make"])
def test_a_wrong_flag_is_refused_in_one_line(capsys, command):
    main, words = (make.main, []) if command == "tasks.make" else (run, command.split())
    assert main([*words, "--no-such-flag", "a", "b"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("llmexp: ")) == ("", 1, True)
    assert "--help" in err or "--no-such-flag" in err


def test_cfg_and_info(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def shown(*arguments: str) -> str:
        done = run_here(capfd, *arguments)
        assert done.code == 0, done.err
        return done.out

    # flags between overrides
    job = yaml.safe_load(shown("train", "model.n_layers=7", "--cfg", "job", "--resolve", "name=a"))
    assert (job["model"]["n_layers"], job["name"], "hydra" in job) == (7, "a", False)
    points = shown("train", "-m", "--cfg", "job", "train.seed=1,2").split("# train.seed=")[1:]
    assert [yaml.safe_load(p.partition("\n")[2])["train"]["seed"] for p in points] == [1, 2]
    for words, text in {
        "train --cfg hydra": "outputs/${name}/",
        "train --info defaults": "model/gpt_tiny",
        "train --info": "LocalLauncher",
        "prepare --cfg job model.n_layers=7": "n_layers: 7",
        "plan --hydra-help": "--multirun",
    }.items():
        out = shown(*words.split())
        assert text in out
        assert "--config-name" not in out  # it is refused
    assert list(tmp_path.iterdir()) == []


def test_json_of_an_error_into_a_full_disk(monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys.stdout, "write", full)
    assert run(["train", "wrong=1", "--json"]) == 2
    assert capsys.readouterr().err.startswith("llmexp: wrong: ")


COMPLETIONS = {
    "llmexp ": {*COMMANDS},
    "llmexp train mod": {"model.", "model="},
    "llmexp train model=gpt2": {f"model=gpt2_{s}" for s in ("large", "medium", "small", "xl")},
    "llmexp train train.max_": {
        f"train.max_{key}=" for key in ("consecutive_skips", "epochs", "flops", "steps", "tokens")
    },
    "llmexp plan -m model=gpt_tiny model.n_l": {"model.n_layers="},
    "llmexp train --config-dir own model=min": {"model=mine"},
}


@pytest.fixture
def own_option(tmp_path, monkeypatch) -> Path:
    """A folder to be in, with an option model=mine in own/."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "model").mkdir(parents=True)
    shutil.copy(ROOT / "conf" / "model" / "gpt_tiny.yaml", tmp_path / "own" / "model" / "mine.yaml")
    return tmp_path


def test_completions(own_option, capsys, monkeypatch):
    for line, expected in COMPLETIONS.items():
        monkeypatch.setenv("COMP_LINE", line)
        monkeypatch.setenv("COMP_POINT", str(len(line)))
        assert run(["-sc", "query=bash"]) == 0
        assert set(capsys.readouterr().out.split()) == expected, line
    monkeypatch.setattr(sys, "argv", ["/bin/llmexp"])
    for other in ("zsh", "fish"):
        assert run(["-sc", f"install={other}"]) == 0
        assert "llmexp" in capsys.readouterr().out


def test_bash_completion(own_option):
    """In a real bash, with the function that the install command defines."""
    binary = own_option / "llmexp"
    binary.write_text(f"#!{sys.executable}\nfrom llmexp.__main__ import main\nmain()\n")
    binary.chmod(0o755)
    script = ["PATH=.:$PATH", 'eval "$(llmexp -sc install=bash)"']
    script.append("complete -p llmexp >/dev/null || exit 9")
    lines = [*COMPLETIONS][::5]
    for line in lines:
        words = line.split(" ")
        at = f"COMP_LINE='{line}' COMP_POINT={len(line)} COMP_CWORD={len(words) - 1}"
        script.append(f"{at} COMP_WORDS=({' '.join(map(repr, words))}) COMPREPLY=()")
        script.append("hydra_bash_completion; echo ${COMPREPLY[*]}")
    done = shell("\n".join(script), own_option)
    assert (done.returncode, done.stderr) == (0, "")
    answers = done.stdout.removesuffix("\n").split("\n")
    assert [set(answer.split()) for answer in answers] == [COMPLETIONS[line] for line in lines]


ASCII = [
    {"PYTHONIOENCODING": "ascii"},
    pytest.param(
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, marks=pytest.mark.slow
    ),
]


@pytest.mark.fresh
@pytest.mark.parametrize("env", ASCII, ids=["streams", "locale"])
def test_what_a_terminal_cannot_show_ends_nothing(tmp_path, env):
    """The stream shows other characters in its place; files keep it."""
    where = [*RUN, 'name="größe"', 'hydra.run.dir="ö"', 'tracker.notes="ñandú"']
    done = llmexp("train", *where, cwd=tmp_path, **env)
    assert done.code == 0, done.err
    assert done.out.isascii()
    log = (tmp_path / "ö" / "train.log").read_text(encoding="utf-8")
    # Python itself knows the name by its bytes in the other locale
    assert "PYTHONUTF8" in env or "folder      ö" in log
    refused = llmexp("explain", "name", 'name="../größe"', cwd=tmp_path, **env)
    assert (refused.code, "one folder name" in refused.err) == (2, True)


# --- folders


def test_plan_prints_the_banner_of_the_run(tmp_path, capsys, monkeypatch):
    """And three runs that start in the same second get three folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    experiments(tmp_path, stamp="name: stamp\nhydra: {run: {dir: outputs/stamp/now}}")
    given = [*RUN, "--config-dir=conf", "experiment=stamp"]
    assert run(["plan", *given]) == 0
    planned = capsys.readouterr().out.partition("\nmemory ")[0].strip()
    processes = [start("train", *given, cwd=tmp_path) for _ in range(3)]
    outs = [p.communicate(timeout=HANG_S) for p in processes]
    assert [p.returncode for p in processes] == [0] * 3, outs
    names = ["now", "now-2", "now-3"]
    assert sorted(p.name for p in (tmp_path / "outputs" / "stamp").iterdir()) == names
    assert all(planned in out for out, _ in outs)


def test_the_user_chooses_the_folder_and_may_close_what_is_printed(tmp_path):
    """Spaces, other scripts, nesting, absolute; closed streams; a pipe that ends early, also of a
    sweep, where the parent prints too, and of what only prints."""
    name = "a b/wörk 数/run"
    result = llmexp("train", *RUN, f"hydra.run.dir='{tmp_path / name}'", cwd=tmp_path)
    assert result.code == 0, result.err
    assert [p.name for p in tmp_path.iterdir()] == ["a b"]
    train = f"LLMEXP train {' '.join(RUN)}"
    assert shell(f"{train} hydra.run.dir=closed <&- >&- 2>&-", tmp_path).returncode == 0
    for extra in ("hydra.run.dir=one", "-m train.seed=1 hydra.sweep.dir=two", "--info"):
        done = shell(f"{train} {extra} | head -1; exit ${{PIPESTATUS[0]}}", tmp_path)
        assert "Traceback" not in done.stderr
        assert done.returncode == 0 or extra == "--info", done.stderr
    for path in (name, "closed", "one", "two/0-run"):
        assert json.loads((tmp_path / path / "status.json").read_text())["state"] == "finished"
        assert len((tmp_path / path / "metrics.jsonl").read_text().splitlines()) == 3


# --- sweeps


def test_failing_points_touch_no_other(tmp_path):
    """One raises, one leaves without an error, one is killed: the point after them still runs."""
    hook = ["--allow", "own", "hooks=[own.points.by_size]", "batch.micro_batch_size=1,2,3,4"]
    result = llmexp("train", "-m", *RUN, *hook, "name=fails", cwd=tmp_path)
    assert result.code == 1, result.err
    (folder,) = (tmp_path / "outputs" / "fails").iterdir()
    names = [f"{n}-micro_batch_size_{n + 1}" for n in range(4)]
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == names
    *failed, finished = (json.loads((folder / name / "status.json").read_text()) for name in names)
    reasons = ("at step_end of step 2: RuntimeError('boom", "exit code 7", "SIGKILL")
    for status, reason in zip(failed, reasons, strict=True):
        assert (status["state"], status["exit_code"]) == ("failed", 3)
        assert reason in status["error"]
        assert reason in result.out
    assert finished["state"] == "finished"
    record = json.loads((folder / names[3] / "run.json").read_text())
    assert record["label"] == "micro_batch_size_4"
    assert record["group"].endswith(folder.name)
    # The output in the order in which it happened, a table at the end, and each whole reason twice.
    texts = [*(f"{n} micro={n + 1}  running" for n in range(4)), "\nOnly setting: micro=4, "]
    places = [result.out.index(text) for text in texts]
    assert places == sorted(places)
    rows = [row.split() for row in result.out[places[-1] :].splitlines()]
    assert [row[0] for row in rows if row[1:2] == ["failed"]] == ["1", "2", "3"]
    loss = finished["summary"]["final val/loss"]
    assert ["4", f"{loss:#.5g}"] in [row[:2] for row in rows]
    assert result.out.count("the last one") == 2


def test_a_sweep_in_a_file_and_a_chosen_subdir(tmp_path):
    """hydra.mode and hydra.sweeper.params in the user's experiment; a second start is refused
    before it writes."""
    sweep = "{mode: MULTIRUN, sweeper: {params: {train.seed: '1,2'}}}"
    experiments(tmp_path, grid=f"hydra: {sweep}")
    where = ["hydra.sweep.dir=grid", "hydra.sweep.subdir='s ${train.seed}/é'"]
    command = [*RUN, "train.max_steps=1", "--config-dir", "conf", "experiment=grid", *where]
    result = llmexp("train", *command, cwd=tmp_path)
    assert result.code == 0, result.err
    grid = tmp_path / "grid"
    found = {str(p.parent.relative_to(grid)) for p in grid.rglob("status.json")}
    assert found == {"s 1/é", "s 2/é"}
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    refused = llmexp("train", *command, cwd=tmp_path)
    assert (refused.code, "holds a sweep already" in refused.err) == (2, True)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_a_budget_on_the_command_line_replaces_that_of_a_file(capfd, tmp_path, monkeypatch):
    """In an experiment's section, and in its hydra.sweeper.params."""
    monkeypatch.chdir(tmp_path)
    sweep = "hydra: {sweeper: {params: {train.max_steps: '5,6', train.seed: '1,2'}}}"
    one = "train: {max_tokens: 2400}"
    experiments(tmp_path, one=one, swept=f"{one}\n{sweep}")
    base = [o for o in RUN if not o.startswith("train.max")] + ["--config-dir=conf"]

    def plan(*arguments: str) -> str:
        done = run_here(capfd, "plan", *base, *arguments)
        assert done.code == 0, done.err
        return done.out

    assert "budget      25 steps" in plan("experiment=one")
    assert "max_tokens: null" in plan("experiment=one", "train.max_steps=7", "--cfg", "job")
    both = ["experiment=one", "train.max_steps=7", "train.max_epochs=1"]
    assert run_here(capfd, "plan", *base, *both).code == 2

    def steps(*arguments: str) -> list[str]:
        head, *rows = [line.split() for line in plan("-m", *arguments).splitlines() if line]
        points = [row for row in rows if row[0].isdigit() and not row[1].startswith("run")]
        return [row[1 + head.index("steps")] for row in points]  # the numbers have no head

    assert steps("experiment=one", "train.max_steps=7,8") == ["7", "8"]
    assert steps("experiment=swept", "train.max_tokens=960") == ["10", "10"]
    assert steps("experiment=swept", "train.max_steps=9") == ["9", "9"]


def test_plan_of_a_sweep_has_a_row_a_point(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grid = ["batch.real_batch_size=12", "batch.micro_batch_size=null",
            "batch.gradient_accumulation_steps=1,3,5"]  # fmt: skip
    done = run_here(capfd, "plan", "-m", *RUN, *grid)
    assert done.code == 2
    header, *rows = [line.split() for line in done.out.splitlines()]
    assert header == ["accum", "micro", "steps", "tokens"]
    assert [row[:4] for row in rows[:2]] == [["0", "1", "12", "3"], ["1", "3", "4", "3"]]
    assert rows[2][:2] == ["2", "runs;"]
    assert "2-gradient_accumulation_steps_5: batch.real_batch_size=12" in done.err
    assert list(tmp_path.iterdir()) == []


# --- signals


def test_a_run_that_dies_at_its_farewell_has_finished(tmp_path):
    picture = ["metrics.picture=true", "hooks=[own.farewell.hook]", "--allow", "own"]
    done = llmexp("train", *RUN, *picture, "hydra.run.dir=run", cwd=tmp_path)
    status = done.json("status.json")
    ended = (done.code, status["state"], status["exit_code"], status["error"])
    assert ended == (0, "finished", 0, None), done.err


def test_a_signal_while_a_worker_starts_is_no_failure():
    """Python itself ends with 1 and a trace where an interrupt comes before there is a handler."""
    for moment in range(0, 16, 2):
        streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        worker = start_worker("nowhere", **streams)
        time.sleep(0.008 * moment)
        worker.send_signal(signal.SIGINT)
        _, err = worker.communicate(timeout=HANG_S)
        assert worker.returncode == 130, (moment, err)
        assert err == "llmexp: SIGINT: stopped before training\n"


INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
QUICK = [("starting", TERM), ("composing", INT), ("preparing", INT), ("preparing", KILL)]
SLOW = [("starting", INT), ("starting", KILL), ("composing", TERM), ("composing", KILL),
        ("preparing", TERM)]  # fmt: skip


def test_ctrl_c_ends_a_tokenizer_whose_library_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = threading.Event()

    def working(*_: object) -> None:
        os.kill(os.getpid(), INT)
        ended.wait(HANG_S)

    monkeypatch.setattr("llmexp.cli.tokenizer.train_bpe", working)
    try:
        assert run(["tokenizer", "--vocab-size", "260", "data=stdlib"]) == 130
        assert not list(tmp_path.iterdir())
    finally:
        ended.set()


@pytest.mark.parametrize(
    ("moment", "number"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
@pytest.mark.fresh  # a fork imports nothing any more
def test_a_signal_before_training(tmp_path, moment, number):
    """Leaves what it waits for, and takes the worker along; no traceback, no folder."""
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "slow.yaml").write_text("_target_: own.farewell.slow_numbers\n")
    own = ["--allow=own", "--config-dir=conf", "data=slow", "hydra.run.dir=run"]
    process = start("train", *TINY, *own, cwd=tmp_path)
    if moment == "preparing":
        wait_for((tmp_path / "preparing").exists, process)
    else:
        wait_for(lambda: len(session(process.pid)) > 1, process)
        # the worker is not yet / is importing torch
        time.sleep(0.02 if moment == "starting" else 0.7)
    process.send_signal(number)
    if number == INT and moment == "preparing":
        process.send_signal(number)  # an impatient second one changes nothing
    code = process.wait(timeout=HANG_S)
    err = process.stderr.read() if number != KILL else ""
    # While the parent composes, TERM has its default action; a shell reads that as 143 too.
    assert code in (-number, 128 + number), err
    assert number != INT or code == 130
    assert "Traceback" not in err
    wait_for(lambda: not session(process.pid))
    assert not (tmp_path / "run").exists()
