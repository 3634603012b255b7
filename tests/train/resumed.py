"""What tests of several files ask of commands: their exit code, and that a run that was cut goes on
as if it had not been."""

from pathlib import Path

from tests.conftest import Result, llmexp
from tests.tools import cut_after, exact, same_state


def ends(cwd: Path, *words: str, code: int = 0, **env: str) -> Result:
    """Run `llmexp WORDS`, which has to end with this code."""
    done = llmexp(*words, cwd=cwd, **env)
    assert done.code == code, done.out + done.err
    return done


def goes_on(cut: Result, whole: Result, *more: str) -> Result:
    """Resume a run; its rows and its last checkpoint have to be those of the whole one."""
    done = ends(cut.folder.parent, "resume", cut.folder.name, *more)
    assert exact(cut) == exact(whole)
    last = whole.rows()[-1]["step"]
    same_state(cut.checkpoint(last), whole.checkpoint(last))
    return Result(done.code, done.out, done.err, cut.folder)


def goes_on_from(step: int, whole: Result, to: Path, *more: str) -> Result:
    """Resume a copy of a run as a kill after this checkpoint leaves it."""
    return goes_on(Result(0, "", "", cut_after(whole, to, step)), whole, *more)
