"""On a CUDA device: the same numbers as on the CPU, and no host wait between rows. Skips itself
without one.

Widths of heads are 64 and lengths 128, so that the kernels of real runs are the ones that are
tested.
"""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from llmexp.models import offload
from tests.conftest import Result, llmexp, train
from tests.tools import by_kernel, exact, needs_cuda

pytestmark = [pytest.mark.gpu, needs_cuda]
SETTINGS = [
    "data=synthetic", "data.n_tokens=40000", "train.max_steps=10", "train.log_every=5",
    "batch.micro_batch_size=4", "batch.sequence_length=128", "model.max_position_embeddings=128",
    "model.d_model=128", "model.d_ff=256", "model.n_heads=2", "train.compile=false",
    "train.device=cuda",
]  # fmt: skip
LLAMA = ["model=llama_100m", "model.n_kv_heads=1", "model.n_layers=2"]
CHUNKED = ["model.vocab_size=4099"]  # odd: rows of logits that are not aligned
LIMITS = "[{match: '*.attention.*', max_norm: 0.3}, {match: '*', max_norm: 1.0}]"
RULES = {
    "value": ["clip=value", "clip.max_value=0.05"],
    "adaptive": ["clip=adaptive", "clip.ratio=0.02"],
    "zscore": ["clip=zscore", "clip.z=0.5", "clip.decay=0.8", "clip.warmup_steps=2"],
    "quantile": ["clip=quantile", "clip.quantile=0.4", "clip.warmup_steps=2"],
    "update": ["clip=update", "clip.threshold=0.7"],
    "per_group": ["clip=per_group", f"clip.limits={LIMITS}"],
    "heads": ["clip.qk_limit=0.05"],
}
OPTIMIZERS = ["sgd", "lion", "muon", "adafactor", "schedule_free", "soap", "adamw_8bit"]


def run(folder: Path, name: str, *more: str, **env: str) -> Result:
    return train(folder, name, *SETTINGS, *more, **env)


def losses(result: Result) -> list[float]:
    return [row["train/loss"] for row in result.rows()]


@pytest.mark.parametrize("more", [[], LLAMA, CHUNKED], ids=["gpt2", "llama", "chunked"])
def test_float64_on_the_gpu_equals_the_cpu(tmp_path, more):
    steps = ["precision=fp64", "train.max_steps=3", "train.log_every=1"]
    runs = [run(tmp_path, d, *more, *steps, f"train.device={d}") for d in ("cpu", "cuda")]
    first, *later = zip(*(result.rows() for result in runs), strict=True)
    # float64 in another order of summation: 2**-53 sqrt(a few 10,000 terms); Adam then divides by
    # moments, the smallest of which are noise.
    for a, b, rel in [(*first, 1e-12), *((*pair, 1e-8) for pair in later)]:
        for key in ("train/loss", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=rel), key


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_clipping_equal_those_on_the_cpu(tmp_path, rule):
    """And what is measured layer by layer, in float64 (bounds as above)."""
    steps = [
        "precision=fp64", "train.max_steps=5", "train.log_every=1", "metrics.layers_every=1",
        "optimizer.lr=1e-4",  # norms stay apart, and no limit is a tie
    ]  # fmt: skip
    runs = [run(tmp_path, d, *RULES[rule], *steps, f"train.device={d}") for d in ("cpu", "cuda")]
    for a, b in zip(*(result.rows() for result in runs), strict=True):
        assert a["clip_fraction"] == b["clip_fraction"]
        keys = {"train/loss", "grad_norm", "grad_norm_post_clip"}
        keys |= {key for key in a if key.startswith(("clip_limit", "attention_logit_max"))}
        for key in keys:
            assert a[key] == pytest.approx(b[key], rel=1e-8), key
    layers = [(r.folder / "layers.jsonl").read_text().splitlines() for r in runs]
    assert len(layers[0]) == 5
    for one, other in zip(*layers, strict=True):
        of_cpu, of_cuda = json.loads(one), json.loads(other)
        for name, figures in of_cpu.items():
            assert of_cuda[name] == pytest.approx(figures, rel=1e-7), name


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "adafactor", "schedule_free"])
def test_optimizers_equal_those_on_the_cpu(tmp_path, optimizer):
    """In float64. Muon's polynomial is of bfloat16; SOAP's basis and 8-bit moments turn on the last
    bit."""
    steps = ["precision=fp64", "train.max_steps=4", "train.log_every=1", "schedule=constant"]
    more = [f"optimizer={optimizer}", *steps]
    runs = [run(tmp_path, d, *more, f"train.device={d}") for d in ("cpu", "cuda")]
    for a, b in zip(*(result.rows() for result in runs), strict=True):
        for key in ("train/loss", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-7), key


