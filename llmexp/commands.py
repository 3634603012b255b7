"""The commands besides train and resume: plan, prepare, sample."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from llmexp.config import Config, ConfigError, build


def plan(arguments: list[str]) -> int:
    """`llmexp plan`: the banner of the run (with -m: a row a point); nothing is trained, nothing is written."""
    from llmexp import folder, launch
    from llmexp.sweep import expand, is_grid, load_points

    args = launch.parse("plan", arguments)
    with launch.hydra_app(args.config_dir) as hydra:
        cfg, multirun = launch.compose(hydra, args.overrides, args.multirun)
        if multirun and not is_grid(cfg):
            raise ConfigError(
                "hydra/sweeper: this sweeper chooses its points while it runs; only a grid can be planned"
            )
        if multirun:
            points, refused = load_points(hydra.config_loader, cfg, expand(hydra, cfg, args.overrides), 0)
            return plan_sweep([(p.path.name, p.config) for p in points], refused)
        config, wanted = launch.typed(cfg), launch.chosen_folder(cfg, "hydra.run.dir")
    folder.check_writable(wanted)
    from llmexp.assemble import assemble
    from llmexp.metrics.console import banner
    from llmexp.run import banner_sections

    print(banner(banner_sections(assemble(config, write=False).run, str(wanted))))
    return 0


def plan_sweep(points: list[tuple[str, Config]], refused: list[tuple[str, str]]) -> int:
    """A row a point; a point that would be refused has its reason instead. Exit code 2 if there is one."""
    from llmexp.assemble import assemble
    from llmexp.sweep import reasons, table

    rows: list[tuple[str, ...]] = [
        ("run", "micro_batch", "accumulation", "dp", "real_batch", "length", "steps", "tokens", "epochs")
    ]
    for name, config in points:
        try:
            run = assemble(config, write=False).run
        except ConfigError as error:
            refused.append((name, str(error)))
            continue
        sizes = (run.micro_batch_size, run.gradient_accumulation_steps, run.dp_size, run.real_batch_size)
        counts = (run.sequence_length, run.max_steps, run.max_tokens)
        rows.append((name, *(f"{n:,}" for n in (*sizes, *counts)), f"{run.max_epochs:.4g}"))
    if len(rows) > 1:
        print(table(rows, left=1), flush=True)
    for line in reasons(refused):
        print(f"refused: {line}", file=sys.stderr)
    return 2 if refused else 0


def prepare(arguments: list[str]) -> int:
    """`llmexp prepare`: tokenises the data into the cache, so that runs start at once."""
    from llmexp import launch
    from llmexp.assemble import build_corpus, build_tokenizer

    args = launch.parse("prepare", arguments)
    with launch.hydra_app(args.config_dir) as hydra:
        config = launch.typed(launch.compose(hydra, args.overrides)[0])
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
    config = build(folder.read_config(args.run_dir))
    from llmexp import checkpoint
    from llmexp.sample import load_for_sampling
    from llmexp.sample import sample as sample_text

    try:
        loaded = checkpoint.latest(args.run_dir / folder.CHECKPOINTS, lambda text: print(text, file=sys.stderr))
        if loaded is None:
            raise ConfigError(f"{args.run_dir}: has no checkpoint yet")
        recorded = folder.read_json(args.run_dir / folder.RUN)
        tokenizer, model, length = load_for_sampling(config, recorded, loaded)
    except checkpoint.CheckpointError as error:
        raise ConfigError(str(error)) from None
    knobs = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    text = sample_text(tokenizer, model, length, config.precision.kind, args.prompt, args.tokens, **knobs)
    print(re.sub(r"[^\S\n\t ]|[\x00-\x08\x0b-\x1f\x7f-\x9f]", "�", text) if sys.stdout.isatty() else text)
    return 0
