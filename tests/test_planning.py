"""What a sweep says before it starts: its points, composed once for what they share."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from llmexp import launch
from llmexp.sweep.composing import Composer
from llmexp.sweep.points import expand

# Plain values, and each way in which an override does more than put one value in the place of another one.
GRIDS = [
    ["train.seed=1,2", "optimizer.lr=1e-3,2e-3", "model.dropout=0.1"],
    ["optimizer=adamw,sgd", "optimizer.lr=0.1,0.2", "train.compile=true,false"],
    ["model.n_layers=2,'${model.n_heads}'", "model.n_heads=2,4"],
    ["data.val_ratio=0.1,0.2", "+data.extra={a:1},{b:2}", "+data.extra.c=3,4", "name=a,b"],
    ["clip={max_norm:0.5},{max_norm:1.0}", "train.eval_every=10,null"],
    ["schedule.warmup_steps=1,2", "~schedule.warmup_ratio", "hydra.job.config.override_dirname.item_sep=_"],
    ["tracker.notes='a, b','c=d'", "tracker.tags=[x],[y]", "train.max_steps=10,20"],
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_points_are_what_hydra_composes(grid):
    with launch.hydra_app(None) as hydra:
        cfg, _ = launch.compose(hydra, grid, True)
        loader = hydra.config_loader
        composer = Composer(loader, cfg)
        points = expand(hydra, cfg, grid)
        assert len(points) > 1
        for overrides in [*points, *reversed(points)]:
            ours, theirs = composer(overrides, "x"), loader.load_sweep_config(cfg, list(overrides))
            theirs.hydra.job.name = "x"
            assert OmegaConf.to_container(ours) == OmegaConf.to_container(theirs)
            keys = ("hydra", "sweep")
            plain = [OmegaConf.to_container(OmegaConf.masked_copy(c, [k for k in c if k not in keys]), resolve=True)
                     for c in (ours, theirs)]  # fmt: skip
            assert plain[0] == plain[1]


def test_what_points_share_is_composed_once(monkeypatch):
    grid = ["train.seed=1,2,3,4", "optimizer=adamw,sgd", "optimizer.lr=0.1,0.2"]
    with launch.hydra_app(None) as hydra:
        cfg, _ = launch.compose(hydra, grid, True)
        calls = []
        load = hydra.config_loader.load_sweep_config
        monkeypatch.setattr(hydra.config_loader, "load_sweep_config", lambda *a: calls.append(a) or load(*a))
        composer = Composer(hydra.config_loader, cfg)
        seen = [composer(overrides, "x").train.seed for overrides in expand(hydra, cfg, grid)]
    assert sorted(seen) == sorted([1, 2, 3, 4] * 4)
    assert len(calls) == 2