class Head(nn.Module):
    def __init__(self, rows: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, width, device="cuda"))
        self.head_weight = nn.Parameter(0.05 * torch.randn(vocabulary, width, device="cuda"))

    def hidden(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        return self.table[tokens_bt]

    def forward(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        return F.linear(self.hidden(tokens_bt), self.head_weight)


@pytest.mark.parametrize(
    ("dtype", "loss_off", "gradient_off"),
    # The operands are rounded alike in the reference; what is left is one rounding of logits
    # and of the probabilities to 8 or 11 bits, which averages over the vocabulary.
    [(torch.bfloat16, 2e-4, 1e-2), (torch.float16, 2e-4, 2e-3), (torch.float32, 1e-6, 1e-5)],
)
def test_the_chunked_loss_against_float64(dtype, loss_off, gradient_off):
    torch.manual_seed(1)
    model, rows, vocabulary = Head(5000, 256, 50257), 5000, 50257
    tokens = torch.arange(rows, device="cuda")[None]
    targets = torch.randint(0, vocabulary, (1, rows), device="cuda")
    targets[torch.rand(1, rows, device="cuda") < 0.05] = -100
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
        loss = by_kernel(model, "chunked")(tokens, targets)
    (loss * 1e-3).backward()
    given = (model.table, model.head_weight)
    exact_ones = [p.detach().to(dtype).double().requires_grad_() for p in given]
    wanted = F.cross_entropy(exact_ones[0] @ exact_ones[1].T, targets[0], reduction="sum")
    (wanted * 1e-3).backward()
    assert float(loss) == pytest.approx(float(wanted), rel=loss_off)
    for p, reference in zip(given, exact_ones, strict=True):
        difference = (p.grad.double() - reference.grad).norm() / reference.grad.norm()
        assert float(difference) < gradient_off


@pytest.mark.parametrize(
    "more",
    [
        ["precision=fp32"], ["precision=bf16"], ["precision=fp16"],
        ["precision=bf16", *LLAMA], ["precision=bf16", "optimizer=muon"],
        ["precision=bf16", *CHUNKED, "metrics.noise_scale_every=1"],
        ["precision=bf16", "metrics.skip_outliers=true"],
        ["precision=bf16", "checkpoint.every=5", "checkpoint.async=true"],
        ["precision=bf16", "metrics.spikes=true", "metrics.layers_every=2", "train.ema=0.9"],
        ["precision=bf16", "batch.ramp={0: 4, 2000: 8}"],
        ["precision=bf16", "parallelism.activation_checkpointing=offload"],
        ["precision=bf16", "parallelism.activation_checkpointing=offload", *LLAMA],
        *(["precision=bf16", f"optimizer={name}"] for name in ("lion", "sgd")),
        *(["precision=bf16", "optimizer.lr=1e-4", *rule] for rule in RULES.values()),
        ["precision=fp16", *RULES["zscore"]],
    ],
    ids=" ".join,
)  # fmt: skip
def test_steps_without_a_row_do_not_wait_for_the_device(tmp_path, more):
    """torch's sync debug mode raises at any wait; hooks switch it on between the rows only."""
    (tmp_path / "syncs.py").write_text(
        "import torch\n"
        "def watch(event, context):\n"
        "    quiet = context.step % 5 not in (0, 1)\n"
        "    torch.cuda.set_sync_debug_mode('error' if event == 'step_start' and quiet else "
        "'default')\n"
    )
    hooked = ["--allow", "syncs", "hooks=[syncs.watch]", "train.eval_every=null"]
    run(tmp_path, "run", *hooked, *more)


def test_what_waits_on_the_host_goes_there_through_pinned_memory():
    """Queries, keys and values are slices of one tensor: they have gaps."""
    x = torch.randn(4, 128, 3 * 64, device="cuda")
    heads = [part.view(4, 128, 2, 32).transpose(1, 2) for part in x.split(64, -1)]
    with torch.profiler.profile() as seen:
        sent = [offload.to_host(part) for part in heads]
        torch.cuda.synchronize()
    copies = {e.key for e in seen.key_averages() if e.key.startswith("Memcpy DtoH")}
    assert copies == {"Memcpy DtoH (Device -> Pinned)"}
    assert all(torch.equal(a, b.cpu()) for a, b in zip(sent, heads, strict=True))


def test_a_step_allocates_nothing_new(tmp_path):
    (tmp_path / "segments.py").write_text(
        "import torch\n"
        "def watch(event, context):\n"
        "    if event == 'step_end':\n"
        "        return {'mine/segments': torch.cuda.memory_stats()['segment.all.allocated']}\n"
    )
    hooked = ["--allow", "segments", "hooks=[segments.watch]", "train.log_every=1"]
    rows = run(tmp_path, "run", *hooked, "precision=bf16", "train.eval_every=null").rows()
    assert len({row["mine/segments"] for row in rows[3:-1]}) == 1


@pytest.mark.parametrize("kind", ["full", "selective", "offload"])
def test_recomputation_changes_no_bit(tmp_path, kind):
    more = ["precision=bf16", "train.deterministic=true", "model.dropout=0.1"]
    kept = run(tmp_path, "kept", *more)
    again = run(tmp_path, "again", *more, f"parallelism.activation_checkpointing={kind}")
    assert losses(kept) == losses(again)


@pytest.mark.parametrize("more", [[], LLAMA, CHUNKED], ids=["gpt2", "llama", "chunked"])
def test_compiled_steps_follow_eager_ones(tmp_path, more):
    more = [*more, "precision=bf16", "train.log_every=1", "train.max_steps=4"]
    pairs = zip(
        run(tmp_path, "eager", *more).rows(),
        run(tmp_path, "compiled", *more, "train.compile=true").rows(),
        strict=True,
    )
    for a, b in pairs:  # fused operations keep more digits; 2**-8 over a few roundings
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-2)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=5e-2)


