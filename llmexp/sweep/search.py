"""Have Optuna choose points by the results so far, then train the best ones with fresh seeds.

The ledger and the runs are the memory of a search: Optuna is given all trials anew for each batch,
so a search that was killed goes on as if it had not been.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override

from llmexp.compose.overrides import as_text
from llmexp.config.commands import how_to_install
from llmexp.config.knobs import SEED, fresh_seeds, is_seed
from llmexp.config.labels import plural
from llmexp.config.values import ConfigError, refuse
from llmexp.folders import rundir
from llmexp.folders.folder import RunFolder
from llmexp.folders.ledger import TO_TRAIN, LedgerEntry, PointFacts
from llmexp.sweep.current import Current
from llmexp.sweep.grid import run_copies
from llmexp.sweep.points import Point, asked_of, grid_of
from llmexp.sweep.running import run_rungs, score, stop_of
from llmexp.sweep.table import begin_sweep, checked, copies_of, place_points
from llmexp.system.child import say

_TRIES = 20  # asks for a trial that has not been there before


@dataclass(frozen=True)
class Trial:
    """A point of a search as Optuna sees it; `state` is a name of optuna.trial.TrialState."""

    params: Mapping[str, str]  # the values by their keys, as the command line has them
    state: str
    value: float | None
    step: int = 0  # where a rung left it out


def run_search(current: Current, overrides: Sequence[str]) -> None:
    """Try points until there are enough, then train the best ones again. Raises ConfigError."""
    asked = asked_of(current.cfg, overrides)
    space = {o.get_key_element(): distribution(o) for o in asked if o.is_sweep_override()}
    refuse_bad_search(current, space)
    given = grid_of([o for o in asked if not o.is_sweep_override()])[0]
    if current.opened:
        own = list(filter(is_seed, given))
        for entry in current.ledger.points[:1]:
            if own != list(filter(is_seed, entry.overrides)):
                text = "all trials of a search have one seed; leave this key out"
                raise refuse("other_run", SEED, own[0].partition("=")[2] if own else None, text)
            there = {key.lstrip("+") for key in current.ledger.swept} - {SEED}
            for key in sorted(there ^ {key.lstrip("+") for key in space}):
                text = f"all trials of a search vary the same keys, here {', '.join(there)}"
                raise ConfigError("other_run", f"{key}: {text}; start another search", key)
        begin_sweep(current)
        trials, wanted = history(current, space), current.knobs.search.trials or 0
        many = plural(len(trials), "trial")
        if outside := sum(frozen(trial, space) is None for trial in trials):
            text = "lie outside of what is searched now; nothing is learnt from them"
            say(f"{outside} of {many} {text}")
        if len(trials) >= wanted:
            more = f"sweep.search.trials={len(trials) + 10}"
            say(f"{many} of {wanted} have finished; for more: {more}")
    batch = [params_of(e, space) for e in trials_of(current) if has_no_end(e)]
    facts: PointFacts | None = None
    while not current.over:
        known, proposed = len(trials_of(current)), not batch
        if proposed:
            count = batch_size(current, facts)
            batch = suggest(space, history(current, space), current.knobs.search.sampler, count)
        if not batch:
            break
        texts = [[*given, *(f"{key}={text}" for key, text in one.items())] for one in batch]
        first = current.opened.next_number() if current.opened else 0
        placed = place_points(current, *checked(current, texts, first, list(space)))
        run_rungs(current, placed)
        batch, facts = [], placed[0].facts if placed else facts
        if proposed and not current.over and len(trials_of(current)) == known:
            say(f"the sampler repeated a trial; stopping after {plural(known, 'trial')}")
            break
    confirm(current)


def refuse_bad_search(current: Current, space: Mapping[str, Any]) -> None:
    """Raise ConfigError for a search that cannot be. That needs no more than the command line."""
    search, sampler = current.knobs.search, current.knobs.search.sampler
    if not space:
        text = "no key has values to choose from"
        raise refuse("missing_value", "sweep.search.trials", search.trials, text,
                     f"{search.trials} 'optimizer.lr=tag(log,interval(1e-4,1e-2))'")  # fmt: skip
    if SEED in space:
        text = "no seed is better than another, so a search must not choose one"
        raise ConfigError(
            "unsupported", f"{SEED}: {text}; leave it out, or sweep.search.seeds=5", SEED
        )
    numbers = [key for key, of in space.items() if hasattr(of, "low")]
    if sampler == "cmaes" and (len(numbers) < len(space) or len(space) < 2):
        text = "searches two or more numbers only"
        raise refuse("unsupported", "sweep.search.sampler", sampler, text, "tpe")


def distribution(o: Override) -> Any:
    """Return what Optuna may choose for a key: an interval, a range, or one of some values."""
    try:
        from optuna import distributions
    except ImportError:
        text = f"a search needs the package optuna; {how_to_install('optuna')}"
        raise ConfigError("missing_package", f"sweep.search.trials: {text}") from None
    sweep: Any = o.value()
    key, where = o.get_key_element(), f"{o.input_line}: "
    if not hasattr(sweep, "tags"):  # a glob
        text = "a search takes an interval, a range or choices"
        example = "for example 'optimizer.lr=interval(1e-4,1e-2)'"
        raise ConfigError("wrong_type", f"{where}{text}; {example}")
    log = "log" in sweep.tags
    if o.is_interval_sweep():
        if not sweep.start < sweep.end or (log and sweep.start <= 0):
            needed = "its lower end must be below the upper one"
            needed += ", and above 0 on a log scale" * log
            example = f"'{key}=tag(log,interval(1e-4,1e-2))'"
            raise ConfigError("out_of_range", f"{where}{needed}; for example {example}")
        whole = isinstance(sweep.start, int)
        kind = distributions.IntDistribution if whole else distributions.FloatDistribution
        return kind(sweep.start, sweep.end, log=log)
    texts = [as_text(f"{key}={t}").partition("=")[2] for t in o.sweep_string_iterator()]
    if o.is_range_sweep() and all(text.lstrip("-").isdigit() for text in texts):
        numbers = sorted(map(int, texts))
        if log and numbers[0] <= 0:
            text = f"a log scale has no place for {numbers[0]}; begin it at 1, or leave out "
            raise ConfigError("out_of_range", f"{where}{text}tag(log,...)")
        step = 1 if log else int(abs(sweep.step))
        return distributions.IntDistribution(numbers[0], numbers[-1], log=log, step=step)
    return distributions.CategoricalDistribution(texts)


def _written(value: Any, of: Any) -> str:
    """Return a value that Optuna chose as the command line has it: a number with four digits."""
    if not isinstance(value, float):
        return str(value)
    size = max(abs(of.low), abs(of.high)) / (of.high - of.low)
    digits = 4 if of.log else 4 + max(0, math.ceil(math.log10(size)))
    return f"{min(max(float(f'{value:.{digits}g}'), of.low), of.high):.12g}"


def suggest(
    space: Mapping[str, Any], trials: Sequence[Trial], sampler: str, count: int
) -> list[dict[str, str]]:
    """Return the next points to try, none of them twice; fewer where few are left.

    They follow from the trials alone. Those of a batch count as running, so that Optuna spreads
    them (constant liar).
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    replayed = sampler in ("cmaes", "qmc")  # whose state follows from what they were asked
    study = optuna.create_study(sampler=sampler_of(sampler, 0 if replayed else len(trials)))
    for known in filter(None, (frozen(trial, space) for trial in trials)):
        if not replayed:
            study.add_trial(known)
        else:
            study.enqueue_trial(known.params)
            asked = study.ask(dict(space))
            assert asked.relative_params is not None  # which asks the sampler
            study.tell(asked, known.value, state=known.state)
    tried = {tuple(trial.params.get(key) for key in space) for trial in trials}
    found = list[dict[str, str]]()
    for _ in range(count * _TRIES):
        params = study.ask(dict(space)).params
        texts = {key: _written(params[key], of) for key, of in space.items()}
        if (values := tuple(texts.values())) not in tried:
            tried.add(values)
            found.append(texts)
        if len(found) == count:
            break
    return found


