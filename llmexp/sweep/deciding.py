"""Train seeds until it is decided which setting of a grid is best: sweep.decide.

first seeds of all -> look -> further seeds of those that can still be best -> look -> ... -> answer

Who gets further seeds follows from the losses of the seeds before, so a sweep that was killed at
any time takes the same decisions again. The statistics are in `llmexp.compare.looks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from statistics import fmean

from omegaconf import DictConfig

from llmexp.compare import budgets, reading
from llmexp.compare.alpha_spending import following, level_of
from llmexp.compare.comparing import findings
from llmexp.compare.records import Record, Result, Setting, Verdict
from llmexp.compose.overrides import key_of
from llmexp.config.knobs import SEED, is_seed
from llmexp.config.labels import plural
from llmexp.config.labels import short_label as named
from llmexp.config.values import refuse
from llmexp.folders import rundir
from llmexp.folders.folder import RunFolder
from llmexp.folders.ledger import Ledger, Look
from llmexp.sweep.current import Current
from llmexp.sweep.points import Point
from llmexp.sweep.running import run_points
from llmexp.sweep.section import Sweep
from llmexp.sweep.show import values_of
from llmexp.sweep.table import checked, place_points
from llmexp.system.child import say

OUT = (Verdict.WORSE, Verdict.NEGLIGIBLE)  # such a setting was shown to be worse
OPEN = (Verdict.UNDECIDED, Verdict.FEW_SEEDS, Verdict.BUDGET, Verdict.TASK)


def unseeded(overrides: Sequence[str]) -> list[str]:
    """Return overrides without that of the seed."""
    return [o for o in overrides if not is_seed(o)]


def seeded(
    knobs: Sweep,
    ledger: Ledger | None,
    cfg: DictConfig,
    arguments: Sequence[str],
    grid: Sequence[list[str]],
) -> tuple[list[int], list[list[str]]]:
    """Return the first seeds, and the points of a grid with them and others that its sweep has.

    `ledger`: of a sweep that goes on. Raises ConfigError for seeds that are swept; a grid that was
    trained before may have them.
    """
    rows = [list(o) for o in dict.fromkeys(tuple(unseeded(overrides)) for overrides in grid)]
    given = dict.fromkeys(o for overrides in grid for o in overrides if is_seed(o))
    texts = [o.partition("=")[2] for o in given]
    if wrong := [text for text in texts if not text.removeprefix("-").isdecimal()]:
        raise refuse("wrong_type", SEED, wrong[0], "a whole number is needed", 1)
    seeds = list(map(int, texts))
    if len(seeds) > 1 and knobs.resume is None:
        text = "sweep.decide chooses the seeds; leave the key out, and for more seeds at first give"
        text += f" sweep.first_seeds={len(seeds)}"
        raise refuse("conflict", SEED, ",".join(map(str, seeds)), text)
    if len(parents := dict.fromkeys(o for row in rows for o in row if key_of(o) == "fork.run")) > 1:
        text = "are several parents, and sweep.decide chooses the seeds; give one parent"
        raise refuse("conflict", "fork.run", ",".join(o.partition("=")[2] for o in parents), text)
    if len(seeds) < 2:
        first = int(cfg.train.seed)
        seeds = list(range(first, first + knobs.first_seeds))
    if ledger and ledger.looks:
        own = list(map(int, ledger.looks[0].seeds))
        if texts and seeds != own and texts != list(map(str, own[:1])):
            text = f"this sweep began with {own[0]} to {own[-1]}; leave the key out"
            raise refuse("other_run", SEED, ",".join(texts), text, own[0])
        seeds = own
    typed = "sweep.first_seeds" in map(key_of, arguments)
    if knobs.first_seeds not in (len(seeds), None if typed else Sweep.first_seeds):
        text = f"this sweep begins with {plural(len(seeds), 'seed')}; leave it out"
        raise refuse("other_run", "sweep.first_seeds", knobs.first_seeds, text, len(seeds))
    if len(seeds) > knobs.max_seeds:
        text = f"is less than the {len(seeds)} seeds that the sweep begins with"
        raise refuse("out_of_range", "sweep.max_seeds", knobs.max_seeds, text, 2 * len(seeds))
    found = [[*row, f"{SEED}={seed}"] for seed in seeds for row in rows]
    return seeds, found + (further_points(ledger, rows, seeds) if ledger else [])


def further_points(
    ledger: Ledger, rows: Sequence[Sequence[str]], seeds: Sequence[int]
) -> list[list[str]]:
    """Return the overrides of the points of a sweep that are not among the first seeds of rows."""
    swept = {key.lstrip("+") for key in ledger.swept}
    swept |= {key_of(o) for row in rows for o in row if any(o not in other for other in rows)}

    def own(overrides: Iterable[str]) -> frozenset[str]:
        return frozenset(o for o in overrides if key_of(o) in swept - {SEED})

    known = {own(row): list(row) for row in rows}
    fixed = [o for o in rows[0] if key_of(o) not in swept]
    found = []
    for entry in ledger.points:
        setting, seed = own(entry.overrides), [o for o in entry.overrides if is_seed(o)]
        row = known.get(setting) or [*fixed, *sorted(setting)]
        there = setting in known and not (seed and int(seed[0].partition("=")[2]) not in seeds)
        if not (there or entry.is_twin or entry.refused is not None):
            found.append([*row, *seed])
    return found


def refuse_undecidable(knobs: Sweep, seeds: Sequence[int], able: Sequence[Point]) -> None:
    """Raise ConfigError where seeds could decide nothing, or no look would be reached."""
    count = len({frozenset(unseeded(point.overrides)) for point in able})
    if count < 2:
        text = "decides between settings, and there is one; give a key several values"
        raise refuse("missing_value", "sweep.decide", True, text, "true clip.max_norm=0.5,1.0")
    spent = [point.spent for point in able]
    if not budgets.equal(one.tokens for one in spent):
        text = "the runs train on unequal numbers of tokens, so no seeds decide; give all"
        text += f" train.max_tokens={budgets.common(spent)}"
        raise refuse("conflict", "sweep.decide", True, text)
    wanted = count * len(seeds) * max(point.facts.run["own_tokens"] for point in able)
    if knobs.max_tokens is not None and knobs.max_tokens < wanted:
        text = f"is less than {plural(len(seeds), 'seed')} of {count} settings take"
        raise refuse("out_of_range", "sweep.max_tokens", knobs.max_tokens, text, wanted)


class Deciding:
    """A sweep that decides by itself: its settings by name, each with a point a seed."""

    def __init__(self, current: Current, points: Sequence[Point]) -> None:
        self.current = current
        self.settings: dict[frozenset[str], dict[int, Point]] = {}
        self.add(points)
        self.asked: set[str] = set()  # folders of the runs that were asked for by this command

    def add(self, points: Sequence[Point]) -> None:
        """Note points that the ledger has."""
        for point in points:
            seeds = self.settings.setdefault(frozenset(unseeded(point.entry.overrides)), {})
            seeds[point.config.train.seed] = point

    def run(self) -> None:
        """Train and look until the sweep is decided, used up or stopped."""
        ledger, most = self.current.ledger, self.current.knobs.max_seeds
        before, looks = ledger.looks, list[Look]()
        going, count, runs, last = list(self.settings), len(self.current.seeds), 0, 0
        while True:
            runs += len(going) * (count - last)
            self.train(going, count)
            if self.current.over:
                return
            known = next((b for b in before if len(b.seeds) == count), None)
            later = [b for b in before if len(b.seeds) > count]
            level = known.level if known else level_of(count, most, looks)
            seeds = list(map(str, self.seeds(count)))
            look = Look(seeds, level, known.most if known else most, [], [], "")
            f = self.findings([*looks, look])
            going, _ = self.standing(f)
            wanted, why = self.following(f, going, runs, len(later[0].seeds) if later else 0)
            looks.append(self.looked(look, f, why))
            if not wanted:  # later ones are not taken again, but their error is spent
                later = [
                    self.looked(b, self.findings([*looks, *later[: i + 1]]), why)
                    for i, b in enumerate(later)
                ]
            ledger.looks = [*looks, *later]
            if not wanted:  # what another decision had queued is not wanted
                ledger.points = [
                    e
                    for e in ledger.points
                    if e.refused or e.state == "failed" or rundir.is_run(ledger.path / e.folder)
                ]
            ledger.save()
            say(f"interim analysis {len(looks)}, at {count} seeds: {why}")
            if not wanted:
                return
            count, last = wanted, count

    def looked(self, look: Look, f: Result, why: str) -> Look:
        """Return a look with what it found, the last one of `f`, and why the sweep goes on."""
        going, worse = ([self.name(s) for s in some] for some in self.standing(f))
        return dataclasses.replace(look, going=going, worse=worse, why=why)

    def following(
        self, f: Result, going: Sequence[frozenset[str]], runs: int, known: int
    ) -> tuple[int, str]:
        """Return the seeds a setting of the next look, 0 for none, and why.

        `runs`: trained so far; `known`: the seeds of the next look of an earlier command, if any.
        """
        most, count = self.current.knobs.max_seeds, len(f.looks[-1].seeds)
        if not f.comparable or (f.mixed and not f.ranked):
            return 0, "the losses of the settings do not compare"
        if len(f.ranked) < 2:
            return 0, "no other setting has a loss to compare with"
        if not any(r.verdict in OPEN and self.setting_of(r) in going for r in f.ranked[1:]):
            return 0, "decided" if not f.those(*OPEN) else "all undecided settings failed"
        if count >= most:
            return 0, f"all {plural(count, 'seed')} are trained (sweep.max_seeds)"
        wanted = known or following(count, most)
        while wanted < most and not (known or level_of(wanted, most, f.looks)):
            wanted += 1
        for more in [known] if known else range(wanted, count, -1):
            if (limit := self.beyond(len(going) * (more - count), runs, count)) is None:
                still = f"{len(going)} of {plural(len(self.settings), 'setting')} can still be best"
                return more, f"{still}; the next analysis is at {more} seeds"
        return 0, f"further seeds would go beyond {limit}"

    def beyond(self, more: int, runs: int, count: int) -> str | None:
        """Return the limit that so many more runs would go beyond, None where they fit."""
        knobs, seeds = self.current.knobs, self.seeds(count)
        there = [p for s in self.settings.values() for seed, p in s.items() if seed in seeds]
        runs += more
        tokens, hours = knobs.max_tokens, knobs.max_hours
        if tokens is not None and runs * max(p.facts.run["own_tokens"] for p in there) > tokens:
            return f"sweep.max_tokens={tokens}"
        if hours is not None:
            times = [RunFolder(p.path).summary.get("train_time") for p in there]
            known = [time for time in times if time is not None]
            if known and runs * fmean(known) > 3600 * hours:
                return f"sweep.max_hours={hours:g}"
        return None

    def seeds(self, count: int) -> list[int]:
        """Return the first seeds, in the order in which every setting gets them."""
        seeds = list(self.current.seeds)
        further = (s for s in range(seeds[0] + 1, seeds[0] + count + len(seeds)) if s not in seeds)
        return [*seeds, *further][:count]

    def train(self, going: Sequence[frozenset[str]], count: int) -> None:
        """Train the first `count` seeds of settings, but for what this command has tried."""
        current = self.current
        first = {s: next(iter(self.settings[s].values())) for s in going}
        new = [[*unseeded(first[s].overrides), f"{SEED}={seed}"] for s in going
               for seed in self.seeds(count) if seed not in self.settings[s]]  # fmt: skip
        if new:
            swept = [*dict.fromkeys([*first[going[0]].swept, SEED])]
            able, refused = checked(current, new, current.ledger.next_number(), swept)
            self.add(place_points(current, able, refused))
        asked = [p for seed in self.seeds(count) for s in going
                 if (p := self.settings[s].get(seed))
                 and p.entry.folder not in self.asked]  # fmt: skip
        self.asked |= {p.entry.folder for p in asked}
        run_points(current, asked)

    def findings(self, looks: Sequence[Look]) -> Result:
        """Find out what the runs show at these looks."""
        return findings([dataclasses.replace(r, looks=looks) for r in self.records()])

    def records(self) -> list[Record]:
        """Return the runs of the sweep as they are compared."""
        return reading.runs_in(self.current.ledger.path)

    def standing(self, f: Result) -> tuple[list[frozenset[str]], list[frozenset[str]]]:
        """Return the settings that may get further seeds, and those that were shown to be worse."""
        found = {self.setting_of(r): r.verdict for r in f.ranked}
        worse = [s for s in self.settings if found.get(s) in OUT]
        left = [s for s in self.settings if s in found and s not in worse]
        return [s for s in left if not self.failed(s)], worse

    def setting_of(self, r: Setting) -> frozenset[str] | None:
        """Return the setting of a rival; None for one that is none of the sweep's, as a twin."""
        runs = {run.path for run in r.runs}
        places = ((s, p.path) for s, points in self.settings.items() for p in points.values())
        return next((s for s, path in places if path in runs), None)

    def failed(self, setting: frozenset[str]) -> bool:
        """Return whether a run of a setting has failed, so that it gets no further seeds."""
        return any(p.entry.state == "failed" for p in self.settings[setting].values())

    def name(self, setting: frozenset[str]) -> str:
        """Return the short name of a setting."""
        entry = next(iter(self.settings[setting].values())).entry
        keys = [key for key in self.current.ledger.swept if key != SEED]
        return named(values_of(entry, keys)) or entry.label
