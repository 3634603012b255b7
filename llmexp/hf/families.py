"""One table a family: how Hugging Face's transformers names what our models name otherwise.

A `NameRule` says how one tensor of theirs is made of ours; read backwards, how ours are cut out of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmexp.config.values import ConfigError, refuse


@dataclass(frozen=True)
class NameRule:
    """A tensor of Hugging Face: ours, one below another (dimension 0).

    They are transposed where Hugging Face keeps the input dimension first. {i} stands for the
    number of a block, {e} for that of an expert, whose matrix is the one of this number in ours.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    expert: int | None = None

    def at(self, block: int, expert: int | None = None) -> NameRule:
        """Return the rule of a block, and of one of its experts."""
        ours = tuple(name.format(i=block) for name in self.ours)
        return replace(self, theirs=self.theirs.format(i=block, e=expert), ours=ours, expert=expert)

    def shape(self, of: Callable[[str], tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of theirs, by those of ours."""
        first, *others = map(of, self.ours)
        if self.expert is not None:
            return first[1:]
        found = (first[0] + sum(one[0] for one in others), *first[1:]) if others else first
        return found[::-1] if self.transposed else found


@dataclass(frozen=True)
class Family:
    """A kind of model in transformers.

    `target`: our class. `switches`: what of our class it is, by knobs that change the arithmetic;
    those that are not named are off. `sizes`: our knob -> their key. `fixed`: their keys with the
    one value that our class computes. `absent`: values of keys that a config.json need not have,
    where transformers takes no part of another key for them.
    """

    model_type: str
    architecture: str
    target: str
    switches: Mapping[str, Any]
    sizes: Mapping[str, str]
    fixed: Mapping[str, Any]
    rules: tuple[NameRule, ...]
    ignored: tuple[str, ...]  # ends of the names of tensors that hold no weights of their own
    mlp: tuple[NameRule, ...] = ()  # of first dense blocks, where the others have `experts`
    experts: tuple[NameRule, ...] = ()
    absent: Mapping[str, Any] = field(default_factory=dict)

    def tensors(self, section: Mapping[str, Any]) -> Iterator[NameRule]:
        """Yield the rule of each tensor of a model with these knobs."""
        blocks = range(section["n_layers"])
        for rule in self.rules:
            yield from map(rule.at, blocks if "{i}" in rule.theirs else [0])
        for block in blocks:
            for rule in self.mlp if block < section.get("first_dense_layers", 0) else self.experts:
                for expert in range(section["n_experts"]) if "{e}" in rule.theirs else [None]:
                    yield rule.at(block, expert)
        if not section.get("tied_head", True):
            yield NameRule("lm_head.weight", ("head.weight",))


# The switches of llmexp.models.llama.Llama, when they are off.
OFF = {"biases": "none", "qk_norm": "none", "norm": "pre", "sliding_window": None}
# What a model section need not list.
USUAL = {
    **OFF,
    "dropout": 0.0,
    "gelu": "tanh",
    "experts_per_token": 2,
    "norm_topk": True,
    "d_expert": None,
    "first_dense_layers": 0,
    "head_dim": None,
    "norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tied_head": True,
}


# A row a layer or norm: theirs, ours (several are one below another), the values of `biases` at
# which it has a bias, and T where Hugging Face keeps the input dimension first (Conv1D).
_GPT2 = """
transformer.wte                 token_embedding
transformer.wpe                 position_embedding
transformer.h.{i}.ln_1          blocks.{i}.attention_norm       all
transformer.h.{i}.attn.c_attn   {qkv}                           all  T
transformer.h.{i}.attn.c_proj   blocks.{i}.attention.out_proj   all  T
transformer.h.{i}.ln_2          blocks.{i}.mlp_norm             all
transformer.h.{i}.mlp.c_fc      blocks.{i}.mlp.up_proj          all  T
transformer.h.{i}.mlp.c_proj    blocks.{i}.mlp.down_proj        all  T
transformer.ln_f                final_norm                      all
"""
_ATTENTION = """
model.embed_tokens                  token_embedding
model.layers.{i}.self_attn.q_proj   blocks.{i}.attention.q_proj     qkv  all
model.layers.{i}.self_attn.k_proj   blocks.{i}.attention.k_proj     qkv  all
model.layers.{i}.self_attn.v_proj   blocks.{i}.attention.v_proj     qkv  all
model.layers.{i}.self_attn.o_proj   blocks.{i}.attention.out_proj   all
"""
_QK_NORM = """
model.layers.{i}.self_attn.q_norm   blocks.{i}.attention.q_norm
model.layers.{i}.self_attn.k_norm   blocks.{i}.attention.k_norm
"""
_MLP = """
model.layers.{i}.mlp.gate_proj   blocks.{i}.mlp.gate_proj   all
model.layers.{i}.mlp.up_proj     blocks.{i}.mlp.up_proj     all
model.layers.{i}.mlp.down_proj   blocks.{i}.mlp.down_proj   all
"""
_EXPERT_ROWS = """
model.layers.{i}.mlp.gate                    blocks.{i}.mlp.router
model.layers.{i}.mlp.experts.{e}.gate_proj   blocks.{i}.mlp.gate_proj
model.layers.{i}.mlp.experts.{e}.up_proj     blocks.{i}.mlp.up_proj
model.layers.{i}.mlp.experts.{e}.down_proj   blocks.{i}.mlp.down_proj
"""
_QKV = ",".join(f"blocks.{{i}}.attention.{letter}_proj" for letter in "qkv")


def _rules(table: str, biases: str = "all") -> tuple[NameRule, ...]:
    """Return the rules of a table: of weights, and of biases where there are some."""
    found = []
    for theirs, ours, *more in filter(None, map(str.split, table.splitlines())):
        for part in ("weight", "bias")[: 1 + (biases in more)]:
            names = tuple(f"{name}.{part}" for name in ours.split(","))
            found.append(NameRule(f"{theirs}.{part}", names, "T" in more and part == "weight"))
    return tuple(found)


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


def _gpt2() -> Family:
    return Family(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        target="llmexp.models.gpt2.GPT2",
        switches={},
        sizes=_pairs(
            "vocab_size=vocab_size max_position_embeddings=n_positions n_layers=n_layer "
            "n_heads=n_head d_model=n_embd d_ff=n_inner"
        ),
        fixed={
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        rules=_rules(_GPT2.replace("{qkv}", _QKV)),
        ignored=(".attn.bias", ".attn.masked_bias", "lm_head.weight"),
    )


def _decoder(
    model_type: str,
    architecture: str,
    switches: Mapping[str, Any],
    fixed: Mapping[str, Any],
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    absent: Mapping[str, Any] | None = None,
    experts: Mapping[str, str] | None = None,
) -> Family:
    """Return a family of decoders: `norms` are their names of the two of a block.

    `experts`: further sizes of a family with experts, our knob -> their key.
    """
    biases = switches.get("biases", "none")
    table = _ATTENTION + _QK_NORM * ("qk_norm" in switches) + _MLP * (not experts)
    for theirs, ours in zip(norms, ("attention_norm", "mlp_norm"), strict=True):
        table += f"model.layers.{{i}}.{theirs} blocks.{{i}}.{ours}\n"
    sizes = _pairs(
        "vocab_size=vocab_size max_position_embeddings=max_position_embeddings "
        "n_layers=num_hidden_layers n_heads=num_attention_heads n_kv_heads=num_key_value_heads "
        "d_model=hidden_size d_ff=intermediate_size norm_eps=rms_norm_eps "
        "tied_head=tie_word_embeddings"
    )
    return Family(
        model_type=model_type,
        architecture=architecture,
        target="llmexp.models.llama.Llama",
        switches=switches,
        sizes={**sizes, **(experts or {})},
        fixed={"hidden_act": "silu", **fixed},
        rules=_rules(f"{table}model.norm final_norm", biases),
        ignored=("rotary_emb.inv_freq",),
        mlp=_rules(_MLP, biases) if experts else (),
        experts=_rules(_EXPERT_ROWS) if experts else (),
        absent=absent or {},
    )


_PLAIN = {"attention_bias": False, "mlp_bias": False}
_BIASED = {"attention_bias": True, "mlp_bias": True}
_NO_WINDOW = {"use_sliding_window": False}
_EXPERTS = {
    "n_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "norm_topk": "norm_topk_prob",
}
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
FAMILIES = (
    _gpt2(),
    _decoder("llama", "LlamaForCausalLM", {}, _PLAIN),
    _decoder("llama", "LlamaForCausalLM", {"biases": "all"}, _BIASED),
    _decoder(
        "mistral",
        "MistralForCausalLM",
        {"sliding_window": any},
        {},
        absent={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    _decoder(
        "qwen2",
        "Qwen2ForCausalLM",
        {"biases": "qkv"},
        _NO_WINDOW,
        absent={"num_key_value_heads": 32},
    ),
    _decoder(
        "qwen3",
        "Qwen3ForCausalLM",
        {"qk_norm": "head"},
        {"attention_bias": False, **_NO_WINDOW},
        absent={"num_key_value_heads": 32, "head_dim": 128},
    ),
    _decoder(
        "olmo2",
        "Olmo2ForCausalLM",
        {"qk_norm": "full", "norm": "post"},
        {"attention_bias": False},
        _AFTER,
    ),
    _decoder(
        "olmoe",
        "OlmoeForCausalLM",
        {"qk_norm": "full"},
        {"attention_bias": False, "clip_qkv": None},
        absent={"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        experts=_EXPERTS,
    ),
    _decoder(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {"qk_norm": "head"},
        {"attention_bias": False, "decoder_sparse_step": 1, **_NO_WINDOW},
        absent={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        experts=_EXPERTS | {"d_expert": "moe_intermediate_size"},
    ),
)


def family_of(section: Mapping[str, Any]) -> Family:
    """Return the family of a model section.

    Raises ConfigError for a model that transformers does not have.
    """
    target = section["_target_"]
    ours = [family for family in FAMILIES if family.target == target]
    if ours and section.get("n_experts"):
        _check_experts(section)
    for family in ours:
        if bool(family.experts) != bool(section.get("n_experts")):
            continue
        wanted = {key: family.switches.get(key, off) for key, off in OFF.items()}
        given = {key: section.get(key, off) for key, off in OFF.items()}
        if wanted["sliding_window"] is any and given["sliding_window"] is not None:
            wanted["sliding_window"] = given["sliding_window"]
        if wanted == given:
            return family
    if ours:
        switches = ", ".join(f"model.{key}={section.get(key, off)}" for key, off in OFF.items())
        text = "no family of transformers has all of"
        if section.get("n_experts"):
            text = (
                "families with experts have model.qk_norm=full or model.qk_norm=head, and none has"
            )
        raise ConfigError("unsupported", f"{text} {switches}")
    known = sorted({family.target for family in FAMILIES})
    raise ConfigError(
        "unsupported",
        f"model._target_={target}: only {' and '.join(known)} have a counterpart in transformers; "
        "of another model, model.safetensors in a checkpoint's folder holds the weights under "
        "the names of its parameters",
    )


def _check_experts(section: Mapping[str, Any]) -> None:
    """Raise ConfigError for what experts of transformers' families do not compute."""
    plain = {"router": "softmax", "router_bias": False, "n_shared_experts": 0}
    given = {**plain, "balance": "bias", **section}
    for key, value in {**plain, "balance": "sequence"}.items():
        if given[key] not in (value, "none"):
            text = "no family of transformers that we write has such experts"
            raise refuse("unsupported", f"model.{key}", given[key], text, value)


def to_config(section: Mapping[str, Any], end: int | None) -> dict[str, Any]:
    """Return the config.json of a model section.

    `end`: the id that ends a document. Raises ValueError as `family_of`.
    """
    family, knobs = family_of(section), {**USUAL, **section}
    found: dict[str, Any] = {"architectures": [family.architecture]}
    found["model_type"] = family.model_type
    found |= {theirs: knobs[ours] for ours, theirs in family.sizes.items()}
    found |= family.fixed
    if family.model_type == "gpt2":
        found |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), knobs["dropout"])
        found["n_ctx"] = knobs["max_position_embeddings"]  # llama.cpp's converter reads it
        found["activation_function"] = "gelu" if knobs["gelu"] == "exact" else "gelu_new"
    else:
        found["attention_dropout"] = knobs["dropout"]
        found["head_dim"] = knobs["head_dim"] or knobs["d_model"] // knobs["n_heads"]
        found["rope_theta"] = knobs["rope_theta"]
        if knobs["rope_scaling"] is not None:
            found["rope_scaling"] = {"rope_type": "llama3", **knobs["rope_scaling"]}
        if family.experts:
            inner = family.sizes.get("d_expert", "intermediate_size")
            found[inner] = knobs["d_expert"] or knobs["d_ff"]
            found["mlp_only_layers"] = list(range(knobs.get("first_dense_layers", 0)))
        if knobs["sliding_window"] is not None:
            found["sliding_window"] = knobs["sliding_window"]
            # else transformers warns of a regular expression that only older files have
            found["transformers_version"] = "5.0.0"
    return found | {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}


