"""The picture of a run in its folder."""

from tests.train.test_train import SYNTHETIC


def test_a_run_that_ends_draws_its_curves(runs):
    result = runs(*SYNTHETIC, "metrics.picture=true")
    assert (result.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [line for line in result.out.splitlines() if line.startswith("picture ")]
