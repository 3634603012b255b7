"""Set rate, batch, weight decay and beta2 by a rule, from the size of a run.

All rules are power laws through a reference (`settings.rules.SCALING_RULES`), solved in one order:
parameters N, tokens D and FLOPs C of the budget, tokens per step B, rate, weight decay, beta2.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from llmexp.config.convert import checked_knob
from llmexp.config.rules import (
    LIBRARY_TARGET,
    SCALING_RULES,
    SET,
    Exponents,
    Powers,
    Reference,
    ScalingRule,
)
from llmexp.config.sections import Batch, Config
from llmexp.config.values import ConfigError, refuse
from llmexp.config.variables import fill
from llmexp.run.batch import BATCH_TOTALS, CUT_KEYS, solve_batch
from llmexp.run.budget import DEFAULT_MAX_STEPS, TokenCost, tokens_of

BATCH_KEYS = (*BATCH_TOTALS, "batch.ramp")  # one of them is enough
NOT_OF_ADAM = (
    "llmexp.optim.optimizers.sgd.sgd", "llmexp.optim.optimizers.lion.lion",
    "llmexp.optim.optimizers.adafactor.adafactor",
)  # fmt: skip
BUDGET = "a budget in tokens: train.max_tokens, train.max_flops or train.tokens_per_parameter"
KNOWN = {  # what makes a number known
    "D": BUDGET,
    "C": f"{BUDGET}, and a model that counts its FLOPs (`flops_per_token`)",
    "lr": "optimizer.lr, a number",
}


@dataclass(frozen=True)
class Chosen:
    """A rule with its reference and its power laws, as a config has them."""

    name: str
    rule: ScalingRule
    at: Reference
    powers: Exponents

    def law(self, target: str) -> Powers | None:
        """Return the power law of a value that the rule sets; None where it does not."""
        found: Powers | None = getattr(self.powers, target)
        return found

    def formula(self, target: str) -> str:
        """Return a power law in words: lr = 0.0047 x (N / 1.08e+08)^-0.3333."""
        factors = [self._number(target)]
        for name, power in vars(self.law(target)).items():
            if power:
                base = name if getattr(self.at, name) == 1 else f"({name} / {self._number(name)})"
                factors.append(base if power == 1 else f"{base}^{power:.4g}")
        return f"{target} = {' x '.join(factors)}"

    def _number(self, name: str) -> str:
        value = getattr(self.at, name)
        return f"{name}_ref" if value is None else f"{value:.6g}"


def rules_in_words() -> dict[str, str]:
    """Return the power laws and the source of each rule."""
    found = {}
    for name, rule in SCALING_RULES.items():
        one = Chosen(name, rule, rule.at or Reference(), rule.powers)
        laws = [one.formula(target) for target in SET if one.law(target) is not None]
        if rule.beta2 is not None:
            laws.append("beta2 = {1} from {0:,} tokens a step on, {2} below".format(*rule.beta2))
        found[name] = f"{'; '.join(laws) or 'any power laws'} ({rule.source})"
    return found


def _chosen(optimizer: dict[str, Any]) -> Chosen | None:
    """Return the rule of an optimizer section, None without one.

    Raises ConfigError where it lacks what it needs, and for what it does not use."""
    keys = ("rule", "reference", "exponents")
    name, at, powers = (
        checked_knob(f"optimizer.{key}", fill(optimizer.get(key) or usual, f"optimizer.{key}"))
        for key, usual in zip(keys, ("none", {}, {}), strict=True)
    )
    if powers != Exponents() and name != "reference":
        text = f"does nothing with optimizer.rule={name}; choose optimizer.rule=reference"
        raise refuse("idle_knob", "optimizer.exponents", _given(optimizer["exponents"]), text)
    if name == "none" or (rule := SCALING_RULES[name]).at is not None:
        if at != Reference():
            text = f"does nothing with optimizer.rule={name}; leave it out, or choose one of "
            text += ", ".join(key for key, one in SCALING_RULES.items() if one.at is None)
            raise refuse("idle_knob", "optimizer.reference", _given(optimizer["reference"]), text)
        return None if name == "none" else Chosen(name, rule, rule.at or at, rule.powers)
    found = Chosen(name, rule, at, powers if name == "reference" else rule.powers)
    _check(found)
    return found


def _given(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None}


def _check(found: Chosen) -> None:
    """Raise ConfigError for power laws through a reference that does not have their numbers."""
    needed = []
    for target, above in (("B", ("B", "lr")), ("lr", ("lr",)), ("weight_decay", ())):
        if (law := found.law(target)) is None:
            continue
        if wrong := [name for name in above if getattr(law, name)]:
            text = f"{target} is set before {wrong[0]}; leave it out"
            raise refuse(
                "unsupported",
                f"optimizer.exponents.{target}.{wrong[0]}",
                getattr(law, wrong[0]),
                text,
            )
        needed += [target, *(name for name, power in vars(law).items() if power)]
    if not needed:
        text = "optimizer.rule=reference needs power laws"
        raise refuse(
            "missing_value", "optimizer.exponents", {}, text, {"lr": {"N": -0.33, "B": 0.5}}
        )
    missing = [name for name in dict.fromkeys(needed) if getattr(found.at, name) is None]
    if missing:
        usual = Reference(lr=1e-3, weight_decay=0.1, N=1e7, D=2e8, C=1e16, B=4096)
        text = f"optimizer.rule={found.name} starts from a run whose {' and '.join(missing)} it "
        text += "has to know"
        example = {n: getattr(found.at, n) or getattr(usual, n) for n in dict.fromkeys(needed)}
        raise refuse("missing_value", "optimizer.reference", _given(vars(found.at)), text, example)


def batch_is_open(batch: Batch) -> bool:
    """Return whether no size of the batch is given, so that a rule may set it."""
    size = any(getattr(batch, key.partition(".")[2]) is not None for key in BATCH_KEYS)
    return not size and len(_parts(batch)) < len(CUT_KEYS)


def check_batch(config: Config, dp_size: int) -> None:
    """Raise ConfigError for a batch that cannot be cut, before a rule makes one that can."""
    if not batch_is_open(config.batch) or _chosen(config.optimizer) is None:
        solve_batch(config.batch, dp_size)


def _parts(batch: Batch) -> list[int]:
    """Return the sizes that are given of a batch's cut."""
    given = (getattr(batch, key.partition(".")[2]) for key in CUT_KEYS)
    return [size for size in given if isinstance(size, int)]


