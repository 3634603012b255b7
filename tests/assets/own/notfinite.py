"""Rates that are none and values that are not finite, only once the hook `turns` says so."""

import torch

from llmexp.optim.optimizers.adamw import AdamW

BAD = False


def rate(update, total, bad=None, value="1.0", always=True):
    """A schedule with one bad value; without `always` only once a hook says so."""
    if update == bad and (always or BAD):
        return {"None": None, "text": "text"}[value] if value in ("None", "text") else float(value)
    return 1 - update / total / 2


def turns(event, context):
    global BAD
    BAD = True


def base(event, context, at=1, key="initial_lr", value="nan"):
    """A hook that changes a group."""
    if event == "step_end" and context.step == at:
        for group in context.optimizers[0].param_groups:
            group[key] = float(value)


class Bursts(AdamW):
    """AdamW, whose update number `at` leaves a value in the weights, or in a state."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["count"] += 1
            if BAD and group["count"] == group["at"]:  # not in a trial before the run
                for p in group["params"][1:2]:
                    held = p if group["where"] == "weights" else self.state[p][group["where"]]
                    with torch.no_grad():
                        held.fill_(group["value"])


def bursts(model, lr, at, value, where):
    given = {"count": 0, "at": at, "value": float(value), "where": where}
    return Bursts([{"params": list(model.parameters()), **given}], lr=lr)


class Lowest(AdamW):
    """AdamW, which also keeps the smallest gradients so far: of those that are negative."""

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            low = self.state[p].get("low", torch.full_like(p, torch.inf))
            self.state[p]["low"] = torch.where(p.grad < 0, p.grad.minimum(low), low)


def lowest(model, lr):
    return Lowest(model.parameters(), lr=lr)


def spoils(model, lr):
    """An optimizer that spoils the first weights, not those of a trial."""
    p = next(model.parameters())
    with torch.no_grad():
        p.fill_(torch.nan if len(p) > 16 else 0)
    return AdamW(model.parameters(), lr=lr)
