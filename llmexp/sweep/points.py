"""The points of a sweep: composing and naming them, all before the first one starts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from llmexp.compare.budgets import Spent
from llmexp.compose import forking
from llmexp.compose.app import chosen_folder, typed_config, visible
from llmexp.compose.errors import own_options, user_errors
from llmexp.compose.overrides import key_of
from llmexp.run.budget import BUDGETS, budgets_in, sized_by
from llmexp.run.layout import solve_layout
from llmexp.run.rules import check_batch
from llmexp.runs.ledger import LedgerEntry, PointFacts, config_identity
from llmexp.settings.config import Config, plain
from llmexp.settings.convert import with_knobs
from llmexp.settings.rules import ONE_NUMBER, SIZES
from llmexp.settings.values import ConfigError, flatten, refuse
from llmexp.sweep.section import Sweep
from llmexp.system.redact import redacted
from llmexp.system.text import first_of

T = TypeVar("T")


class Composer:
    """From the overrides of a point to its config.

    Hydra composes the first of the points that differ in plain values alone (numbers, texts,
    switches); of the others these values are put into that config, with the same words of
    OmegaConf's as Hydra has for them.
    """

    def __init__(self, loader: Any, base: DictConfig) -> None:
        self._loader, self._base = loader, base
        self._parser = OverridesParser.create(config_loader=loader)
        self._parsed: dict[str, Override] = {}
        self._groups: dict[str, bool] = {}  # whether a key is a group of configs
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self._last: tuple[list[str], str, DictConfig] | None = None

    def __call__(self, overrides: Sequence[str], name: str) -> DictConfig:
        """Return the config of the point with this name, which the next call may change.

        Raises Hydra's exceptions.
        """
        if self._last is not None and self._last[:2] == (list(overrides), name):
            return self._last[2]
        for text in overrides:
            if text not in self._parsed:
                self._parsed[text] = self._parser.parse_override(text)
        parsed = [self._parsed[text] for text in overrides]
        plain = self._plain(parsed)
        shape = tuple(o.key_or_group if o in plain else str(o.input_line) for o in parsed)
        cfg = self._composed.get(shape)
        if cfg is None:
            root = forking.root_of(overrides, self._base.hydra.overrides.task)
            with read_write(self._base.hydra):
                self._base.hydra.job.config_name = root
            cfg = self._loader.load_sweep_config(self._base, list(overrides))
            self._composed[shape] = cfg
        else:
            for override in plain:
                OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
            task = [o for o in parsed if not o.is_hydra_override()]
            cfg.hydra.overrides.task = [o.input_line for o in task]
            style = cfg.hydra.job.config.override_dirname
            cfg.hydra.job.override_dirname = get_overrides_dirname(
                task, style.exclude_keys, style.item_sep, style.kv_sep
            )
        with open_dict(cfg):
            cfg.hydra.job.name = name
            cfg.hydra.job.id = cfg.hydra.job.num = "???"
        self._last = (list(overrides), name, cfg)
        return cfg

    def _plain(self, parsed: Sequence[Override]) -> list[Override]:
        """Return the overrides that do no more than put a value in the place of another one."""
        keys = [f"{o.key_or_group}." for o in parsed if not self._is_group(o.key_or_group)]
        return [o for o in parsed if self._puts_a_value(o) and self._stands_alone(o, keys)]

    def _puts_a_value(self, o: Override) -> bool:
        if o.type != OverrideType.CHANGE or o.package is not None or o.is_hydra_override():
            return False
        value, key = o.value(), o.key_or_group
        if key == "fork.run":  # it decides what the others are put over
            return False
        if isinstance(value, str) and "$" in value:
            return False
        scalar = value is None or isinstance(value, (bool, int, float, str))
        return scalar and re.fullmatch(r"\w+(\.\w+)*", key) is not None and not self._is_group(key)

    def _stands_alone(self, o: Override, keys: Sequence[str]) -> bool:
        """Return whether no other override is for the same key, a section of it or one in it."""
        own = f"{o.key_or_group}."
        return sum(key.startswith(own) or own.startswith(key) for key in keys) == 1

    def _is_group(self, key: str) -> bool:
        if key not in self._groups:
            self._groups[key] = self._loader.repository.group_exists(key)
        return self._groups[key]


def counted(doing: str, points: Sequence[T]) -> Iterable[T]:
    """Return the points; a bar on standard error counts them, none in a pipe."""
    if not sys.stderr.isatty():
        return points
    from rich.console import Console
    from rich.progress import track

    return track(points, f"{doing} points", console=Console(stderr=True), transient=True)


@dataclass(frozen=True)
class Point:
    """A point that composes, with its entry: that of the ledger once the sweep knows it.

    A point that cannot run is an entry alone, which says why (`refused`).
    """

    entry: LedgerEntry
    where: Path  # the sweep's folder
    overrides: list[str]  # all of them; those of the entry are what is shown
    swept: list[str]  # the keys that differ between the points
    config: Config
    composer: Composer | None = None  # None for a point that is known by its folder only
    group: str = ""  # in the tracker
    checked: PointFacts | None = None

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def path(self) -> Path:
        return self.where / self.entry.folder

    @property
    def facts(self) -> PointFacts:
        """Return what the checker knows of the run, once it has been asked."""
        assert self.checked is not None
        return self.checked

    def spent(self, run: Mapping[str, Any]) -> Spent:
        """Return the budget of a run with these facts, with the distance of evaluations."""
        chosen, tokens, steps = self.config.train, run["max_tokens"], run["max_steps"]
        every = None if chosen.eval_every_tokens else chosen.eval_every
        by = sized_by(flatten(plain(self.config)))
        return Spent(self.values, tokens, steps, every and every * (tokens // steps), by)

    @functools.cached_property
    def identity(self) -> str:
        return config_identity(plain(self.config))

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """Return the swept keys with their values, of a group its option."""
        flat = flatten(plain(self.config))
        given = dict(o.lstrip("+").partition("=")[::2] for o in self.overrides)
        return {key: flat.get(key, given.get(key)) for key in (k.lstrip("+") for k in self.swept)}

    def refused(self, reason: str) -> LedgerEntry:
        return dataclasses.replace(self.entry, refused=redacted(reason))

    def request(self) -> dict[str, Any]:
        """Return what a worker needs to make the run, or to go on with it."""
        return {
            "config": plain(with_knobs(self.config, checkpoint={"resume": "auto"})),
            "folder": str(self.path),
            "fixed": True,
            "overrides": self.entry.overrides,
            "label": self.entry.label,
            "group": self.group,
            "swept": self.swept,
        }

    def moved(self, number: int, where: Path) -> Point:
        """Return the same point under another number, in the sweep's folder `where`."""
        assert self.composer is not None
        cfg = self.composer(self.overrides, self.entry.label)
        cfg.hydra.job.id, cfg.hydra.job.num = str(number), number
        path = where / chosen_folder(cfg, "hydra.sweep.subdir")
        if path.resolve() == where.resolve() or not path.resolve().is_relative_to(where.resolve()):
            text = "must be inside the sweep's folder"
            raise refuse("hydra.sweep.subdir", path, text, "${hydra.job.num}")
        folder = os.path.relpath(path, where)
        entry = dataclasses.replace(self.entry, number=number, folder=folder)
        return dataclasses.replace(self, entry=entry, where=where)