def frozen(trial: Trial, space: Mapping[str, Any]) -> Any:
    """Return a trial as Optuna has it; None for one that lies outside of the space."""
    import optuna

    known: dict[str, Any] = {"state": optuna.trial.TrialState[trial.state], "value": trial.value}
    if trial.state == "PRUNED":
        known["intermediate_values"] = {trial.step: trial.value}
    try:
        params = {
            key: type(of.low)(float(trial.params[key])) if hasattr(of, "low") else trial.params[key]
            for key, of in space.items()
        }
        return optuna.trial.create_trial(params=params, distributions=dict(space), **known)
    except (KeyError, ValueError):
        return None


def sampler_of(name: str, seed: int) -> Any:
    """Return a sampler of Optuna's."""
    from optuna import samplers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some options are called experimental
        if name == "tpe":
            return samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        if name == "qmc":
            return samplers.QMCSampler(seed=seed, scramble=True)
        return {"gp": samplers.GPSampler, "cmaes": samplers.CmaEsSampler}[name](seed=seed)


def trials_of(current: Current) -> list[LedgerEntry]:
    """Return the points that the search has chosen, without those that confirm them."""
    points = current.opened.points if current.opened else []
    return [e for e in points if not current.ledger.is_fresh(e)]


def has_no_end(entry: LedgerEntry) -> bool:
    """Return whether a trial was asked for and has no end: it was cut, or failed for once."""
    failed_once = entry.state == "failed" and entry.failures < 2
    return entry.rung is None and (entry.state in TO_TRAIN or failed_once)


