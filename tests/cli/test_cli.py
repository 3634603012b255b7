"""The command line as users drive it: help, completion, folders, sweeps, signals, closed
streams."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmexp.__main__ import COMMANDS, run
from llmexp.data import train_tokenizer
from llmexp.system.child import start_worker
from llmexp.tasks import make
from tests.conftest import HANG_S, ROOT, TINY, environment, llmexp, start
from tests.tools import session, wait_for

RUN = [
    *TINY,
    "data=synthetic",
    "data.n_tokens=5000",
    "train.max_steps=3",
    "train.log_every=1",
    "checkpoint.every=null",
]

# --- what is printed


@pytest.mark.parametrize("columns", [60, 100])
def test_help_is_grouped_and_fits(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.split("EXAMPLES")[0].splitlines() if len(line) > columns] == []
    for part in (
        "GROUPS",
        "llama_100m",
        "MOST USED KNOBS",
        "batch.real_batch_size",
        "FLAGS",
        "--allow",
        "hydra.run.dir",
    ):
        assert part in text
    # Every knob has its text, beside or below it.
    for knob in (
        "train.max_steps",
        "optimizer.lr",
        "schedule.warmup_steps",
        "model.d_model",
        "data.train_files",
    ):
        assert re.search(rf"^  {re.escape(knob)}(  +\S|\n      \S)", text, re.M), knob


@pytest.mark.parametrize(
    "command",
    [
        "",
        "plan",
        "explain",
        "prepare",
        "tokenizer",
        "resume",
        "sample",
        "evaluate",
        "average",
        "export",
    ],
)
def test_help_of_every_command(capsys, command):
    code: object
    try:
        code = run([*command.split(), "--help"])
    except SystemExit as ended:
        code = ended.code
    assert code == 0
    out = capsys.readouterr().out
    assert f"llmexp {command}".strip() in out
    assert len(out.splitlines()) > 5


@pytest.mark.parametrize("command", [*COMMANDS, "verify data", "tasks.make"])
def test_a_wrong_flag_is_refused_in_one_line(capsys, command):
    main = make.main if command == "tasks.make" else run
    words = [] if command == "tasks.make" else command.split()
    assert main([*words, "--no-such-flag", "a", "b"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("llmexp: ")
    assert "--help" in err or "--no-such-flag" in err


@pytest.mark.parametrize("command", ["sample", "evaluate", "resume", "replay"])
def test_a_command_without_its_run_names_that_alone(capsys, command):
    """Not the overrides that it takes besides."""
    assert run([command]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"llmexp: the following arguments are required: [\w@\[\]]+; see .*\n", err)


def test_a_command_that_there_is_not(capsys):
    for given, says in (("sweep", "A sweep is llmexp train -m; for example"), ("trian", "train?")):
        assert run([given, "optimizer.lr=1,2"]) == 2
        assert says in capsys.readouterr().err


def test_cfg_and_info(capsys):
    import yaml

    assert (
        run(["train", "model.n_layers=7", "--cfg", "job", "--resolve", "name=mine"]) == 0
    )  # flags between overrides
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["model"]["n_layers"] == 7
    assert shown["name"] == "mine"
    assert "hydra" not in shown
    assert run(["train", "-m", "--cfg", "job", "train.seed=1,2"]) == 0
    points = capsys.readouterr().out.split("# train.seed=")[1:]
    assert [yaml.safe_load(p.partition("\n")[2])["train"]["seed"] for p in points] == [1, 2]
    assert run(["train", "--cfg", "hydra"]) == 0
    assert "outputs/${name}/" in capsys.readouterr().out
    assert run(["train", "--info", "defaults"]) == 0
    assert "model/gpt_tiny" in capsys.readouterr().out
    assert run(["train", "--info"]) == 0
    assert "LocalLauncher" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "prepare"])
def test_hydras_flags_answer_and_start_nothing(capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    assert run([command, "--cfg", "job", "model.n_layers=7"]) == 0
    assert "n_layers: 7" in capsys.readouterr().out
    assert run([command, "--hydra-help"]) == 0
    text = capsys.readouterr().out
    assert "--multirun" in text
    assert "--config-name" not in text  # it is refused
    assert run([command, "--resolve"]) == 2
    assert "--cfg job --resolve" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--shell-completion"], ["-sc"], ["train", "-sc"]])
def test_completion_without_arguments_prints_what_it_takes(capsys, arguments):
    assert run(arguments) == 2
    assert "install=SHELL" in capsys.readouterr().err


def test_info_into_a_closed_pipe():
    command = f"{sys.executable} -m llmexp train --info | head -1"
    done = subprocess.run(
        command, shell=True, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True
    )
    assert done.stderr == ""


def test_json_of_an_error_into_a_full_disk(monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys.stdout, "write", full)
    assert run(["train", "wrong=1", "--json"]) == 2
    assert capsys.readouterr().err.startswith("llmexp: wrong: there is no such key")


COMPLETIONS = [
    ("llmexp ", {"train", "plan", "explain", "prepare", "tokenizer", "resume", "sample",
                 "evaluate", "average", "export", "compare", "next", "fit", "replay", "runs",
                 "sync",
                 "verify"}),
    ("llmexp train mod", {"model.", "model="}),
    ("llmexp train model=gpt2", {f"model=gpt2_{size}" for size in ("large", "medium", "small",
    "xl")}),
    ("llmexp train train.max_", {f"train.max_{k}=" for k in ("consecutive_skips", "epochs", "flops",
    "steps", "tokens")}),
    ("llmexp plan -m model=gpt_tiny model.n_l", {"model.n_layers="}),
    ("llmexp train --config-dir own model=min", {"model=mine"}),
]  # fmt: skip


def test_completions(tmp_path, capsys, monkeypatch):
    own_option(tmp_path)
    monkeypatch.chdir(tmp_path)
    for line, expected in COMPLETIONS:
        monkeypatch.setenv("COMP_LINE", line)
        monkeypatch.setenv("COMP_POINT", str(len(line)))
        assert run(["-sc", "query=bash"]) == 0
        assert set(capsys.readouterr().out.split()) == expected, line


def own_option(folder: Path) -> None:
    (folder / "own" / "model").mkdir(parents=True)
    shutil.copy(ROOT / "conf" / "model" / "gpt_tiny.yaml", folder / "own" / "model" / "mine.yaml")


def test_bash_completion(tmp_path):
    """In a real bash, with the function that the install command defines."""
    own_option(tmp_path)
    binary = tmp_path / "llmexp"
    binary.write_text(f"#!{sys.executable}\nfrom llmexp.__main__ import main\nmain()\n")
    binary.chmod(0o755)
    script = ['eval "$(llmexp -sc install=bash)"', "complete -p llmexp >/dev/null || exit 9"]
    for line, _ in COMPLETIONS[::5]:
        words = line.split(" ")
        script.append(
            f"COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=({' '.join(map(repr, words))}) "
            f"COMP_CWORD={len(words) - 1}; COMPREPLY=(); hydra_bash_completion; echo "
            "${COMPREPLY[*]}"
        )
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=tmp_path, env={**env,
        "PATH": f"{tmp_path}:{env['PATH']}"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answers = done.stdout.removesuffix("\n").split("\n")
    for (line, expected), answer in zip(COMPLETIONS[::5], answers, strict=True):
        assert set(answer.split()) == expected, line


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_for_other_shells_prints(capsys, monkeypatch, shell):
    monkeypatch.setattr(sys, "argv", ["/bin/llmexp"])
    assert run(["-sc", f"install={shell}"]) == 0
    assert "llmexp" in capsys.readouterr().out


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
    assert (
        "PYTHONUTF8" in env or "folder      ö" in log
    )  # Python itself knows the name by its bytes there
    refused = llmexp("explain", "name", 'name="../größe"', cwd=tmp_path, **env)
    assert refused.code == 2
    assert "one folder name" in refused.err


# --- folders


def test_plan_prints_the_banner_of_the_run(tmp_path, capsys, monkeypatch):
    """And three runs that start in the same second get three folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = [*RUN, f"--config-dir={conf_with_fixed_stamp(tmp_path)}", "experiment=stamp"]
    assert run(["plan", *given]) == 0
    planned = capsys.readouterr().out.partition("\nmemory ")[0].strip()
    processes = [start("train", *given, cwd=tmp_path) for _ in range(3)]
    outs = [p.communicate(timeout=HANG_S) for p in processes]
    assert [p.returncode for p in processes] == [0] * 3, outs
    names = ["now", "now-2", "now-3"]
    assert sorted(p.name for p in (tmp_path / "outputs" / "stamp").iterdir()) == names
    assert all(planned in out for out, _ in outs)