def new_entry(number: int, overrides: Sequence[str], swept: Sequence[str]) -> LedgerEntry:
    """Return the entry of a point that the ledger does not have yet; its folder is not known."""
    return LedgerEntry(number, point_label(overrides, swept), "", None, visible(overrides))


def point_label(overrides: Sequence[str], swept: Sequence[str]) -> str:
    """Return the swept keys with their values, in characters that need no quotes."""
    given = [o.partition("=") for o in overrides]
    values = [(key.rpartition(".")[2], value) for key, _, value in given if key in swept]
    text = "+".join(f"{name}_{value.replace('=', '_')}" for name, value in values)
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text)[:120].strip("._-") or "point"


def load_points(
    loader: Any,
    base: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first: int,
    knobs: Sweep,
    where: Path,
    swept: Sequence[str] = (),
) -> tuple[list[Point], list[LedgerEntry]]:
    """Return every point that composes and divides, and each one that is refused.

    `swept`: the keys that differ between the points of the sweep; without it, between these.
    """
    values: dict[str, set[str]] = {}
    for override in itertools.chain.from_iterable(job_overrides):
        values.setdefault(override.partition("=")[0], set()).add(override)
    swept = list(swept) or [key for key, given in values.items() if len(given) > 1]
    points: list[Point] = []
    refused: list[LedgerEntry] = []
    composer, typed = Composer(loader, base), base.hydra.overrides
    command = [*typed.hydra, *typed.task]
    for number, overrides in enumerate(counted("composing", job_overrides), first):
        entry = new_entry(number, overrides, swept)
        try:
            with user_errors(overrides, command):
                cfg = composer(overrides, entry.label)
            config = with_devices(typed_config(cfg), knobs)
            # else the devices decide, which torch counts
            if (ranks := config.parallelism.nproc_per_node) is not None:
                check_batch(config, solve_layout(config.parallelism, ranks).dp_size)
            point = Point(entry, where, list(overrides), swept, config, composer)
            points.append(point.moved(number, where))
        except ConfigError as error:
            entry.refused = redacted(f"{error}{own_options(error.key or '', command)}")
            refused.append(entry)
    return points, refused


