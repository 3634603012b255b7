"""`python -m llmexp.train RUN_DIR`: trains, or goes on with, the run that the folder describes.

`python -m llmexp.train -` reads a request (JSON) from standard input and makes the folder first.
"""

from __future__ import annotations

import sys

from llmexp import process

if __name__ == "__main__":
    # Before torch is imported, so that a signal or a dead parent ends the process at once.
    process.die_with_parent()
    process.never_fail_to_print()
    process.STOP.install()
    if len(sys.argv) != 2:
        sys.exit("usage: python -m llmexp.train RUN_DIR")

    from llmexp.train import worker

    process.leave(worker.main(sys.argv[1]))
