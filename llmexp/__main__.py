"""`llmexp COMMAND ...`: command dispatch. Each command imports what it needs, and no more."""

from __future__ import annotations

import itertools
import os
import sys
from contextlib import suppress

USAGE = """\
llmexp: language-model pretraining experiments

  llmexp train [KEY=VALUE ...]     Train one run.
  llmexp train -m KEY=1,2,3        Train a sweep: every combination of values.
  llmexp resume PATH               Continue a run or a sweep that was stopped.
  llmexp compare PATH ...          Say which setting is best, and how surely.
  llmexp next PATH ...             Print the command that would tell most.

Before a run
  llmexp plan [KEY=VALUE ...]      Check a run or a sweep, and forecast it.
  llmexp explain KEY               Say what a knob does, and who set it.
  llmexp prepare [KEY=VALUE ...]   Tokenise the data into the cache.
  llmexp tokenizer [KEY=VALUE ...] Train a tokenizer on the training documents.
  llmexp verify PROOF              Prove on this machine what llmexp promises.

With a trained model
  llmexp sample RUN                Generate text.
  llmexp evaluate RUN              Measure losses on other data, or score tasks.
  llmexp average RUN               Average the weights of several checkpoints.
  llmexp export RUN                Write the model for Hugging Face.
  llmexp replay RUN@STEP           Repeat a step, and find what made it unusual.

With many runs
  llmexp runs [FOLDER ...]         List runs and sweeps, and remove checkpoints.
  llmexp fit PATH ...              Fit scaling laws.
  llmexp sync PATH ...             Upload runs and sweeps to wandb.

`llmexp COMMAND --help` has more; `llmexp train --help` lists groups and knobs.
Shell completion: eval "$(llmexp -sc install=bash)" (or zsh, fish).
"""


def main() -> None:
    """Entry point of the `llmexp` script."""
    from llmexp.system.child import PREEMPTED, end_process, never_fail_to_print

    never_fail_to_print()
    try:
        # else a file opened later gets a closed stream's number
        while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
            os.set_inheritable(fd, True)
        os.close(fd)
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    except RuntimeError as error:
        # Python 3.11 wraps one that comes in a class body
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        code = 130
    # stopped by a signal; another, while Python shuts down, would change the code
    if code in (PREEMPTED, 130):
        end_process(code)
    sys.exit(code)


# Each is a function of its module in llmexp.cli, which imports what it needs, and no more.
COMMANDS = (
    "train", "plan", "explain", "prepare", "tokenizer", "resume", "sample", "evaluate", "average",
    "export", "sync", "compare", "next", "fit", "replay", "runs", "verify",
)  # fmt: skip


def run(arguments: list[str]) -> int:
    """Run one command, and return its exit code.

    What the user got wrong is one line on standard error, exit code 2.
    """
    from llmexp.config.values import ConfigError
    from llmexp.system.child import REFUSED

    try:
        return dispatch(arguments or ["--help"])
    except ConfigError as error:
        return report(error, REFUSED, "--json" in arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `llmexp ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # such as a full disk under the output
        return report(error, 1, "--json" in arguments)


def dispatch(arguments: list[str]) -> int:
    """Call what the first argument names. Raises ConfigError."""
    from llmexp.config.values import ConfigError, nearest

    command, rest = arguments[0], arguments[1:]
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if command in ("-V", "--version"):
        from llmexp import __version__

        print(f"llmexp {__version__}")
        return 0
    if command in ("-sc", "--shell-completion", "--shell_completion"):
        return complete(arguments)
    if command not in COMMANDS:
        hint = f"{nearest(command, COMMANDS)} See llmexp --help."
        if command.startswith("sweep"):
            hint = " A sweep is llmexp train -m; for example llmexp train -m optimizer.lr=1e-3,3e-3"
        raise ConfigError("unknown_key", f"{command}: there is no such command.{hint}")
    from llmexp.cli.running import run_command

    return run_command(command, rest)


def report(error: Exception, code: int, as_json: bool) -> int:
    """Print what went wrong, without the values of secrets, on standard error; return `code`."""
    import json

    from llmexp.config.values import error_record
    from llmexp.system.redact import redacted

    found = error_record(error)
    found["message"] = redacted(found["message"])
    # what a file says must not drive the terminal
    shown = "".join(c if c.isprintable() or c == "\n" else " " for c in found["message"])
    print(f"llmexp: {shown}", file=sys.stderr)
    if as_json:
        with suppress(OSError):  # the fault can be that of standard output
            print(json.dumps({"error": found}, indent=2))
    return code


def complete(arguments: list[str]) -> int:
    """Complete a command line in the shell: our commands here, overrides by Hydra.

    Hydra must not see the command before them.
    """
    from llmexp.cli.running import run_command

    words = os.environ.get("COMP_LINE", "").split(" ")
    if len(words) == 2 and any(a.startswith("query=") for a in arguments):
        print("\n".join(c for c in COMMANDS if c.startswith(words[1])))
        return 0
    if (
        len(words) > 2
        and words[1] in ("compare", "next", "fit", "runs")
        and any(a.startswith("query=") for a in arguments)
    ):
        return 0  # they take paths, which the shell completes where nothing is printed
    if len(words) > 2 and words[1] in COMMANDS:
        os.environ["COMP_LINE"] = " ".join([words[0], *words[2:]])
    for flag, folder in itertools.pairwise(words):
        if flag in ("--config-dir", "-cd") and os.path.isdir(folder):
            arguments = [*arguments, "--config-dir", folder]
    return run_command("train", arguments)


if __name__ == "__main__":
    main()
