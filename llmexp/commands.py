"""The commands besides train: resume, plan, prepare, sample."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmexp.config import ConfigError, build, nearest, plain


def resume(arguments: list[str]) -> int:
    """`llmexp resume RUN_DIR [key=value ...]`: goes on with a run, or with a sweep, in its folder."""
    from llmexp import folder, launch, origin
    from llmexp.run import cut_anew, solve_layout
    from llmexp.sweep import ledger
    from llmexp.sweep.main import recordable

    parser = argparse.ArgumentParser(
        prog="llmexp resume",
        description="Go on with a run in its folder, from its newest whole checkpoint; or with a sweep.",
        epilog=launch.ALLOW_HELP,
    )
    parser.add_argument("run_dir", type=Path, help="for example outputs/default/2030-01-01_12-00-00")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="changes to how the run is executed, for example batch.micro_batch_size=4; what it computes is fixed",
    )
    args = parser.parse_args(launch.take_allowed(arguments))
    launch.check_overrides(args.overrides)
    path = args.run_dir
    folder.check_plain(path)
    if not folder.is_run(path) and ledger.is_sweep(path):
        arguments = recordable(ledger.read(path).arguments)
        return launch.train(["-m", *arguments, *args.overrides, f"sweep.resume={launch.quoted(str(path))}"])
    if not folder.is_run(path) and ledger.runs_in(path):
        raise ConfigError(f"{path}: has runs but no {ledger.LEDGER}; {ledger.ANEW}{path}")
    tree, recorded = plain(folder.built_config(path)), folder.read_run(path)
    micro, accum = "batch.micro_batch_size", "batch.gradient_accumulation_steps"
    given = [o.partition("=")[0] for o in args.overrides]
    tree["train"]["stop_step"] = None  # it has been there
    if {micro, accum} & set(given):  # the real batch stays, and its cut is solved anew
        tree["batch"][(micro if accum in given else accum).removeprefix("batch.")] = None
    if folder.read_status(path).get("state") == "finished":
        if args.overrides:
            raise ConfigError(
                f"{path}: this run is finished, so {' '.join(args.overrides)} would change nothing; for another run: "
                f"llmexp train ... {' '.join(args.overrides)}"
            )
        launch.say(f"{path}: this run is finished; nothing to do")
        return 0
    change(tree, args.overrides, path, recorded.get("parallelism"))
    for line in launch.fill_tracker(tree):
        launch.say(line)
    launch.refuse_secrets(tree)
    config = build(tree)
    origin.refuse_given(config, given)
    if not {micro, accum} & set(given):
        ranks = config.parallelism.nproc_per_node
        dp_size = None if ranks is None else solve_layout(config.parallelism, ranks).dp_size
        config = dataclasses.replace(config, batch=cut_anew(config.batch, dp_size))
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume="must"))
    request = {"config": plain(config), "folder": str(path), "fixed": True}
    return launch.Worker().run(request | {k: recorded.get(k) for k in ("overrides", "label", "group", "swept")})[0]


def change(tree: dict[str, Any], overrides: Sequence[str], path: Path, before: str | None) -> None:
    """Puts overrides into the config of the run in `path`, which ran with the parallelism `before`. Raises
    ConfigError."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from llmexp import folder, hints

    parsed = map(OverridesParser.create().parse_override, overrides)
    kind_first = sorted(parsed, key=lambda o: o.key_or_group not in ("parallelism", "parallelism.kind"))
    for override in kind_first:  # then its sizes
        key = override.key_or_group
        *parents, name = key.split(".")
        node: Any = tree
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if not isinstance(node, dict) or name not in node:
            raise ConfigError(
                f"{key}: there is no such key in {path / folder.CONFIG}.{nearest(key, hints.flat_keys(tree))}"
            )
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: several values are a sweep; a run is resumed with one")
        if key in ("parallelism", "parallelism.kind"):  # sizes of the old layout mean nothing in the new one
            tree["parallelism"] |= {"kind": override.value(), "tensor_parallel_size": None, "replicate_size": None}
            if "single" in (override.value(), before):
                tree["parallelism"] |= {"nproc_per_node": None, "nnodes": 1}
            continue
        node[name] = override.value()