def params_of(entry: LedgerEntry, space: Mapping[str, Any]) -> dict[str, str]:
    """Return the values that were chosen for a point."""
    given = dict(o.partition("=")[::2] for o in entry.overrides)
    return {key: given[key] for key in space if key in given}


def history(current: Current, space: Mapping[str, Any]) -> list[Trial]:
    """Return all trials so far; one that failed or cannot run counts as the worst one."""
    values, found = values_of_trials(current), []
    worst = max(values.values(), default=None)
    for e in trials_of(current):
        value, step = values.get(e.folder, worst), 0
        state = "FAIL" if value is None else "COMPLETE"
        if e.rung is not None and e.folder not in values:
            path = current.ledger.path / e.folder
            step = stop_of(rundir.read_run(path), e.rung)
            state, value = "PRUNED", score(path, step)
        found.append(Trial(params_of(e, space), state, value, step))
    return found


def values_of_trials(current: Current) -> dict[str, float]:
    """Return the final losses of the trials that have one, by their folders, the lowest first.

    They are in bits per byte where the tokenizer is searched too.
    """
    losses, found = ["final val/loss", "final train/loss", "latest train/loss"], dict[str, float]()
    for e in trials_of(current):
        if any(key.split(".")[0] == "tokenizer" for key in current.ledger.swept):
            losses = ["final val/bits_per_byte", *losses]
        summary = RunFolder(current.ledger.path / e.folder).summary
        known = [loss for loss in map(summary.get, losses) if loss is not None]
        if e.state == "finished" and known:
            found[e.folder] = known[0]
    return dict(sorted(found.items(), key=lambda item: item[1]))


def batch_size(current: Current, facts: PointFacts | None) -> int:
    """Return how many trials are asked for: those that run at once, as far as any are left.

    `facts`: of a trial so far; before the first one it is not known how many run at once.
    """
    knobs = current.knobs
    most, wanted = knobs.max_parallel or 1, knobs.search.trials or 0
    if knobs.max_parallel is None and current.launcher == "slurm":
        most = current.place.array_parallelism
    elif knobs.max_parallel is None and facts is not None:
        most = knobs.at_once(facts.devices, [knobs.devices_of(facts.ranks, facts.devices)])
    return max(0, min(most, wanted - len(trials_of(current))))


def confirm(current: Current) -> None:
    """Train the best trials again with fresh seeds, since the lowest of many is luck too."""
    search = current.knobs.search
    if current.over or current.opened is None or not search.rerun_top:
        return
    ledger, copies = current.ledger, list[Point]()
    own = {e.folder: e for e in ledger.points}
    best = list(values_of_trials(current))[: search.rerun_top]
    for folder in best:
        seed = rundir.built_config(ledger.path / folder).train.seed
        fresh = fresh_seeds([str(seed)], search.seeds)
        copies += copies_of(current, own[folder], "seed", map(int, fresh))
    there = [e for e in ledger.points if ledger.is_fresh(e) and has_no_end(e)]
    count = plural(len(best), "trial") if len(best) > 1 else "trial"
    why = f"the best {count} again, with {plural(search.seeds, 'fresh seed')} each"
    run_copies(current, copies, there, why)
