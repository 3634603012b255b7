"""What tests of several files ask of a run that was cut: it goes on as if it had not been."""

from tests.conftest import Result, llmexp
from tests.tools import exact, same_state


def goes_on(cut: Result, whole: Result, *more: str) -> Result:
    """Resume a run; its rows and its last checkpoint have to be those of the whole one."""
    done = llmexp("resume", cut.folder.name, *more, cwd=cut.folder.parent)
    assert done.code == 0, done.err
    assert exact(cut) == exact(whole)
    last = whole.rows()[-1]["step"]
    same_state(cut.checkpoint(last), whole.checkpoint(last))
    return Result(done.code, done.out, done.err, cut.folder)