def keys_set(optimizer: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the keys that the rule of a plain section may set; those of the batch by themselves.

    A section that is refused later has none."""
    try:
        found = _chosen(optimizer)
    except ConfigError:
        found = None
    if found is None:
        return {}
    keys = [SET[target] for target in ("lr", "weight_decay") if found.law(target) is not None]
    keys += ["optimizer.beta2"] if found.rule.beta2 else []
    sizes = (*BATCH_KEYS, *CUT_KEYS) if found.law("B") is not None else ()
    return {"optimizer": tuple(keys), "batch": sizes}


def rate_by_batch(optimizer: dict[str, Any], ratio: float) -> float:
    """Return the factor on a rate of a batch that is `ratio` times as large, by the rule."""
    found = _chosen(optimizer)
    law = None if found is None else found.law("lr")
    return 1.0 if law is None else ratio**law.B


def solve_rule(config: Config, dp_size: int, token_cost: TokenCost) -> tuple[Config, str | None]:
    """Return the config with what optimizer.rule sets, and that in words; None without a rule.

    Values that are given stay, so a config with all that was set is solved into itself.
    `token_cost`: of the model. Raises ConfigError.
    """
    if (found := _chosen(config.optimizer)) is None:
        return config, None
    optimizer, words = dict(config.optimizer), []
    _check_optimizer(found, optimizer)
    known = _sizes(config, token_cost)
    batch = config.batch
    if found.law("B") is not None:
        batch, said = _batch(found, batch, dp_size, known)
        words.append(said)
    solved = solve_batch(batch, dp_size)
    known["B"] = solved.real_batch_size * batch.sequence_length
    known = _sizes(config, token_cost, known["B"]) | known
    for target in ("lr", "weight_decay"):
        if found.law(target) is not None and target in optimizer:
            given = fill(optimizer[target], SET[target])
            by_rule = _value(found, target, known, needed=given is None)
            optimizer[target] = by_rule if given is None else optimizer[target]
            words.append(_said(found, target, by_rule, given))
        if target == "lr" and isinstance(rate := fill(optimizer.get("lr"), SET["lr"]), int | float):
            known["lr"] = rate
    if found.rule.beta2 is not None and "beta2" in optimizer:
        words.append(_beta2(found.rule.beta2, optimizer, known["B"]))
    laws = [law for target in SET if (law := found.law(target)) is not None]
    used = [name for name in "NDCB" if name in known and any(getattr(law, name) for law in laws)]
    sizes = ", ".join(f"{name} {known[name]:,.10g}" for name in used)
    text = f"{found.name} ({found.rule.source}), {sizes}: {'; '.join(words)}"
    return dataclasses.replace(config, optimizer=optimizer, batch=batch), text


def _check_optimizer(found: Chosen, optimizer: dict[str, Any]) -> None:
    """Raise ConfigError where the optimizer has no rate that the rule could set."""
    text = ""
    if found.law("lr") is not None and "lr" not in optimizer:
        text = "there is no rate `lr` in this section that it could set; leave it out"
    elif found.rule.at is not None and not _is_adam(optimizer):
        text = "its constants are of AdamW's rate; choose optimizer=adamw or optimizer=muon"
    if text:
        raise refuse("conflict", "optimizer.rule", found.name, text)


def _is_adam(optimizer: dict[str, Any]) -> bool:
    """Return whether a rate of AdamW's suits an optimizer; a library's is known by its name."""
    of_library = optimizer.get("_target_") == LIBRARY_TARGET
    named = not of_library or "adam" in str(optimizer.get("name")).lower()
    return named and optimizer.get("_target_") not in NOT_OF_ADAM


def _sizes(
    config: Config, token_cost: TokenCost, tokens_per_step: float | None = None
) -> dict[str, float]:
    """Return parameters N, tokens D and FLOPs C of the whole run, as far as they are known."""
    known: dict[str, float] = {"N": token_cost.parameters}
    train = config.train
    tokens: float | None = tokens_of(train, token_cost)
    in_steps = tokens is None and train.max_epochs is None
    if in_steps and tokens_per_step and config.batch.ramp is None and config.fork.run is None:
        tokens = (train.max_steps or DEFAULT_MAX_STEPS) * tokens_per_step
    if tokens is not None:
        known["D"] = tokens
        if token_cost.flops_per_token is not None:
            known["C"] = tokens * token_cost.flops_per_token
    return known


def _value(found: Chosen, target: str, known: dict[str, float], needed: bool) -> float | None:
    """Return what a power law makes of a value.

    None where a number is not known. Raises ConfigError where it is `needed`, then."""
    value: float = getattr(found.at, target)
    for name, power in vars(found.law(target)).items():
        if not power:
            continue
        if name not in known:
            if not needed:
                return None
            text = f"{found.formula(target)} needs {KNOWN[name]}; or give {SET[target]}"
            raise refuse("missing_value", "optimizer.rule", found.name, text)
        value *= (known[name] / getattr(found.at, name)) ** power
    return value


def _said(found: Chosen, target: str, by_rule: float | None, given: Any) -> str:
    """Return in words what a rule has set, or what stays beside it because it was given."""
    if by_rule is None:
        return f"{target} {given} is given"
    if given is None or (isinstance(given, int | float) and math.isclose(given, by_rule)):
        return f"{found.formula(target)} = {by_rule:.6g}"
    return f"{target} {given} is given (by the rule {found.formula(target)} = {by_rule:.6g})"


def _batch(found: Chosen, batch: Batch, dp_size: int, known: dict[str, float]) -> tuple[Batch, str]:
    """Return the batch with the sequences that a rule gives a step, rounded, and that in words.

    They are a multiple of what is given of the cut. Raises ConfigError."""
    is_open = batch_is_open(batch)
    tokens = _value(found, "B", known, needed=is_open)
    if is_open and tokens is not None:
        unit = math.prod(_parts(batch)) * dp_size
        wanted = tokens / batch.sequence_length
        sequences = max(1, math.floor(wanted / unit + 0.5)) * unit
        batch = dataclasses.replace(batch, real_batch_size=sequences)
    solved = solve_batch(batch, dp_size)
    real, length = solved.real_batch_size, batch.sequence_length
    if tokens is None:
        return batch, f"B {real * length:,} is given"
    by_rule = f"{found.formula('B')} = {tokens:,.6g}"
    cut = dp_size * (solved.micro_batch_size if solved.gradient_accumulation_steps > 1 else 1)
    if abs(tokens / length - real) < max(cut, 1):
        return batch, f"{by_rule}, rounded to {real} x {length} = {real * length:,}"
    return batch, f"B {real * length:,} is given (by the rule {by_rule})"


def _beta2(law: tuple[int, float, float], optimizer: dict[str, Any], tokens: float) -> str:
    """Put beta2 into the section unless it is given, and return that in words."""
    edge, above, below = law
    by_rule = above if tokens >= edge else below
    given = optimizer["beta2"] if optimizer["beta2"] is not None else by_rule
    optimizer["beta2"] = given
    where = f"{by_rule} {'from' if tokens >= edge else 'below'} {edge:,} tokens a step"
    return (
        f"beta2 = {where}" if given == by_rule else f"beta2 {given} is given (by the rule {where})"
    )
