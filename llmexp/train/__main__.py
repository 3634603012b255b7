"""`python -m llmexp.train RUN_DIR`: trains, or goes on with, the run that the folder describes.

`python -m llmexp.train -` reads a request (JSON) from standard input and makes the folder first.
"""

from __future__ import annotations

import sys

from llmexp.system import child

if __name__ == "__main__":
    # Before torch is imported, so that a signal or a dead parent ends the process at once.
    child.die_with_parent()
    child.never_fail_to_print()
    child.STOP.install()
    if len(sys.argv) != 2:
        sys.exit("usage: python -m llmexp.train RUN_DIR")

    from llmexp.train import worker

    argument = sys.argv[1]
    if argument.startswith(child.TEMPLATE):
        from llmexp.system import workers

        argument = workers.serve_forks(int(argument.removeprefix(child.TEMPLATE)))
    child.end_process(worker.main(argument))
