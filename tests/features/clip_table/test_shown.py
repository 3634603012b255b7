"""What a comparison shows of rules of clipping."""

from llmexp.compare.comparing import compare
from llmexp.compare.page import page
from tests.compare.pages import Outline
from tests.compare.synthetic import make_sweep
from tests.compare.test_output import text_of

# What rules leave in status.json: of the norm, and of what else they look at.
SEEN = {
    "norm": {"clip__max_norm": 0.5},
    "zscore": {},
    "value": {"clip__max_value": 0.1, "measures": {"grad_entry_max": (0.1, 0.25)}},
    "adaptive": {"clip__ratio": 0.01, "measures": {"units": (0.01, 0.052)}},
    "per_group": {"measures": {"grad_norm/*.mlp.*": (None, 0.0), "grad_norm/*": (2.0, 0.5)}},
    "update": {"clip__threshold": 1.0, "measures": {"tensors": (1.0, 0.4), "heads": (9.0, 0.3)}},
}
TABLE = [{"limit": 0.123456, "share": 0.75}]


def test_every_rule_of_clipping_tells_what_it_clipped(tmp_path, monkeypatch, words):
    points = {}
    for i, (kind, given) in enumerate(SEEN.items()):
        knobs = {k: v for k, v in given.items() if k != "measures"}
        measures = {
            key: {"limit": limit, "share": share, "table": TABLE}
            for key, (limit, share) in given.get("measures", {}).items()
        }
        if kind == "update":
            knobs["clip__qk_limit"] = 9.0
        if kind == "zscore":
            measures["clip_limit"] = {"limit": None, "share": 0.0, "quantiles": {"50": 1.5}}
        clip = {"share": 0.25, "quantiles": {"50": 1.25}, "table": TABLE, "measures": measures}
        more = {"offset": i, "clip__kind": kind, "status": {"clip": clip}}
        points[kind] = {"max_norm": None} | knobs | more
    folder = make_sweep(tmp_path / "s", points, ["clip.kind"])
    for width in (120, 80, 60):
        words("compare/clipping", text_of(folder, width, monkeypatch), f"{width} columns")
    text = Outline(page(compare([folder]))).text()
    words("compare/clipping", text.partition("Gradient clipping")[2], "page")
