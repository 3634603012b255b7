"""Any causal language model of Hugging Face's transformers, from a folder."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from llmexp.config.commands import how_to_install
from llmexp.config.kinds import Kind, kind_of_error
from llmexp.config.values import ConfigError, knob, refuse
from llmexp.models.common import all_finite, check_length
from llmexp.system.fileio import read_object
from llmexp.system.text import first_of


class HuggingFace(nn.Module):
    """A model of transformers as one of ours: token ids (b, t) in, logits (b, t, v) out.

    `path`: a folder with config.json and, with `pretrained`, its weights as safetensors; else they
    are drawn as the library draws them. Code from the folder is never run. Raises ConfigError for a
    folder without a causal language model.
    """

    def __init__(
        self,
        path: Annotated[str | None, knob("needed: the folder with config.json", "folder")],
        pretrained: Annotated[
            bool, knob("begin with the folder's weights; false: draw them as transformers does")
        ] = True,
    ) -> None:
        super().__init__()
        library, config = _config(path)
        self.vocab_size = int(config.vocab_size)
        self.max_position_embeddings = getattr(config, "max_position_embeddings", None)
        causal, on_meta = library.AutoModelForCausalLM, torch.get_default_device().type == "meta"
        if pretrained:
            weight_files(Path(str(path)), _wrong(path))
        try:
            if pretrained and not on_meta:
                self.model, found = causal.from_pretrained(
                    path,
                    config=config,
                    use_safetensors=True,
                    output_loading_info=True,
                    trust_remote_code=False,
                )
                if missing := sorted(found["missing_keys"]):  # which the library would draw
                    raise ConfigError("wrong_weights", f"its weights lack {first_of(missing, 8)}")
                for name, p in self.model.named_parameters():
                    if not all_finite(p):
                        raise ConfigError("not_finite", f"{name} has values that are not finite")
                self.model.train()  # the library has put it into evaluation
            else:
                self.model = causal.from_config(config, trust_remote_code=False)
        except (OSError, ValueError, RuntimeError) as error:
            why = str(error).splitlines()[0]
            raise refuse(kind_of_error(error, "damaged_file"), "model.path", path, why) from None

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers: the list of modules with the most parameters."""
        lists = [m for m in self.model.modules() if isinstance(m, nn.ModuleList)]
        return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))

    def forward(self, tokens_bt: Tensor) -> Tensor:
        if self.max_position_embeddings is not None:
            check_length(tokens_bt.shape[1], self.max_position_embeddings)
        logits: Tensor = self.model(input_ids=tokens_bt, use_cache=False).logits
        return logits


def transformers() -> Any:
    """Return the library, without the warnings of torchao, which it imports. Raises ImportError."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return importlib.import_module("transformers")


def _config(path: str | None) -> tuple[Any, Any]:
    """Return the library, and the config of the folder. Raises ConfigError."""
    wrong = _wrong(path)
    if not path or not (Path(path) / "config.json").is_file():
        raise wrong(
            "unknown_file",
            "a folder with config.json is needed; a model of the hub is fetched by: "
            "hf download NAME --local-dir FOLDER",
        )
    try:
        library = transformers()
    except ImportError:
        raise ConfigError(
            "missing_package",
            "model=hf needs the package transformers, which is not installed; "
            f"{how_to_install('transformers')}",
            "model",
        ) from None
    described = _object(Path(path) / "config.json", wrong)
    kind = described.get("model_type")
    if code := described.get("auto_map"):
        raise wrong(
            "not_allowed",
            f"its config.json names code in the folder (auto_map: {code}), which is never run; "
            f"where transformers has model_type={kind} itself, take auto_map out of config.json",
        )
    try:
        config = library.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError):
        raise wrong("unsupported", f"transformers knows no model_type={kind}") from None
    if type(config) not in library.AutoModelForCausalLM._model_mapping:
        raise wrong("unsupported", f"{kind} is not a causal language model")
    return library, config


def weight_files(folder: Path, wrong: Callable[[Kind, str], ConfigError]) -> dict[Path, Any]:
    """Return the files of weights of a folder of transformers, opened as safetensors.

    Raises `wrong` of the words for a file that is missing or damaged.
    """
    names, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if index.is_file():
        places = _object(index, wrong).get("weight_map")
        if not isinstance(places, dict):
            raise wrong("damaged_file", f"{index.name}: holds no weight_map; download it again")
        names = sorted({Path(str(at)).name for at in places.values()})
    opened = {}
    for file in (folder / name for name in names):
        if not file.is_file():
            if pickles := sorted(one.name for one in folder.glob("*.bin")):
                raise wrong(
                    "not_allowed",
                    f"holds pickled weights ({pickles[0]}), which may run code when they are read, "
                    "and are not read; save them as safetensors with transformers: "
                    "model.save_pretrained(DIR)",
                )
            raise wrong("unknown_file", f"{file.name} is missing; download it again")
        try:
            opened[file] = safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise wrong(
                "damaged_file", f"{file.name}: cannot be read: {error}; download it again"
            ) from None
    return opened


def _object(file: Path, wrong: Callable[[Kind, str], ConfigError]) -> dict[str, Any]:
    try:
        return read_object(file, file.name)
    except ValueError as error:
        raise wrong("damaged_file", str(error)) from None


def _wrong(path: Path | str | None) -> Callable[[Kind, str], ConfigError]:
    return lambda kind, why: refuse(kind, "model.path", path, why)
