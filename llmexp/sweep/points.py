"""The points of a sweep: composing and naming them, all before the first one starts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from llmexp.compare.budgets import Spent
from llmexp.compose.app import chosen_folder, typed_config, user_errors, visible
from llmexp.compose.overrides import as_text, key_of, parsed
from llmexp.compose.putting import BESIDE, own_options
from llmexp.config.convert import with_knobs
from llmexp.config.kinds import Kind
from llmexp.config.labels import unquoted
from llmexp.config.rules import ONE_NUMBER, SHAPE_KEYS
from llmexp.config.sections import Config, plain
from llmexp.config.values import ConfigError, flatten, refuse
from llmexp.folders.ledger import LedgerEntry, PointFacts, config_identity
from llmexp.run.budget import BUDGETS, budgets_in, sized_by
from llmexp.run.layout import solve_layout
from llmexp.run.rules import check_batch
from llmexp.sweep.composer import Composer
from llmexp.sweep.section import Sweep
from llmexp.system.redact import redacted
from llmexp.system.text import first_of

_MOST = 10_000  # runs of a grid
_LONGEST = 1_000_000  # values of a range, which may be one to search in
_T = TypeVar("_T")


def counted(doing: str, points: Sequence[_T]) -> Iterable[_T]:
    """Return the points; a bar on standard error counts them, none in a pipe."""
    if not sys.stderr.isatty():
        return points
    from rich.console import Console
    from rich.progress import track

    return track(points, f"{doing} runs", console=Console(stderr=True), transient=True)


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
    stop: int | None = None  # the step of its rung of successive halving
    checked: PointFacts | None = None

    @property
    def path(self) -> Path:
        return self.where / self.entry.folder

    @property
    def facts(self) -> PointFacts:
        """Return what is known of the run, once it was checked or planned."""
        assert self.checked is not None
        return self.checked

    @property
    def spent(self) -> Spent:
        """Return the budget of the run, with the distance of evaluations."""
        chosen, run = self.config.train, self.facts.run
        tokens, steps = run["max_tokens"], run["max_steps"]
        every = None if chosen.eval_every_tokens else chosen.eval_every
        by = sized_by(flatten(plain(self.config)))
        return Spent(self.values, tokens, steps, every and every * (tokens // steps), by)

    @functools.cached_property
    def identity(self) -> str:
        return config_identity(plain(self.config))

    @property
    def solved(self) -> str:
        """Return the identity of the config as solved, where that is known."""
        return self.checked.solved if self.checked else self.identity

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """Return the swept keys with their values, of a group its option."""
        flat = flatten(plain(self.config))
        given = dict(o.lstrip("+").partition("=")[::2] for o in self.overrides)
        return {key: flat.get(key, given.get(key)) for key in (k.lstrip("+") for k in self.swept)}

    def refused(self, kind: Kind, reason: str) -> LedgerEntry:
        return dataclasses.replace(self.entry, kind=kind, refused=redacted(reason))

    def request(self) -> dict[str, Any]:
        """Return what a worker needs to make the run, or to go on with it."""
        return {
            "config": plain(
                with_knobs(
                    self.config, checkpoint={"resume": "auto"}, train={"stop_step": self.stop}
                )
            ),
            "folder": str(self.path),
            "fixed": True,
            "overrides": self.entry.overrides,
            "label": self.entry.label,
            "group": self.group,
            "swept": self.swept,
        }

    def moved(self, number: int, where: Path, cfg: DictConfig | None = None) -> Point:
        """Return the same point under another number, in the sweep's folder `where`.

        `cfg`: its config, where it is composed already.
        """
        entry = dataclasses.replace(self.entry, number=number)
        path = where / entry.name
        if cfg is None and self.composer is not None:
            cfg = self.composer(self.overrides, entry.label)
        if cfg is not None:
            cfg.hydra.job.id, cfg.hydra.job.num = str(number), number
            path = where / chosen_folder(cfg, "hydra.sweep.subdir")
        if path.resolve() == where.resolve() or not path.resolve().is_relative_to(where.resolve()):
            text = "must be inside the sweep's folder"
            raise refuse("not_allowed", "hydra.sweep.subdir", path, text, "${hydra.job.num}")
        entry.folder = os.path.relpath(path, where)
        return dataclasses.replace(self, entry=entry, where=where)


def point_label(overrides: Sequence[str], swept: Sequence[str]) -> str:
    """Return the swept keys with their values, as a folder's name."""
    given = (o.partition("=") for o in overrides)
    words = [f"{k.rpartition('.')[2]}_{unquoted(value)}" for k, _, value in given if k in swept]
    return as_name("+".join(words)) or "run"


def as_name(text: str) -> str:
    """Return a text as part of a file's name that needs no quotes, in at most 120 bytes.

    Letters and digits of all scripts stay, with ._+- between them; the rest becomes _.
    """
    kept = [
        c if c in "._+-" or unicodedata.category(c)[0] in "LMN" else " "
        for c in unicodedata.normalize("NFC", text)
    ]
    return re.sub(" +", "_", "".join(kept)).encode()[:120].decode(errors="ignore").strip("._-")


