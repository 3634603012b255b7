"""Features of a user's own, which are named as hooks."""

import torch

from llmexp.train.feature import Feature


class Cosine(Feature):
    """Put the cosine between a step's update and the one before into its row."""

    name = "cosine"

    def __init__(self, setup, every=1):
        self._weights, self._every = setup.parameters, every
        self._before = self._last = self._found = None

    def backward_start(self, window):
        self._before = torch.cat([p.detach().flatten() for p in self._weights])

    def updated(self, window, skip):
        update = torch.cat([p.detach().flatten() for p in self._weights]) - self._before
        if self._last is not None:
            self._found = torch.nn.functional.cosine_similarity(update, self._last, dim=0)
        self._last = update

    def row(self, window):
        if self._found is None or (window.step + 1) % self._every:
            return {}
        return {"mine/cosine": float(self._found)}

    def state_dict(self):
        return {} if self._last is None else {"last": self._last.tolist()}

    def load_state_dict(self, state, anew):
        if not anew:
            self._last = torch.tensor(state["last"], dtype=self._weights[0].dtype)


class NoFeature:
    """A class that listens to nothing."""

    def __init__(self, setup):
        pass


class Progress(Feature):
    """Keep its steps, under the name of a part of each checkpoint, and a tensor."""

    name = "progress"

    def __init__(self, setup):
        self._steps, self._tensors = 0, {n: t * 0 for n, t in setup.model.named_parameters()}

    def updated(self, window, skip):
        self._steps += 1

    def row(self, window):
        return {f"mine/{self.name}": self._steps}

    def state_dict(self):
        return {"steps": self._steps}

    def load_state_dict(self, state, anew):
        self._steps = state["steps"]

    def tensors(self):
        return {name: tensor.detach() for name, tensor in self._tensors.items()}


class Layers2(Progress):
    """The same, under the name of its class."""

    name = ""


class Spaced(Cosine):
    """One whose name is that of no file."""

    name = "my feature"


class Looking(Feature):
    """Look at where the run is, and at values."""

    def __init__(self, setup):
        self._weight = setup.parameters[0]

    def updated(self, window, skip):
        assert self.loop.progress.step == window.step
        float(self._weight.sum())


class Rate(Feature):
    """Put a figure into the row that it has."""

    def __init__(self, setup):
        pass

    def row(self, window):
        return {"lr": 0.0}
