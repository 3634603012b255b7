"""Print lines and lexical tokens (no comments, no docstrings) of each package: `make size`."""

from __future__ import annotations

import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ("config/sections.py", "train", "mesh", "checkpoint", "data", "models", "optim")
ENDS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
LAYOUT = (*ENDS, tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER)


def tokens(text: str) -> int:
    """Count tokens; a string that is a statement of its own is a docstring."""
    found, fresh = 0, True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            found += not (fresh and token.type == tokenize.STRING)
            fresh = False
        elif token.type in ENDS:
            fresh = True
    return found


def rooms(package: Path) -> tuple[Counter[str], Counter[str]]:
    """Count lines and tokens by the first part of the path below the package, and of the core."""
    lines, lexical = Counter[str](), Counter[str]()
    for path in sorted(package.rglob("*.py")):
        text, parts = path.read_text(encoding="utf-8"), path.relative_to(package).parts
        core = ["core"] if parts[0] in CORE or "/".join(parts) in CORE else []
        for name in (parts[0], *core, "all"):
            lines[name] += text.count("\n")
            lexical[name] += tokens(text)
    return lines, lexical


def main() -> None:
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "llmexp"
    lines, lexical = rooms(package)
    for room in sorted(lines, key=lines.__getitem__, reverse=True):
        print(f"{room:<16}{lines[room]:>8,} lines{lexical[room]:>9,} tokens")


if __name__ == "__main__":
    main()