def test_fp16_overflows_are_skipped(tmp_path):
    more = ["precision=fp16", "precision.init_scale=1e12", "train.log_every=1"]
    rows = run(tmp_path, "run", *more, "train.max_steps=40").rows()
    skipped = [row["skipped"] for row in rows]
    assert skipped[0]
    assert not skipped[-1]
    scales: list[Any] = [row["loss_scale"] for row in rows]
    assert scales[0] == pytest.approx(1e12, rel=2**-24)  # fp32
    halved = [after / before for before, after in itertools.pairwise(scales)]
    assert halved == [0.5 if one else 1.0 for one in skipped[:-1]]


@pytest.mark.parametrize(
    "more",
    [
        ["precision=bf16"], ["precision=fp16"], ["precision=bf16", *RULES["zscore"]],
        ["precision=bf16", *RULES["quantile"], "clip.qk_limit=0.05"],
        *(["precision=bf16", "schedule=constant", f"optimizer={name}"] for name in OPTIMIZERS),
    ],
    ids=" ".join,
)  # fmt: skip
def test_deterministic_runs_resume_bit_for_bit(tmp_path, more):
    """Saved in the background, as is the default here."""
    settings = [
        "model.dropout=0.1", "checkpoint.every=5", "train.deterministic=true", *CHUNKED, *more
    ]  # fmt: skip
    whole = run(tmp_path, "whole", *settings)
    assert exact(run(tmp_path, "again", *settings)) == exact(whole)
    cut = Result(0, "", "", tmp_path / "cut")
    shutil.copytree(whole.folder, cut.folder)
    shutil.rmtree(cut.checkpoint(10))
    (cut.folder / "status.json").write_text('{"state": "running"}')
    run(tmp_path, "cut", *settings, "checkpoint.resume=must")
    first, second = (load_file(r.checkpoint(10) / "model.safetensors") for r in (whole, cut))
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_a_step_is_replayed_bit_for_bit(tmp_path):
    """The row that was recorded is the proof: a difference would be an error."""
    settings = ["precision=bf16", "checkpoint.every=4", "train.log_every=1", *CHUNKED]
    run(tmp_path, "run", *settings, "train.deterministic=true", "checkpoint.keep=null")
    replayed = llmexp("replay", "run@7", "--json", cwd=tmp_path)
    assert replayed.code == 0, replayed.err + replayed.out
    assert json.loads(replayed.out)["step"] == 7
