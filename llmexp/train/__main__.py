"""`python -m llmexp.train RUN_DIR`: trains, or goes on with, the run that the folder describes.

`python -m llmexp.train -` reads a request (JSON) from standard input and makes the folder first.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from llmexp.system import child

if __name__ == "__main__":
    if "RANK" not in os.environ:  # ranks have that of who started them
        os.environ[child.BEGAN] = str(time.time())
    # Before torch is imported, so that a signal or a dead parent ends the process at once.
    child.die_with_parent()
    child.never_fail_to_print()
    child.STOP.install()
    if len(sys.argv) != 2:
        sys.exit("usage: python -m llmexp.train RUN_DIR")

    gc.disable()  # nothing of what is imported is garbage, and looking for it takes a fifth longer
    from llmexp.train import worker

    gc.freeze()
    gc.enable()
    argument = sys.argv[1]
    if argument.startswith(child.TEMPLATE):
        from llmexp.system import workers

        workers.serve_forks(int(argument.removeprefix(child.TEMPLATE)))
    child.end_process(worker.main(argument))
