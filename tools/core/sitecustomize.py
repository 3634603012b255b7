"""Write down each function of llmexp that this process calls, once, into CORE_TRACE."""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

WHERE = os.environ.get("CORE_TRACE", "")
SEEN = set[CodeType]()


def follow(frame: FrameType, event: str, _: Any) -> None:
    code = frame.f_code
    if code not in SEEN:
        SEEN.add(code)
        _, package, file = code.co_filename.rpartition("/llmexp/")
        if package and file.endswith(".py"):
            with open(os.path.join(WHERE, str(os.getpid())), "a") as out:
                out.write(f"{file} {code.co_firstlineno}\n")


if WHERE:
    threading.setprofile(follow)
    sys.setprofile(follow)