def plan(arguments: list[str]) -> int:
    """`llmexp plan`: the banner of the run (with -m: a row a point); nothing is trained, nothing is written."""
    from llmexp import flags, folder, launch, origin
    from llmexp.sweep.main import settings_of
    from llmexp.sweep.planning import plan_sweep
    from llmexp.sweep.points import duplicates, expand, is_grid, load_points

    args = launch.parse("plan", arguments)
    if flags.asked(args):
        return flags.answer(args)
    with launch.hydra_app(args.config_dir) as hydra:
        cfg, multirun = launch.compose(hydra, args.overrides, args.multirun)
        origin.refuse_unused(args.overrides, multirun)
        if multirun and not is_grid(cfg):
            raise ConfigError(
                "hydra/sweeper: this sweeper chooses its points while it runs; only a grid can be planned"
            )
        if multirun:
            settings, where = settings_of(cfg)
            grid = expand(hydra, cfg, args.overrides)
            points, refused = load_points(hydra.config_loader, cfg, grid, 0, settings, where)
            same = duplicates(points, [p.identity for p in points])
            points = [p for p in points if p.name not in {s.name for s in same}]
            return plan_sweep(points, [*refused, *same], settings, arguments)
        config, wanted = launch.typed(cfg), launch.chosen_folder(cfg, "hydra.run.dir")
    folder.check_writable(wanted)
    from llmexp.assemble import assemble, larger_micro_batch
    from llmexp.metrics.console import banner
    from llmexp.run import banner_sections

    parts = assemble(config, write=False)
    hint = larger_micro_batch(parts)
    print(banner([*banner_sections(parts.run, str(wanted)), *([("hint", hint)] if hint else [])]))
    return 0


def prepare(arguments: list[str]) -> int:
    """`llmexp prepare`: tokenises the data into the cache, so that runs start at once."""
    from llmexp import flags, launch

    args = launch.parse("prepare", arguments)
    if flags.asked(args):
        return flags.answer(args)
    if args.multirun:
        raise ConfigError("-m: llmexp prepare takes one config, not a sweep; leave out -m")
    from llmexp.building import build_corpus, build_tokenizer, filled

    with launch.hydra_app(args.config_dir) as hydra:
        config = filled(launch.typed(launch.compose(hydra, args.overrides)[0]))
    tokenizer, model_config = build_tokenizer(config)
    corpus = build_corpus(config, tokenizer, model_config.get("vocab_size") or tokenizer.n_vocab, write=True)
    print(f"{corpus.description}; tokenizer {tokenizer.name}")
    print(f"train {len(corpus.train):,} tokens, validation {len(corpus.val) if corpus.val is not None else 0:,} tokens")
    return 0


def sample(arguments: list[str]) -> int:
    """`llmexp sample RUN_DIR --prompt TEXT`: text from the newest checkpoint of a run."""
    from llmexp import folder, launch

    parser = argparse.ArgumentParser(
        prog="llmexp sample", description="Generate text from a run.", epilog=launch.ALLOW_HELP
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--prompt", default="", help="text to go on from (default: the start of a document)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to generate (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="sample from the k likeliest tokens (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    args = parser.parse_args(launch.take_allowed(arguments))
    for name, low in (("tokens", 1), ("temperature", 0), ("top_k", 1)):
        if not getattr(args, name) >= low:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {low}")
    folder.check_plain(args.run_dir)
    config = folder.built_config(args.run_dir)
    from llmexp import checkpoint
    from llmexp.building import filled
    from llmexp.sample import load_for_sampling
    from llmexp.sample import sample as sample_text

    try:
        loaded = checkpoint.latest(args.run_dir / folder.CHECKPOINTS, lambda text: print(text, file=sys.stderr))
        if loaded is None:
            raise ConfigError(f"{args.run_dir}: has no checkpoint yet")
        tokenizer, model = load_for_sampling(filled(config), loaded)
    except checkpoint.CheckpointError as error:
        raise ConfigError(str(error)) from None
    knobs = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    length, kind = config.batch.sequence_length, config.precision.kind  # what it was trained at
    try:
        text = sample_text(tokenizer, model, length, kind, args.prompt, args.tokens, **knobs)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    print(re.sub(r"[^\S\n\t ]|[\x00-\x08\x0b-\x1f\x7f-\x9f]", "�", text) if sys.stdout.isatty() else text)
    return 0
