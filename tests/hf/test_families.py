"""Our models against transformers' own, family by family, in fp64: what is exported computes the
same there, and comes back as it went."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from llmexp.checkpoint import saving
from llmexp.checkpoint.loading import Loaded, read_checkpoint
from llmexp.config.targets import bind
from llmexp.data.tokenizers.bytes import byte_level
from llmexp.hf import reading
from llmexp.hf.export import Stored, export_model
from llmexp.hf.families import FAMILIES
from llmexp.hf.multipliers import multipliers
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama

SIZES = {
    "vocab_size": 61, "max_position_embeddings": 32, "n_layers": 2, "n_heads": 6, "d_model": 48,
    "d_ff": 80,
}  # fmt: skip
SCALING = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING["original_max_position_embeddings"] = 16
# Multipliers 1/4 and 8 / sqrt(16): powers of two, so that weights come back as they were.
MUP = {"parametrization": "mup", "base_width": 12}
GROUPED: dict[str, Any] = SIZES | {"n_kv_heads": 2, "rope_theta": 100.0, "norm_eps": 1e-4}
EXPERTS = GROUPED | {"n_experts": 5, "balance": "sequence", "tied_head": False}
MODELS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "gpt2": (GPT2, SIZES),
    "gpt2, exact gelu": (GPT2, SIZES | {"gelu": "exact"}),
    "gpt2, mup": (GPT2, SIZES | MUP | {"n_heads": 3}),
    "llama, mup": (Llama, GROUPED | MUP | {"head_dim": 16, "tied_head": False}),
    "qwen3, mup": (Llama, GROUPED | MUP | {"qk_norm": "head", "head_dim": 16}),
    "llama": (Llama, GROUPED),
    "llama, one group": (Llama, GROUPED | {"n_kv_heads": 1}),
    "llama, no groups": (Llama, GROUPED | {"n_kv_heads": 6}),
    "llama, scaled, head": (Llama, GROUPED | {"rope_scaling": SCALING, "tied_head": False}),
    "llama, biases": (Llama, GROUPED | {"biases": "all", "head_dim": 10}),
    "qwen2": (Llama, GROUPED | {"biases": "qkv"}),
    "qwen3": (Llama, GROUPED | {"qk_norm": "head", "head_dim": 12}),
    "olmo2": (Llama, GROUPED | {"qk_norm": "full", "norm": "post", "tied_head": False}),
    "mistral": (Llama, GROUPED | {"sliding_window": 5, "tied_head": False}),
    "olmoe": (Llama, EXPERTS | {"qk_norm": "full", "norm_topk": False, "experts_per_token": 3}),
    "qwen3_moe": (Llama, EXPERTS | {"qk_norm": "head", "d_expert": 20, "first_dense_layers": 1}),
}
# Under 200 sums of at most 80 terms one after another, each good to 80 x 1.1e-16, times ten.
TOLERANCE = 2e-11


def made(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of the kind with weights far from their first values, and its section."""
    torch.manual_seed(0)
    build, knobs = MODELS[kind]
    section = {"_target_": f"{build.__module__}.{build.__name__}", **knobs}
    model = bind("model", section, {})().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model, section


def stored(model: nn.Module, folder: Path) -> Loaded:
    """The model as a checkpoint."""
    pieces = saving.snapshot(model, [], 0, 1, True)
    saving.write_pieces(folder, 7, pieces)
    return read_checkpoint(saving.commit_checkpoint(folder, 7, pieces, {}, {}, None))


def exported(kind: str, tmp_path: Path) -> tuple[nn.Module, dict[str, Any], Path]:
    model, section = made(kind)
    (tmp_path / "config.yaml").write_text("a: 1\n")
    folder = tmp_path / "out"
    export_model(stored(model, tmp_path), section, byte_level(), folder, Stored(), tmp_path)
    return model, section, folder


