"""What a run says of its noise scale at its end."""

import functools
from types import SimpleNamespace

from llmexp.features.noise.train import Noise
from llmexp.run import Run
from llmexp.run.stages import BatchStage, Begin
from tests.train.test_end import made


def test_a_fork_that_stops_before_its_first_step_sums_up_its_parents_noise_scale():
    loop = made(step=4)
    noise = Noise(SimpleNamespace(parameters=[], mesh=None), 1, 12)  # type: ignore[arg-type]
    noise.begin(loop)
    noise.scale.add(2.0, 12, 1.0, 48)
    loop.features.append(noise)
    run = SimpleNamespace(
        ramp="0: 4, 400: 8", first_step=4, sequence_length=12, total_sequences=100,
        begin=Begin(step=4, sequences=16, tokens=192, tokens_seen=180),
        stages=(BatchStage(0, 4, 16, 4, 1), BatchStage(400, 9, 36, 8, 2)),
    )  # fmt: skip
    for name in ("stage_at", "sequences_at", "tokens_at"):
        setattr(run, name, functools.partial(getattr(Run, name), run))
    loop.parts.run = run
    assert loop.features.by_name("status")["noise"]["verdict"].startswith(
        "whether real_batch_size 4 is large"
    )
