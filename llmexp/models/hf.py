"""Any causal language model of Hugging Face's transformers, from a folder."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from llmexp.models.common import all_finite, check_length
from llmexp.settings.values import ConfigError, knob, refuse
from llmexp.system.fileio import read_object


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
            _check_weights(Path(str(path)))
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
                    raise ConfigError(f"its weights lack {', '.join(missing[:8])}")
            else:
                self.model = causal.from_config(config, trust_remote_code=False)
        except (OSError, ValueError, RuntimeError) as error:
            why = str(error).splitlines()[0]
            raise refuse("model.path", path, why) from None

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


def _config(path: str | None) -> tuple[Any, Any]:
    """Return the library, and the config of the folder. Raises ConfigError."""
    if not path or not (Path(path) / "config.json").is_file():
        why = (
            "a folder with config.json is needed; a model of the hub is fetched by: "
            "hf download NAME --local-dir FOLDER"
        )
        raise refuse("model.path", path, why)
    try:
        library = importlib.import_module("transformers")
    except ImportError:
        raise ConfigError(
            "model=hf needs the package transformers, which is not installed; "
            "pip install 'llmexp[hf]'",
            "model",
        ) from None
    described = _json(Path(path) / "config.json")
    kind = described.get("model_type")
    if code := described.get("auto_map"):
        why = (
            f"its config.json names code in the folder (auto_map: {code}), which is never run; "
            f"where transformers has model_type={kind} itself, take auto_map out of config.json"
        )
        raise refuse("model.path", path, why)
    try:
        config = library.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError):
        raise refuse("model.path", path, f"transformers knows no model_type={kind}") from None
    if type(config) not in library.AutoModelForCausalLM._model_mapping:
        raise refuse("model.path", path, f"{kind} is no causal language model")
    return library, config


def _json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file, file.name)
    except ValueError as error:
        raise refuse("model.path", file.parent, str(error)) from None


def _files(folder: Path) -> list[str]:
    """Return the names of the files of weights. Raises ConfigError."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    places = _json(index).get("weight_map")
    if not isinstance(places, dict):
        raise refuse("model.path", folder, f"{index.name} holds no weight_map")
    return sorted({Path(str(name)).name for name in places.values()})


def check_finite(folder: Path) -> None:
    """Raise ConfigError for weights that hold a value that is not finite."""
    _check_weights(folder)
    for file in _files(folder):
        with safe_open(folder / file, framework="pt") as held:
            for name in held.keys():  # noqa: SIM118
                tensor = held.get_tensor(name)
                if not all_finite(tensor):
                    text = f"{name} has values that are not finite"
                    raise refuse("model.path", folder, text)


def _check_weights(folder: Path) -> None:
    """Raise ConfigError unless the files of weights are there, as whole safetensors."""
    for name in _files(folder):
        if not (folder / name).is_file():
            why = (
                f"{name} is missing; pickled weights are not read; download it again, or save it "
                "anew with transformers: model.save_pretrained(DIR)"
            )
            raise refuse("model.path", folder, why)
        try:
            safe_open(folder / name, framework="pt")
        except (OSError, SafetensorError) as error:
            why = f"{name} cannot be read: {error}; download it again"
            raise refuse("model.path", folder, why) from None
