"""Answer Hydra's own flags, such as --cfg and --info, which start nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from llmexp.compose import app, command_line
from llmexp.compose.security import refuse_secrets, variables_kept
from llmexp.config.values import ConfigError
from llmexp.run.budget import BUDGETS, budgets_in
from llmexp.system import child


def asked(args: Any) -> bool:
    """Return whether one of Hydra's flags was given.

    Raises ConfigError for flags that only act beside one of them.
    """
    if args.resolve and not args.cfg:
        raise ConfigError(
            "idle_knob", "--resolve: acts beside --cfg only; for example --cfg job --resolve"
        )
    if args.package is not None and not args.cfg:
        text = "acts beside --cfg only; for example --cfg job --package train"
        raise ConfigError("idle_knob", f"--package {args.package}: {text}")
    return bool(args.cfg or args.info is not None or args.hydra_help or args.shell_completion)


def answer_flags(args: Any) -> int:
    """Print what the flag asks for; return the exit code. Raise ConfigError."""
    # Hydra answers through logging, which would trace a closed pipe line by line
    logging.raiseExceptions = False
    with (
        app.hydra_app(args.config_dir, args.overrides) as hydra,
        app.user_errors(),
        variables_kept(),
    ):
        if args.shell_completion:
            check_completion(args.overrides)
            hydra.shell_completion(app.CONFIG_NAME, args.overrides)
            return 0
        # refuses what would run code
        cfg, multirun = app.compose(hydra, args.overrides, args.multirun)
        own = [str(k) for k in cfg if k != "hydra"]
        refuse_secrets(OmegaConf.to_container(OmegaConf.masked_copy(cfg, own)))
        if args.cfg:
            from llmexp.sweep.points import expand

            for overrides in expand(cfg, args.overrides) if multirun else [args.overrides]:
                if multirun:
                    child.say(f"# {' '.join(overrides)}")
                how = args.cfg, args.package, args.resolve
                hydra.show_cfg(app.CONFIG_NAME, one_budget(overrides), *how)
        elif args.info is not None:
            hydra.show_info(args.info, app.CONFIG_NAME, args.overrides)
        else:
            shown = get_args_parser()
            shown._actions = [a for a in shown._actions if a.dest not in command_line.REFUSED_FLAGS]
            print(hydra.get_help(cfg.hydra.hydra_help, cfg, shown, resolve=False))
    return 0


def one_budget(overrides: Sequence[str]) -> list[str]:
    """Return the overrides, and `KEY=null` for each budget that one of them replaces."""
    given = budgets_in(overrides)
    return [*overrides, *(f"{key}=null" for key in BUDGETS if given and key not in given)]


def check_completion(words: Sequence[str]) -> None:
    """Raise ConfigError unless --shell-completion is given an action."""
    if sum(word.partition("=")[0] in ("install", "uninstall", "query") for word in words) != 1:
        text = "one of install=SHELL and uninstall=SHELL is needed, with bash, zsh or fish"
        way = 'for example eval "$(llmexp -sc install=bash)"'
        raise ConfigError("wrong_type", f"--shell-completion: {text}; {way}")