def in_fp64(reference: nn.Module, knobs: dict[str, Any]) -> None:
    """Let transformers' norms and rotary tables compute in fp64; they go through fp32 by
    themselves."""

    def norm(module: nn.Module) -> Any:
        eps = module.variance_epsilon
        return lambda x: module.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)

    def rotary(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        width = knobs.get("head_dim") or knobs["d_model"] // knobs["n_heads"]
        table = angles(x.shape[1], width, knobs["rope_theta"], knobs.get("rope_scaling"))
        both = torch.from_numpy(np.concatenate((table, table), axis=-1))[None]
        return both.cos(), both.sin()

    def scored(module: Any) -> Any:
        def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = x.reshape(-1, x.shape[-1]) @ module.weight.T
            best, chosen = logits.softmax(-1).topk(module.top_k, dim=-1)
            best = best / best.sum(-1, keepdim=True) if module.norm_topk_prob else best
            return logits, best, chosen

        return forward

    for module in reference.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = scored(module)
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm(module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = rotary


def angles(length: int, width: int, theta: float, scaling: dict[str, float] | None) -> np.ndarray:
    """Angle of each position (rows) and feature pair (columns), wave by wave, as the paper of
    Llama 3 and its code say."""
    frequencies = []
    for i in range(width // 2):
        frequency = theta ** (-2 * i / width)
        if scaling:
            old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            wave = 2 * math.pi / frequency
            if wave > old / low:
                frequency /= factor
            elif wave >= old / high:
                smooth = (old / wave - low) / (high - low)
                frequency = (1 - smooth) * frequency / factor + smooth * frequency
        frequencies.append(frequency)
    return np.arange(length)[:, None] * np.array(frequencies)[None, :]


def one_by_one(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors as files have them: transformers holds the experts of a layer together."""
    for name, tensor in tensors.items():
        base, _, last = name.rpartition(".")
        if not base.endswith(".experts"):
            yield name, tensor
            continue
        for number, of_one in enumerate(tensor):
            parts = {last: of_one}
            if last == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), of_one.chunk(2), strict=True))
            for part, value in parts.items():
                yield f"{base}.{number}.{part}.weight", value


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).abs().max() <= TOLERANCE * max(1.0, expected.abs().max()))


def comes_back(model: nn.Module, section: dict[str, Any], folder: Path, again: Path) -> None:
    """Assert that what was exported, and what transformers saves of it, are our weights to the
    bit."""
    assert (again / "model.safetensors.index.json").exists()
    first, second = load_file(folder / "model.safetensors"), {}
    for shard in again.glob("*.safetensors"):
        second |= load_file(shard)
    assert first.keys() == second.keys() - {"lm_head.weight"} | ({"lm_head.weight"} & first.keys())
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    fresh, wanted = copy.deepcopy(model), dict(model.named_parameters())
    for place in (folder, again):
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter.zero_()
        source = reading.open_source(str(place))
        assert reading.check_weights(source, section, fresh) == []
        reading.begin_with(fresh, source, section)
        assert all(torch.equal(p, wanted[name]) for name, p in fresh.named_parameters())


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_goes_to_transformers_and_comes_back(kind: str, tmp_path: Path) -> None:
    """Logits, loss and gradients equal; what is saved there comes back byte by byte."""
    model, section, folder = exported(kind, tmp_path)
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
    )
    assert kind.split(",")[0] == reference.config.model_type
    reference.save_pretrained(tmp_path / "again", max_shard_size="60KB")
    comes_back(model, section, folder, tmp_path / "again")
    tokens_bt = torch.randint(0, 61, (2, 24))
    with torch.no_grad():  # as it comes: some ten roundings to fp32, and what follows from them
        ours, theirs = model(tokens_bt), reference(tokens_bt).logits
    off = float((ours - theirs).abs().max() / max(1.0, float(theirs.abs().max())))
    assert off <= (TOLERANCE if kind.startswith("gpt2") else 100 * 2**-24)
    in_fp64(reference, section)
    logits = model(tokens_bt), reference(tokens_bt).logits
    assert close(*logits)
    losses = [
        nn.functional.cross_entropy(some[:, :-1].flatten(0, 1), tokens_bt[:, 1:].flatten())
        for some in logits
    ]
    assert abs(losses[0] - losses[1]) < TOLERANCE
    for loss in losses:
        loss.backward()
    gradients = dict(one_by_one({name: p.grad for name, p in reference.named_parameters()}))
    family, _ = reading.from_config(reference.config.to_dict(), "there")
    own, factor, seen = dict(model.named_parameters()), multipliers(section), set[str]()
    for rule in family.tensors(section):
        expected = gradients[rule.theirs]
        expected = expected.T if rule.transposed and expected.ndim == 2 else expected
        grads = [own[name].grad / factor(name) for name in rule.ours]
        grads = grads if rule.expert is None else [grads[0][rule.expert]]
        assert close(torch.cat(grads), expected), rule.theirs
        seen |= set(rule.ours)
    assert seen == set(own)


def test_weights_beyond_a_dtype_are_not_written(tmp_path: Path) -> None:
    model, section = made("gpt2")
    with torch.no_grad():
        next(model.parameters())[3, 3] = 1e5
    loaded, out = stored(model, tmp_path), tmp_path / "out"
    with pytest.raises(ValueError, match="has values that are not finite in F16"):
        export_model(loaded, section, byte_level(), out, Stored(torch.float16), tmp_path)
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("kind", dict.fromkeys(family.model_type for family in FAMILIES))
def test_keys_that_are_absent_mean_what_they_mean_to_transformers(kind: str) -> None:
    import transformers

    given: dict[str, Any] = {"n_positions": 8, "n_layer": 2, "n_head": 4, "n_embd": 64}
    if kind != "gpt2":
        given = {"max_position_embeddings": 8, "num_hidden_layers": 2, "num_attention_heads": 32}
        given |= {"hidden_size": 64, "intermediate_size": 80, "rms_norm_eps": 1e-4}
    given["vocab_size"] = 61
    whole = transformers.AutoConfig.for_model(kind, **given).to_dict()
    bare = reading.from_config({"model_type": kind, **given}, "there")
    assert bare == reading.from_config(whole, "there")
    assert set(whole) > set(given)