def load_points(
    composer: Composer,
    job_overrides: Sequence[Sequence[str]],
    first: int,
    knobs: Sweep,
    where: Path,
    swept: Sequence[str] = (),
) -> tuple[list[Point], list[LedgerEntry]]:
    """Return every point that composes and divides, and each one that is refused.

    `swept`: the keys that differ between the points of the sweep; without it, between these.
    """
    keys = Counter(o.partition("=")[0] for o in dict.fromkeys(itertools.chain(*job_overrides)))
    swept = list(swept) or [key for key, values in keys.items() if values > 1]
    points, refused = list[Point](), list[LedgerEntry]()
    for number, overrides in enumerate(counted("composing", job_overrides), first):
        label = point_label(overrides, swept)
        entry = LedgerEntry(number, label, "", None, visible(overrides))  # its folder is not known
        try:
            with user_errors():
                cfg = composer(overrides, label)
            config = with_devices(typed_config(cfg), knobs)
            # else the devices decide, which torch counts
            if (ranks := config.parallelism.nproc_per_node) is not None:
                check_batch(config, solve_layout(config.parallelism, ranks).dp_size)
            point = Point(entry, where, list(overrides), swept, config, composer)
            points.append(point.moved(number, where, cfg))
        except ConfigError as error:
            key = None if BESIDE in str(error) else error.key
            entry.kind = error.kind
            entry.refused = redacted(f"{error}{own_options(key or '', overrides)}")
            refused.append(entry)
    return points, refused


def split_duplicates(points: Sequence[Point]) -> tuple[list[Point], list[LedgerEntry]]:
    """Return the points, and apart from them those with the same config or folder as another.

    Configs are as solved where that is known.
    """
    kept, refused = list[Point](), list[LedgerEntry]()
    configs, folders = dict[str, Point](), dict[Path, Point]()
    for point in points:
        same = configs.setdefault(point.solved, point)
        beside = folders.setdefault(point.path, point)
        if same is not point:
            text = f"resolves to the same config as {same.entry.label or same.entry.name}; "
            refused.append(point.refused("conflict", text + _why_same(point, same)))
        elif beside is not point:
            text = f"resolves to the same folder as {beside.entry.name}, {point.path}"
            refused.append(point.refused("conflict", f"hydra.sweep.subdir: {text}"))
        else:
            kept.append(point)
    return kept, refused


def _why_same(point: Point, same: Point) -> str:
    """Return why points with other overrides have one config."""
    differ = {o.partition("=")[0].lstrip("+") for o in {*point.overrides} ^ {*same.overrides}}
    if not differ:
        return "its values were given twice; leave one out"
    sizes = [f"model.{name}" for name in SHAPE_KEYS if point.config.model.get(name) is not None]
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
        text = f"sweep.devices_per_run={devices} gives each run fewer devices"
        raise refuse("wrong_ranks", "parallelism.nproc_per_node", ranks, text, devices)
    return with_knobs(config, parallelism={"nproc_per_node": ranks})


def expand(cfg: DictConfig, overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each point, by Hydra's basic sweeper. Raises ConfigError."""
    points = asked_of(cfg, overrides)
    for override in points:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            example = f"{override.get_key_element()}=0.1,0.2"
            text = f"a grid needs values to try, for example {example}; a search takes"
            text += " intervals, with sweep.search.trials=30"
            raise ConfigError("wrong_type", f"{override.input_line}: {text}", override.key_or_group)
    return grid_of(points)


def asked_of(cfg: DictConfig, overrides: Sequence[str]) -> list[Override]:
    """Return what a file (hydra.sweeper.params) and the command line ask for, as Hydra reads it.

    Raises ConfigError.
    """
    params = cfg.hydra.sweeper.get("params") or {}
    typed = {*map(key_of, overrides), *(BUDGETS if budgets_in(overrides) else ())}
    # the command line replaces a file
    fixed = [f"{k}={v}" for k, v in params.items() if str(k).lstrip("+") not in typed]
    # Those of Hydra's own are in what the points are composed from.
    overrides = [o for o in overrides if not key_of(o).startswith(("hydra.", "hydra/"))]
    with user_errors():
        found = parsed([*map(as_text, fixed), *overrides])
    for override in filter(Override.is_discrete_sweep, found):
        key, given = override.key_or_group, str(override.input_line).partition("=")[2]
        if override.is_range_sweep():
            of: Any = override.value()
            if not of.step:
                raise refuse("out_of_range", key, given, "a step of 0 leads nowhere")
            if (of.stop - of.start) / of.step > _LONGEST:
                text = f"has more than {_LONGEST:,} values; take larger steps"
                raise refuse("too_large", key, given, text)
        values = [*override.sweep_string_iterator()]
        if not values:
            raise refuse("missing_value", key, given, "has no value, so there is nothing to train")
        if key.startswith(("plan.", "sweep.")):
            raise refuse(
                "unsupported", key, given, "holds for the whole sweep, so give one value", values[0]
            )
    return found


def grid_of(asked: list[Override]) -> list[list[str]]:
    """Return all combinations of the values. Raises ConfigError."""
    swept = [o for o in asked if o.is_sweep_override()]
    if (count := math.prod(sum(1 for _ in o.sweep_string_iterator()) for o in swept)) > _MOST:
        text = f"{' '.join(str(o.input_line) for o in swept)}: are {count:,} runs, and a grid has "
        text += f"{_MOST:,} at most; take fewer values"
        raise ConfigError("too_large", text, swept[0].key_or_group)
    with user_errors():
        grid: list[list[str]] = BasicSweeper.split_arguments(asked, None)[0]
    return [[as_text(override) for override in point] for point in grid]


def no_start(refused: Sequence[LedgerEntry]) -> ConfigError:
    text = "\n  ".join(["no run was started, because", *reasons(refused)])
    return ConfigError(refused[0].kind, text)


def reasons(refused: Sequence[LedgerEntry]) -> list[str]:
    """Return a line for each reason, with the first of the points that share it."""
    names: dict[str | None, list[str]] = {}
    for one in refused:
        names.setdefault(one.refused, []).append(one.name)
    lines = list[str]()
    for reason, of in names.items():
        text, _, recipe = str(reason).partition(BESIDE)
        again = recipe and recipe in "".join(lines)  # once is enough of a long command
        lines.append(f"{first_of(of)}: {text if again else reason}")
    return lines
