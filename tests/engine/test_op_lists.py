"""The op lists of `configs/ops` say what is so in the installed torch, and the user's word stands above them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import yaml

from mpx.engine.devices import DEVICES
from mpx.engine.kernels import KERNELS, overload
from mpx.engine.oprules import Rule
from mpx.presets import resolve
from mpx.presets.shipped import configs_dir, op_groups

GROUPS: Mapping[str, Mapping[str, Any]] = {
    group: yaml.safe_load((configs_dir() / "ops" / f"{group}.yaml").read_text()) for group in op_groups()
}
LINES = [
    (group, op, content.get("facts", {}) | (facts or {}))
    for group, content in GROUPS.items()
    for op, facts in content["ops"].items()
]
# In torch's CPU list and not in ours: what torch calls itself inside ops that are listed, and a tool of quantization.
TORCHS_INTERNALS = {
    "aten::_convolution.deprecated",
    "aten::_lu_with_info",
    "aten::fake_quantize_per_tensor_affine",
    "aten::multilabel_margin_loss_forward",
}


def kind_at_level_1(group: str) -> str:
    ops = resolve("O1", overrides=[], cwd=configs_dir()).policy.ops
    return next(kind for kind in KERNELS if f"@{group}" in getattr(ops, kind))


def test_every_op_of_the_lists_exists():
    assert [f"{op} of {group}.yaml" for group, op, _ in LINES if not torch._C._dispatch_has_kernel(op)] == []


@pytest.mark.parametrize("group", GROUPS)
def test_lines_have_only_attributes_that_mean_something(group):
    when = {"torch", "device", "dtype", "weights", "has", "without", "ratio"}
    how = {"direction", "number", "layout", "by", "writes", "steps_a_cast"}
    for _, op, facts in (line for line in LINES if line[0] == group):
        assert set(facts) <= when | how, op
        assert set(facts.get("torch", ())) <= set(DEVICES), op
        assert facts.get("number") in (None, "widen", "saturate"), op
        assert "number" not in facts or facts["number"] in GROUPS[group]["told"], op


@pytest.mark.skipif(
    torch.cpu.get_capabilities().get("architecture") != "x86_64", reason="the names are of x86"
)
def test_capabilities_are_called_as_torch_calls_them():
    known = set(torch.cpu.get_capabilities())
    for group, op, facts in LINES:
        without = facts.get("without", ())
        names = [name for some in without.values() for name in some] if isinstance(without, dict) else without
        assert known.issuperset([*names, *facts.get("has", ())]), f"{op} of {group}.yaml"


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.type)
def test_what_is_called_torchs_own_stands_in_torchs_list(device):
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(device.autocast_key)
    claimed = {op for _, op, facts in LINES if device.type in facts.get("torch", ())}
    assert claimed <= set(registered)


def test_torchs_cpu_list_has_nothing_that_a_level_could_not_take_off():
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"))
    assert registered - {op for _, op, _ in LINES} == TORCHS_INTERNALS


# One call of each op that torch is said to treat as our rule would; `x` is a well-conditioned matrix, half or FP32.
X = torch.eye(4) * 4 + torch.arange(16.0).view(4, 4) / 16
TARGET = torch.tensor([0, 1, 2, 3])
ALONE = lambda op, x: op(x)  # noqa: E731 - the commonest entry of a table of calls
WITH_ITSELF = lambda op, x: op(x, x)  # noqa: E731
TO_TARGET = lambda op, x: op(x, TARGET)  # noqa: E731
CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    **dict.fromkeys(("linear", "matmul", "mm", "linalg_vecdot"), WITH_ITSELF),
    **dict.fromkeys(("cat", "stack"), lambda op, x: op([x, x.to(torch.get_autocast_dtype("cpu"))])),
    "index_copy": lambda op, x: op(x, 0, torch.tensor([0]), x[:1].float()),
    "bmm": lambda op, x: op(x[None], x[None]),
    **dict.fromkeys(("addmm", "_addmm_activation"), lambda op, x: op(x[0], x, x)),
    "addbmm": lambda op, x: op(x, x[None], x[None]),
    "baddbmm": lambda op, x: op(x[None], x[None], x[None]),
    **dict.fromkeys(("conv1d", "conv1d.padding", "conv_transpose1d"), lambda op, x: op(x[None], x[:, :, None])),
    **dict.fromkeys(("conv2d", "conv2d.padding"), lambda op, x: op(x[None, None], x[None, None, :2, :2])),
    "conv_transpose2d.input": lambda op, x: op(x[None, None], x[None, None, :2, :2]),
    **dict.fromkeys(("conv3d", "conv3d.padding"), lambda op, x: op(x[None, None, None], x[None, None, None, :2, :2])),
    "conv_transpose3d.input": lambda op, x: op(x[None, None, None], x[None, None, None, :2, :2]),
    "conv_tbc": lambda op, x: op(x[None], x[None], x[0]),
    "scaled_dot_product_attention": lambda op, x: op(x[None, None], x[None, None], x[None, None]),
    "prelu": lambda op, x: op(x, x[0]),
    **dict.fromkeys(
        ("nll_loss", "cross_entropy_loss", "multi_margin_loss"), lambda op, x: op(x.log_softmax(-1), TARGET)
    ),
    "nll_loss2d": lambda op, x: op(x[None, :, :, None].log_softmax(1), TARGET[None, :, None]),
    "multilabel_margin_loss": lambda op, x: op(x, torch.eye(4, dtype=torch.int64)),
    "binary_cross_entropy": lambda op, x: op(x.sigmoid(), x.sigmoid().float()),
    **dict.fromkeys(
        ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss", "soft_margin_loss"),
        lambda op, x: op(x, x.float()),
    ),
    "poisson_nll_loss": lambda op, x: op(x, x.float(), True, False, 1e-6, 1),
    "binary_cross_entropy_with_logits": lambda op, x: op(x, x.sigmoid().float()),
    "hinge_embedding_loss": lambda op, x: op(x, torch.ones_like(x)),
    "cosine_embedding_loss": lambda op, x: op(x, x, torch.ones(4)),
    "margin_ranking_loss": lambda op, x: op(x, x, torch.ones_like(x)),
    "triplet_margin_loss": lambda op, x: op(x, x, x),
    "ctc_loss.IntList": lambda op, x: op(x.log_softmax(-1)[:, None], torch.tensor([[1, 2]]), [4], [2]),
    "ctc_loss.Tensor": lambda op, x: op(
        x.log_softmax(-1)[:, None], torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    ),
    **dict.fromkeys(("prod", "trace", "inverse", "cholesky_inverse", "pinverse", "qr", "svd", "geqrf"), ALONE),
    "prod.dim_int": lambda op, x: op(x, 0),
    "cdist": WITH_ITSELF,
    **dict.fromkeys(("quantile", "nanquantile"), lambda op, x: op(x, torch.tensor([0.5], dtype=x.dtype))),
    **dict.fromkeys(("quantile.scalar", "nanquantile.scalar"), lambda op, x: op(x, 0.5)),
    **dict.fromkeys(("avg_pool3d", "max_pool3d"), lambda op, x: op(x[None, None, None].expand(1, 1, 2, 4, 4), 2)),
    **dict.fromkeys(("adaptive_avg_pool3d", "adaptive_max_pool3d"), lambda op, x: op(x[None, None, None], [1, 2, 2])),
    "max_unpool2d": lambda op, x: op(x[None, None], torch.arange(16).view(1, 1, 4, 4), [4, 4]),
    "max_unpool3d": lambda op, x: op(
        x[None, None, None], torch.arange(16).view(1, 1, 1, 4, 4), [1, 4, 4], [1, 1, 1], [0, 0, 0]
    ),
    "fractional_max_pool2d": lambda op, x: op(x[None, None], [2, 2], [2, 2], torch.full((1, 1, 2), 0.5, dtype=x.dtype)),
    "fractional_max_pool3d": lambda op, x: op(
        x.view(1, 1, 4, 2, 2), [2, 1, 1], [2, 1, 1], torch.full((1, 1, 3), 0.5, dtype=x.dtype)
    ),
    **dict.fromkeys(("reflection_pad1d", "replication_pad1d"), lambda op, x: op(x[None], [1, 1])),
    **dict.fromkeys(("reflection_pad2d", "replication_pad2d"), lambda op, x: op(x[None], [1, 1, 1, 1])),
    "replication_pad3d": lambda op, x: op(x[None, None], [1, 1, 1, 1, 1, 1]),
    **dict.fromkeys(
        ("grid_sampler", "grid_sampler_2d", "_grid_sampler_2d_cpu_fallback"),
        lambda op, x: op(x[None, None], x[None, :, :2, None].expand(1, 4, 2, 2), 0, 0, False),
    ),
    "grid_sampler_3d": lambda op, x: op(x[None, None, None], x[None, None, None, :, :3], 0, 0, False),
    "polar": WITH_ITSELF,
    "view_as_complex": lambda op, x: op(x[:, :2].contiguous()),
    **dict.fromkeys(("stft", "stft.center"), lambda op, x: op(x.flatten(), 4, return_complex=True)),
    **dict.fromkeys(("cholesky", "linalg_cholesky", "linalg_cholesky_ex"), lambda op, x: op(x @ x.mT)),
    "cholesky_solve": WITH_ITSELF,
    "orgqr": lambda op, x: op(x, x[0]),
    "ormqr": lambda op, x: op(x, x[0], x),
    "lu_solve": lambda op, x: op(x, x, torch.arange(1, 5, dtype=torch.int32)),
    "triangular_solve": WITH_ITSELF,
    "linalg_householder_product": lambda op, x: op(x, x[0]),
    **dict.fromkeys(("linalg_lstsq", "linalg_solve"), WITH_ITSELF),
    "linalg_tensorinv": lambda op, x: op(x.view(2, 2, 4)),
    "linalg_tensorsolve": lambda op, x: op(x.view(4, 2, 2), x[0]),
    "linalg_matrix_rank": lambda op, x: op(x, 0.5),
    "linalg_matrix_rank.atol_rtol_float": lambda op, x: op(x, atol=0.5),
    "linalg_matrix_rank.tol_tensor": lambda op, x: op(x, torch.tensor(0.5)),
    "linalg_matrix_rank.atol_rtol_tensor": lambda op, x: op(x, atol=torch.tensor(0.5)),
    "linalg_cond.p_str": lambda op, x: op(x, "fro"),
    "mkldnn_rnn_layer": None,  # takes packed weights of oneDNN
    "_native_multi_head_attention": lambda op, x: op(
        x[None], x[None], x[None], 4, 1, x.repeat(3, 1), x.flatten()[:12], x, x[0]
    ),
}  # fmt: skip
CLAIMS = [(group, op, facts) for group, op, facts in LINES if "cpu" in facts.get("torch", ())]


def call_of(op: str) -> Callable[[Any, torch.Tensor], Any] | None:
    name = op.removeprefix("aten::")
    return ALONE if name.startswith(("fft_", "linalg_")) and name not in CALLS else CALLS[name]


def types(
    op: Any, call: Callable[[Any, torch.Tensor], Any], x: torch.Tensor, half: torch.dtype
) -> list[torch.dtype]:
    with torch.autocast("cpu", dtype=half):
        result = call(op, x)
    found = result if isinstance(result, tuple | list) else [result]
    return [t.dtype for t in found if isinstance(t, torch.Tensor)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_torchs_own_gives_the_types_that_our_rules_would(half):
    differ, tried = {}, 0
    for group, op, facts in CLAIMS:
        call = call_of(op)
        if call is None:
            continue
        rule = Rule(op, kind_at_level_1(group), {k: v for k, v in facts.items() if k != "torch"})
        ours = KERNELS[rule.kind](rule, DEVICES["cpu"], lambda name, text: None)
        for x in (X, X.to(half)):
            theirs, mine = types(overload(op), call, x, half), types(ours, call, x, half)
            tried += 1
            if theirs != mine or not theirs:
                differ[op, x.dtype] = theirs, mine
    assert not differ
    assert tried > 200