def conf_with_fixed_stamp(folder: Path) -> Path:
    """Runs get the folder of one second, as if all started in it."""
    (folder / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\nname: stamp\nhydra:\n  run:\n    dir: outputs/stamp/now\n"
    (folder / "conf" / "experiment" / "stamp.yaml").write_text(text)
    return folder / "conf"


def test_the_user_chooses_the_folder(tmp_path):
    """Spaces, other scripts, nesting, absolute; with closed streams."""
    name = "a b/wörk 数/run"
    result = llmexp("train", *RUN, f"hydra.run.dir='{tmp_path / name}'", cwd=tmp_path)
    assert result.code == 0, result.err
    assert len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["a b"]

    shell = f"{sys.executable} -m llmexp train {' '.join(RUN)} hydra.run.dir=closed <&- >&- 2>&-"
    done = subprocess.run(shell, shell=True, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0
    assert len((tmp_path / "closed" / "metrics.jsonl").read_text().splitlines()) == 3


def test_head_leaves_training_unaffected(tmp_path):
    """Also of a sweep, where the parent prints too."""
    for extra in ("hydra.run.dir=one", "-m train.seed=1 hydra.sweep.dir=two"):
        shell = (
            f"{sys.executable} -m llmexp train {' '.join(RUN)} {extra} | head -1; exit "
            "${PIPESTATUS[0]}"
        )
        done = subprocess.run(
            ["bash", "-c", shell],
            cwd=tmp_path,
            env=environment(PYTHONPATH=str(ROOT)),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    for path in ("one", "two/0-point"):
        assert json.loads((tmp_path / path / "status.json").read_text())["state"] == "finished"


# --- sweeps

USER_CODE = """
import os, signal

def hook(event, context):
    if event == "step_end" and context.step == 2:
        if context.run.micro_batch_size == 1:
            raise RuntimeError("boom")
        if context.run.micro_batch_size == 2:
            os._exit(7)
        if context.run.micro_batch_size == 3:
            os.kill(os.getpid(), signal.SIGKILL)
"""
REASONS = (
    "the hook own.hook failed at step_end of step 2: RuntimeError('boom')",
    "the worker ended with exit code 7",
    "the worker was ended by signal 9 (SIGKILL",
)


def record_of(run: Path, name: str) -> dict:
    return json.loads((run / name).read_text())


def test_failing_points_touch_no_other(tmp_path):
    """One raises, one leaves without an error, one is killed: the point after them still runs."""
    (tmp_path / "own.py").write_text(USER_CODE)
    result = llmexp(
        "train", "-m", *RUN, "--allow", "own", "hooks=[own.hook]", "batch.micro_batch_size=1,2,3,4",
        "name=fails",
        'tracker.notes="one, two"', cwd=tmp_path,
    )  # fmt: skip
    assert result.code == 1, result.err
    (folder,) = (tmp_path / "outputs" / "fails").iterdir()
    names = [f"{n}-micro_batch_size_{n + 1}" for n in range(4)]
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == names
    *failed, finished = (json.loads((folder / name / "status.json").read_text()) for name in names)
    for status, reason in zip(failed, REASONS, strict=True):
        assert (status["state"], status["exit_code"]) == ("failed", 3)
        assert reason in status["error"]
        assert reason in result.out
    assert finished["state"] == "finished"
    record = record_of(folder / names[3], "run.json")
    assert record["label"] == "micro_batch_size_4"
    assert record["group"].endswith(folder.name)
    # The output in the order in which it happened, and a table at the end.
    places = [
        result.out.index(text)
        for text in (*(f"{n} micro={n + 1}  running" for n in range(4)), "\nmicro=4: ")
    ]
    assert places == sorted(places)
    rows = [row.split() for row in result.out[places[-1] :].splitlines()]
    assert [row[0] for row in rows if row[1:2] == ["failed"]] == ["1", "2", "3"]
    loss = record_of(folder / names[3], "status.json")["summary"]["final val/loss"]
    assert ["4", f"{loss:#.5g}"] in [row[:2] for row in rows]


def test_a_sweep_in_a_file_and_a_chosen_subdir(tmp_path):
    """hydra.mode and hydra.sweeper.params in the user's experiment; a second start is refused
    before it writes."""
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "grid.yaml").write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      train.seed: "
        "1,2\n"
    )
    command = ["train", *RUN, "train.max_steps=1", "--config-dir", "conf", "experiment=grid",
    "hydra.sweep.dir=grid",
               "hydra.sweep.subdir='s ${train.seed}/é'"]  # fmt: skip
    result = llmexp(*command, cwd=tmp_path)
    assert result.code == 0, result.err
    found = {
        str(p.parent.relative_to(tmp_path / "grid"))
        for p in (tmp_path / "grid").rglob("status.json")
    }
    assert found == {"s 1/é", "s 2/é"}
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    refused = llmexp(*command, cwd=tmp_path)
    assert refused.code == 2
    assert "holds a sweep already" in refused.err
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_a_budget_on_the_command_line_replaces_that_of_a_file(capsys, tmp_path, monkeypatch):
    """In an experiment's section, and in its hydra.sweeper.params."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    one = "# @package _global_\ntrain:\n  max_tokens: 2400\n"
    sweep = "hydra:\n  sweeper:\n    params:\n      train.max_steps: 5,6\n      train.seed: 1,2\n"
    (tmp_path / "conf" / "experiment" / "one.yaml").write_text(one)
    (tmp_path / "conf" / "experiment" / "swept.yaml").write_text(one + sweep)
    base = [o for o in RUN if not o.startswith("train.max")] + ["--config-dir=conf"]

    def plan(*arguments: str) -> tuple[int, str]:
        code = run(["plan", *base, *arguments])
        out, err = capsys.readouterr()
        return code, out + err

    assert "budget      25 optimizer steps" in plan("experiment=one")[1]
    assert "max_tokens: null" in plan("experiment=one", "train.max_steps=7", "--cfg", "job")[1]
    code, text = plan("experiment=one", "train.max_steps=7", "train.max_epochs=1")
    assert code == 2
    assert "one budget is needed" in text

    def steps(*arguments: str) -> list[str]:
        code, text = plan("-m", *arguments)
        assert code == 0, text
        head, *rows = [line.split() for line in text.splitlines() if line.strip()]
        rows = [
            row for row in rows if row[0].isdigit() and not row[1].startswith("run")
        ]  # less the count of runs
        return [row[1 + head.index("steps")] for row in rows]  # the numbers have no head

    assert steps("experiment=one", "train.max_steps=7,8") == ["7", "8"]
    assert steps("experiment=swept", "train.max_tokens=960") == ["10", "10"]
    assert steps("experiment=swept", "train.max_steps=9") == ["9", "9"]


def test_plan_of_a_sweep_has_a_row_a_point(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = [
        "batch.real_batch_size=12",
        "batch.micro_batch_size=null",
        "batch.gradient_accumulation_steps=1,3,5",
    ]
    assert run(["plan", "-m", *RUN, *overrides]) == 2
    out, err = capsys.readouterr()
    header, *rows = [line.split() for line in out.splitlines()]
    assert header == ["accum", "micro", "steps", "tokens"]
    assert [row[:4] for row in rows[:2]] == [["0", "1", "12", "3"], ["1", "3", "4", "3"]]
    assert rows[2][:2] == ["2", "runs;"]
    assert "2-gradient_accumulation_steps_5: batch.real_batch_size=12" in err
    assert "10 or 15" in err
    assert list(tmp_path.iterdir()) == []


# --- resume


def test_a_trace_of_steps_that_a_run_has_behind_it_is_refused(tmp_path):
    cut = llmexp("train", *RUN, "train.stop_step=2", "hydra.run.dir=run", cwd=tmp_path)
    assert cut.code == 75, cut.err
    refused = llmexp("resume", "run", "train.profile_start=2", cwd=tmp_path)
    assert refused.code == 2
    assert (
        "train.profile_start=2: is not after the checkpoint that the run goes on from, which is of "
        "step 2; for example train.profile_start=3"
    ) in refused.err
    assert llmexp("resume", "run", "train.profile_start=3", cwd=tmp_path).code == 0
    assert (tmp_path / "run" / "trace_step_00000003.json").exists()


# --- signals


def test_a_run_that_dies_at_its_farewell_has_finished(tmp_path):
    (tmp_path / "faulty.py").write_text(
        "import os, signal\n"
        "from llmexp.train import summary\n"
        "summary.plot_losses = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)\n"
        "def hook(event, context): pass\n"
    )
    done = llmexp("train", *RUN, "--allow", "faulty", "hooks=[faulty.hook]", "metrics.picture=true",
                  "hydra.run.dir=run", cwd=tmp_path)  # fmt: skip
    status = done.json("status.json")
    assert (done.code, status["state"], status["exit_code"], status["error"]) == (
        0,
        "finished",
        0,
        None,
    ), done.err


SLOW_DATA = """
import time
import numpy as np

def numbers():
    open("preparing", "w").close()
    for _ in range(60_000):
        time.sleep(0.05)
    return np.arange(2000) % 60, np.arange(200) % 60
"""


def test_a_signal_while_a_worker_starts_is_no_failure():
    """Python itself ends with 1 and a trace where an interrupt comes before there is a handler."""
    for moment in range(0, 16, 2):
        worker = start_worker(
            "nowhere", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        time.sleep(0.008 * moment)
        worker.send_signal(signal.SIGINT)
        _, err = worker.communicate(timeout=HANG_S)
        assert worker.returncode == 130, (moment, err)
        assert err == "llmexp: SIGINT: stopped before training\n"


QUICK = [
    ("starting", signal.SIGTERM), ("composing", signal.SIGINT),
    ("preparing", signal.SIGINT), ("preparing", signal.SIGKILL),
]  # fmt: skip
SLOW = [
    ("starting", signal.SIGINT), ("starting", signal.SIGKILL), ("composing", signal.SIGTERM),
    ("composing", signal.SIGKILL), ("preparing", signal.SIGTERM),
]  # fmt: skip


@pytest.mark.parametrize(
    ("moment", "number"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
@pytest.mark.fresh  # a fork is in no session of the test's
def test_a_signal_before_training(tmp_path, moment, number):
    """Leaves what it waits for, and takes the worker along; no traceback, no folder."""
    (tmp_path / "slow.py").write_text(SLOW_DATA)
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "slow.yaml").write_text("_target_: slow.numbers\n")
    process = start(
        "train",
        *TINY,
        "--allow=slow",
        "--config-dir=conf",
        "data=slow",
        "hydra.run.dir=run",
        cwd=tmp_path,
    )
    if moment == "preparing":
        wait_for((tmp_path / "preparing").exists, process)
    else:
        wait_for(lambda: len(session(process.pid)) > 1, process)
        # the worker is not yet / is importing torch
        time.sleep(0.02 if moment == "starting" else 0.7)
    process.send_signal(number)
    if number == signal.SIGINT and moment == "preparing":
        process.send_signal(number)  # an impatient second one changes nothing
    code = process.wait(timeout=HANG_S)
    err = process.stderr.read() if number != signal.SIGKILL else ""
    # While the parent composes, TERM has its default action; a shell reads that as 143 too.
    assert code in (-number, 128 + number), err
    assert number != signal.SIGINT or code == 130
    assert "Traceback" not in err
    wait_for(lambda: not session(process.pid))
    assert not (tmp_path / "run").exists()


@pytest.mark.fresh
def test_kill_of_the_parent_ends_a_running_worker(tmp_path):
    process = start("train", *RUN, "train.max_steps=1000000", "hydra.run.dir=run", cwd=tmp_path)
    wait_for((tmp_path / "run" / "metrics.jsonl").exists, process)
    process.kill()
    process.wait()
    wait_for(lambda: not session(process.pid))


def test_a_tokenizer_is_trained_and_used(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "so many words, so little time"}\n' * 40)
    source = "data.sources.words.files=a.jsonl"
    assert run(["tokenizer", "--vocab-size", "270", "data=corpus", source]) == 0
    out = capsys.readouterr().out
    assert "ids from 40 training documents (validation left out)" in out
    assert Path("tokenizers/bpe-270/bpe-270.tiktoken").exists()
    use = ["tokenizer=file", "tokenizer.path=tokenizers/bpe-270", "data.cache_dir=cache"]
    assert run(["prepare", "data=corpus", source, *use]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["source", "split", "files"]
    monkeypatch.setattr(train_tokenizer, "train_bpe", lambda *_: pytest.fail("it was trained"))
    for arguments, reason in (
        (["data=corpus", source], "--vocab-size: is needed"),
        (["--vocab-size=100", "data=corpus", source], "--vocab-size: 100 is too small"),
        (["--vocab-size=300", "data=synthetic"], "has no documents of text"),
        (["--vocab-size=300", "--pattern=x", "data=corpus", source], "--pattern x: must be gpt2"),
        (["--vocab-size=270", "data=corpus", source], "tokenizers/bpe-270: is there already"),
        (["--vocab-size=270", "--out=/proc/new", "data=stdlib"], "/proc cannot be written"),
        (
            ["--vocab-size=270", "--out=a.jsonl/new", "data=stdlib"],
            "--out a.jsonl/new: a.jsonl is not",
        ),
    ):
        assert run(["tokenizer", *arguments]) == 2
        assert reason in capsys.readouterr().err
