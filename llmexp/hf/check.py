"""Read an exported folder with transformers, and compare what it gives with what the run has."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import torch
from safetensors import safe_open

from llmexp.config.commands import how_to_install
from llmexp.config.values import ConfigError
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.data.tokenizers.own import PROBE
from llmexp.hf.tokenizer import doubts
from llmexp.models.hf import transformers
from llmexp.system.text import first_of, one_line

_MISSING = f"not checked: the package transformers is missing ({how_to_install('transformers')})"
# Digits, letters with marks of their own, spaces, line ends, code.
TEXTS = (
    PROBE,
    "0 12 345 6789 1234567890 3.14e-10 v1.2",
    "Cafe\u0301 nai\u0308ve A\u030angstro\u0308m e\u0301",
    "  two   three\t\ttabs \u00a0 \u2003end  \n\n\n x\r\n\r\n",
    "def f(x_1, *a):\n    if x_1 >= 0x1F:\n\t\treturn {'k': a[::-1]}  # it's I'LL\n",
)


_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(gate|up|down)_proj\.weight")


def check_folder(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """Check a folder with transformers, and return what a user should know.

    Raises ConfigError where transformers gives a text other ids than the run's tokenizer, or lacks
    a tensor of its model in the folder.
    """
    try:
        library = transformers()
    except ImportError:
        return [_MISSING]
    try:
        config = library.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):  # no memory for its weights
            model = library.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        why = one_line(error)
        raise ConfigError(
            "unsupported", f"transformers does not read the config.json: {why}"
        ) from None
    known = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    written = _written(folder, known)
    wrong = {name for name, _ in model.named_parameters()} - written.keys()
    wrong |= {name for name, shape in written.items() if known.get(name) != shape}
    if wrong:
        names = first_of(sorted(wrong), 8)
        raise ConfigError(
            "wrong_weights", f"transformers {library.__version__} has other tensors: {names}"
        )
    if not (folder / "tokenizer.json").is_file():
        return []
    try:
        theirs = library.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
        theirs.model_max_length = int(1e30)  # no warning about the length of these texts
        ids = {text: theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS}
        text = next((t for t in TEXTS if ids[t] != tokenizer.encode_ordinary(t)), None)
    except Exception as error:  # whatever its classes raise
        why = one_line(error)
        raise ConfigError(
            "wrong_tokenizer", f"AutoTokenizer does not read the tokenizer: {why}"
        ) from None
    if text is None:
        return []
    version = f"{type(theirs).__name__} of transformers {library.__version__}"
    found = f"{version} gives other ids than {tokenizer.name}, for example for {text!r}"
    if doubts(tokenizer, {"tokenizer.json": (folder / "tokenizer.json").read_text()}):
        return [found]
    raise ConfigError("wrong_tokenizer", f"{found}; --no-check writes the folder all the same")


def _written(folder: Path, known: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return shapes in files by the names of transformers, which stacks experts as it reads."""
    found, rows = dict[str, tuple[int, ...]](), Counter[tuple[str, int]]()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as held:
            for name in held.keys():  # noqa: SIM118
                shape, part = tuple(held.get_slice(name).get_shape()), _EXPERT.fullmatch(name)
                if name in known or part is None:
                    found[name] = shape
                else:
                    stack = "down_proj" if part[2] == "down" else "gate_up_proj"
                    rows[f"{part[1]}.{stack}", shape[1]] += shape[0]
    for (name, width), count in rows.items():
        e = known[name][0] if name in known else 1
        found[name] = (e, count // e, width)
    return found