def split_duplicates(
    points: Sequence[Point], known_by: Callable[[Point], str]
) -> tuple[list[Point], list[LedgerEntry]]:
    """Return the points, and apart from them those with the same config or folder as another."""
    kept: list[Point] = []
    refused: list[LedgerEntry] = []
    configs, folders = dict[str, Point](), dict[Path, Point]()
    for point in points:
        same = configs.setdefault(known_by(point), point)
        beside = folders.setdefault(point.path, point)
        if same is not point:
            text = f"resolves to the same config as {same.name}; "
            refused.append(point.refused(text + _why_same(point, same)))
        elif beside is not point:
            text = f"resolves to the same folder as {beside.name}, {point.path}"
            refused.append(point.refused(f"hydra.sweep.subdir: {text}"))
        else:
            kept.append(point)
    return kept, refused


def _why_same(point: Point, same: Point) -> str:
    """Return why points with other overrides have one config."""
    differ = {o.partition("=")[0].lstrip("+") for o in {*point.overrides} ^ {*same.overrides}}
    sizes = [f"model.{name}" for name in SIZES if point.config.model.get(name) is not None]
    if differ <= {*ONE_NUMBER} and {"model.n_layers", "model.d_model"} <= {*sizes}:
        return f"{', '.join(differ)} gives way to {', '.join(sizes)}, which are given: choose one"
    return "what differs cannot change results"


def with_devices(config: Config, knobs: Sweep) -> Config:
    """Return the config with the ranks that sweep.devices_per_run gives it, if it names none.

    Raises ConfigError.
    """
    p, devices = config.parallelism, knobs.devices_per_run
    if devices is None:
        return config
    ranks = p.nproc_per_node or (1 if p.kind == "single" else devices)
    if ranks > devices:
        text = f"sweep.devices_per_run={devices} gives each point fewer devices"
        raise refuse("parallelism.nproc_per_node", ranks, text, devices)
    return with_knobs(config, parallelism={"nproc_per_node": ranks})


def expand(hydra: Hydra, cfg: DictConfig, overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each point, by Hydra's basic sweeper. Raises ConfigError."""
    points = asked_of(hydra, cfg, overrides)
    with user_errors():
        for override in points:
            if override.is_sweep_override() and not override.is_discrete_sweep():
                example = f"{override.get_key_element()}=0.1,0.2"
                text = f"a grid needs values to try, for example {example}; a search takes"
                text += " intervals, with sweep.search.trials=30"
                raise HydraException(f"{override.input_line}: {text}")
    return grid_of(points)


def asked_of(hydra: Hydra, cfg: DictConfig, overrides: Sequence[str]) -> list[Override]:
    """Return what a file (hydra.sweeper.params) and the command line ask for, as Hydra reads it.

    Raises ConfigError.
    """
    params = cfg.hydra.sweeper.get("params") or {}
    typed = set(map(key_of, overrides))
    typed |= set(BUDGETS) if budgets_in(overrides) else set()
    # the command line replaces a file
    fixed = [f"{k}={v}" for k, v in params.items() if str(k).lstrip("+") not in typed]
    # Those of Hydra's own are in what the points are composed from.
    overrides = [o for o in overrides if not key_of(o).startswith(("hydra.", "hydra/"))]
    parser = OverridesParser.create(config_loader=hydra.config_loader)
    with user_errors():
        found: list[Override] = parser.parse_overrides([*fixed, *overrides])
    return found


def grid_of(asked: list[Override]) -> list[list[str]]:
    """Return all combinations of the values. Raises ConfigError."""
    with user_errors():
        grid: list[list[str]] = BasicSweeper.split_arguments(asked, None)[0]
    return grid


def no_start(refused: Sequence[LedgerEntry]) -> ConfigError:
    return ConfigError("no point was started, because\n  " + "\n  ".join(reasons(refused)))


def reasons(refused: Sequence[LedgerEntry]) -> list[str]:
    """Return a line for each reason, with the first of the points that share it."""
    names: dict[str | None, list[str]] = {}
    for one in refused:
        names.setdefault(one.refused, []).append(one.name)
    return [f"{first_of(of)}: {reason}" for reason, of in names.items()]
