"""Have torch show recompiles, and compile without building C++, which takes its time."""

import torch

compiled = torch.compile
torch._logging.set_logs(recompiles=True)
torch.compile = lambda *a, **k: compiled(*a, **{**k, "backend": "aot_eager", "mode": None})


def hook(event, context):
    pass