def from_config(config: Mapping[str, Any], where: str) -> tuple[Family, dict[str, Any]]:
    """Return the family of a config.json and the knobs of our model that computes the same.

    `where` names the file in errors. Raises ConfigError for what our models do not compute.
    """
    kind = config.get("model_type")
    known = [family for family in FAMILIES if family.model_type == kind]
    if not known:
        kinds = ", ".join(sorted({family.model_type for family in FAMILIES}))
        raise ConfigError(
            "unsupported",
            f"{where}: model_type={kind}: no model of ours computes it; known: {kinds}; any other "
            "is trained by model=hf model.path=FOLDER",
        )
    family = next((f for f in known if _other(config, f) is None), known[0])
    if "num_local_experts" in config:  # another name of the same
        config = {"num_experts": config["num_local_experts"], **config}
    config = {**family.absent, **config}
    if (key := _other(config, family)) is not None:
        text = f"{where}: {key}={config[key]!r}: our model computes {family.fixed[key]!r} only"
        raise ConfigError("unsupported", text)
    needed = {"vocab_size", "max_position_embeddings", "n_layers", "n_heads", "d_model", "norm_eps"}
    needed &= family.sizes.keys()
    if absent := [family.sizes[key] for key in needed if not config.get(family.sizes[key])]:
        raise ConfigError("damaged_file", f"{where}: lacks {', '.join(sorted(absent))}")
    knobs = {
        ours: _value(config, ours, theirs, where)
        for ours, theirs in family.sizes.items()
        if config.get(theirs) is not None
    }
    if kind == "gpt2":
        knobs.setdefault("d_ff", 4 * knobs["d_model"])
        knobs["gelu"] = _gelu(config.get("activation_function", "gelu_new"), where)
        return family, knobs
    if family.experts:
        dense = config.get("mlp_only_layers") or []
        if dense != list(range(len(dense))):
            text = f"{where}: mlp_only_layers={dense}: ours are the first blocks"
            raise ConfigError("unsupported", text)
        knobs["first_dense_layers"] = len(dense)
    knobs.setdefault("n_kv_heads", knobs["n_heads"])
    knobs.setdefault("tied_head", False)  # as in transformers
    width = knobs["d_model"] // knobs["n_heads"]
    head_dim = config.get("head_dim") or width
    knobs["head_dim"] = None if head_dim == width else head_dim
    knobs |= {key: family.switches.get(key, off) for key, off in OFF.items()}
    knobs["sliding_window"] = config.get("sliding_window") if kind == "mistral" else None
    return family, knobs | _rope(config, where)


def _value(config: Mapping[str, Any], ours: str, theirs: str, where: str) -> Any:
    """Return the value of a knob of ours. Raises ConfigError for one of another type."""
    value = config[theirs]
    kinds = {"norm_eps": float, "tied_head": bool, "norm_topk": bool}
    if type(value) is not (kind := kinds.get(ours, int)):
        raise ConfigError(
            "damaged_file", f"{where}: {theirs}={value!r}: must be of type {kind.__name__}"
        )
    return value


def _other(config: Mapping[str, Any], family: Family) -> str | None:
    """Return the first key whose value is not the fixed one of the family."""
    other = (k for k, v in family.fixed.items() if config.get(k) is not None and config[k] != v)
    return next(other, None)


def _gelu(name: str, where: str) -> str:
    kinds = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}
    if not (isinstance(name, str) and name in kinds):
        raise ConfigError(
            "unsupported", f"{where}: activation_function={name}: known: {', '.join(kinds)}"
        )
    return kinds[name]


ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the knobs of the rotary positions, in the form of transformers 5 or of before."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ConfigError(
            "damaged_file", f"{where}: the rotary positions are {given!r}: must be an object"
        )
    theta = given.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConfigError(
            "unsupported", f"{where}: rope_type={kind}: our models know default and llama3 only"
        )
    scaling = {key: given.get(key) for key in ROPE} if kind == "llama3" else None
    for key, value in {"rope_theta": theta, **(scaling or {})}.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError("damaged_file", f"{where}: {key}={value!r}: must be a number")
    return {"rope_theta": float(theta), "rope_scaling": scaling}
