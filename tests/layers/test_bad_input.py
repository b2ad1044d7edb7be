"""Wrong input is refused with a sentence: what came, what was expected, what to do.

Each row gives a call, the error, and the parts of its text that carry the information. Two sweeps at the end give every
layer class things that are no arguments and no tensors of its kind.
"""

import inspect
import linecache
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normlab
from normlab import (
    AdaptiveInstanceNorm2d,
    AuxiliaryBatchNorm1d,
    AuxiliaryBatchNorm2d,
    BatchGroupNorm2d,
    BatchNorm1d,
    BatchNorm2d,
    ConditionalBatchNorm2d,
    GhostBatchGroupNorm2d,
    GroupNorm2d,
    GroupNorm3d,
    InstanceLevelMetaNorm2d,
    InstanceNorm1d,
    InstanceNorm2d,
    KalmanNorm2d,
    LayerNorm2d,
    ModeNorm1d,
    Norm,
    Norm2d,
    Pool,
    SparseSwitchNorm2d,
    Statistics,
    StyleMoments,
    SwitchNorm1d,
    SwitchNorm2d,
    convert,
    set_radius,
)


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 6, 5, 5)))


class Pair(normlab.Statistics):
    pools = (normlab.Pool("channel", True),)

    def combine(self, statistics, *tensors, eps):  # type: ignore[override]
        return statistics[0]


class NoCombine(Statistics):
    pools = (Pool("channel", True),)


class Own(Norm2d):
    """A user's class, whose name ends in no number of dimensions."""


def at_another_resolution(training: bool) -> None:
    layer = BatchGroupNorm2d(6, 4)
    layer(x())
    layer.train(training)(x(4, 6, 8, 8))


def loaded_at_another_resolution() -> None:
    layer, fresh = BatchGroupNorm2d(6, 4), BatchGroupNorm2d(6, 4)
    layer(x())
    fresh.load_state_dict(layer.state_dict())
    fresh.eval()(x(4, 6, 8, 8))


def centre(m: normlab.Moments) -> normlab.Coefficients:
    return normlab.Coefficients(m.mean, torch.ones_like(m.mean))


def traced_by_jit() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and used
        torch.jit.trace(nn.Sequential(GroupNorm2d(2, 6)), x())


def aux(n: int = 4) -> Callable[[Any], Tensor]:
    return lambda branch: AuxiliaryBatchNorm2d(6)(x(n, 6, 5, 5), branch)


def ccbn(label: Any) -> Tensor:
    return ConditionalBatchNorm2d(6, num_classes=3)(x(), label)


def adain(style: Any) -> Tensor:
    return AdaptiveInstanceNorm2d(6)(x(), style)


V, T = ValueError, TypeError
ROWS: dict[str, tuple[Callable[[], object], type[Exception], list[str]]] = {
    # the input
    "2d given a sequence": (
        lambda: BatchNorm2d(6)(x(4, 6, 5)),
        V,
        ["BatchNorm2d takes [N, C, H, W]", "3 dimensions, [4, 6, 5]", "use BatchNorm1d for [N, C] or [N, C, L]"],
    ),
    "1d given images": (lambda: SwitchNorm1d(6)(x()), V, ["[N, C] or [N, C, L]", "[4, 6, 5, 5]", "use SwitchNorm2d"]),
    "3d given images": (lambda: GroupNorm3d(2, 6)(x()), V, ["[N, C, T, H, W]", "use GroupNorm2d for [N, C, H, W]"]),
    "2d given volumes": (lambda: LayerNorm2d(6)(x(2, 6, 2, 2, 2)), V, ["5 dimensions", "use LayerNorm3d"]),
    "one image without a batch": (lambda: BatchNorm2d(6)(x(6, 5, 5)), V, ["[6, 5, 5]", "one sample", "x.unsqueeze(0)"]),
    "one vector without a batch": (lambda: Norm(6)(x(6)), V, ["Norm takes [N, C, *S]", "[6]", "x.unsqueeze(0)"]),
    "six dimensions": (lambda: Norm2d(6)(x(1, 1, 6, 1, 1, 1)), V, ["Norm2d takes [N, C, H, W]", "6 dimensions"]),
    "a user's class": (lambda: Own(6)(x(4, 6)), V, ["Own takes [N, C, H, W]", "2 dimensions, [4, 6]"]),
    "channels": (lambda: BatchNorm2d(6)(x(4, 5, 7, 7)), V, ["BatchNorm2d has 6 channels", "got 5 in [4, 5, 7, 7]"]),
    "channels last": (
        lambda: BatchNorm2d(6)(x(4, 5, 5, 6)),
        V,
        ["has 6 channels", "got 5 in [4, 5, 5, 6]", "channels seem to be last", "x.movedim(-1, 1)"],
    ),
    "a list": (lambda: BatchNorm2d(6)([1.0]), T, ["takes a tensor", "got list"]),  # type: ignore[arg-type]
    "integers": (lambda: BatchNorm2d(6)(x().long()), T, ["floating-point", "torch.int64", "x.float()"]),
    "complex": (
        lambda: BatchNorm2d(6)(x().to(torch.complex64)),
        T,
        ["floating-point", "torch.complex64", "view_as_real"],
    ),
    "fp8": (
        lambda: BatchNorm2d(6)(x().to(torch.float8_e4m3fn)),
        T,
        ["16 bits or more", "torch.float8_e4m3fn", "x.float()"],
    ),
    "sparse": (lambda: BatchNorm2d(6)(x().to_sparse()), T, ["dense input", "torch.sparse_coo", "x.to_dense()"]),
    "a nested tensor": (
        lambda: BatchNorm2d(6)(torch.nested.nested_tensor([x(6, 5, 5), x(4, 5, 5)], layout=torch.jagged)),
        T,
        ["dense input", "a nested tensor", "x.to_padded_tensor(0.0)"],
    ),
    "no values": (
        lambda: SwitchNorm2d(6)(x().to("meta")),
        V,
        ["the input of SwitchNorm2d is on meta", "its parameters are on cpu", "call x.to('cpu')"],
    ),
    "a layer without values": (
        lambda: SwitchNorm2d(6, device="meta")(x()),
        V,
        ["its parameters are on meta", "layer.to_empty(device='cpu')"],
    ),
    # what arguments need of each other; each alone is in test_arguments.py
    "fp8 parameters": (
        lambda: BatchNorm2d(6, dtype=torch.float8_e5m2),
        T,
        ["dtype is torch.float8_e5m2", "torch.float32"],
    ),
    "an activation that is no name": (lambda: BatchNorm2d(6, act=[1]), V, ["no activation [1]", "relu"]),  # type: ignore[arg-type]
    "no weighting": (
        lambda: normlab.Mixture((Pool("channel", True),), weighting="sofmax"),
        V,
        ["did you mean 'softmax'"],
    ),
    "groups": (lambda: GroupNorm2d(4, 6), V, ["6 channels", "4 equal groups", "[1, 2, 3, 6]"]),
    "groups of weights": (lambda: SwitchNorm2d(6, groups=4), V, ["6 channels", "4 groups of weights", "[1, 2, 3, 6]"]),
    "keys": (lambda: InstanceLevelMetaNorm2d(24), V, ["key_size=16", "24 channels", "key_size that divides"]),
    "last_gamma": (lambda: SwitchNorm2d(6, affine=False, last_gamma=True), V, ["last_gamma=True", "needs affine=True"]),
    "radius above one": (lambda: SparseSwitchNorm2d(6).set_radius(1.5), V, ["radius is 1.5", "between 0 and 1"]),
    "negative radius": (
        lambda: set_radius(nn.Sequential(SparseSwitchNorm2d(6)), -0.5),
        V,
        ["radius is -0.5", "between 0 and 1"],
    ),
    "radius of nothing": (
        lambda: set_radius(nn.Sequential(SwitchNorm2d(6)), 0.5),
        V,
        ["Sequential", "SparseSwitchNorm"],
    ),
    # names
    "statistics": (
        lambda: Norm2d(6, "instanse"),
        V,
        ["no statistics 'instanse'", "did you mean 'instance'", "batch_group"],
    ),
    "statistics of papers": (lambda: Norm2d(6, "renrom"), V, ["'renrom'", "did you mean 'renorm'"]),
    "modes": (lambda: Norm2d(6, "modes(x)"), V, ["'modes(x)'", "num_modes is 'x'", "an integer of at least 1"]),
    "statistics of another kind": (lambda: Norm2d(6, 3), T, ["a name such as 'batch'", "got int"]),  # type: ignore[arg-type]
    "pool": (lambda: SwitchNorm2d(6, ("bacth", "layer")), V, ["no pool 'bacth'", "did you mean 'batch'"]),
    "pool without its number": (lambda: Norm2d(6, "group"), V, ["'group' needs its number of groups", "'group(32)'"]),
    "pool with a number": (lambda: Norm2d(6, "batch(3)"), V, ["no pool 'batch(3)'", "did you mean 'batch'"]),
    "pool of another kind": (lambda: SwitchNorm2d(6, (3,)), T, ["a pool is a name", "got 3"]),  # type: ignore[arg-type]
    "pools as one name": (
        lambda: SwitchNorm2d(6, "batch"),
        T,
        ["several pools", "('instance', 'layer', 'batch')", "'batch'"],
    ),
    "eps in place of the pools": (
        lambda: SwitchNorm2d(6, 1e-3),  # type: ignore[arg-type]
        T,
        ["several pools", "('instance', 'layer', 'batch')", "got 0.001"],
    ),
    "no pool": (lambda: SwitchNorm2d(6, ()), V, ["at least one pool", "('instance', 'layer', 'batch')"]),
    "a pool twice": (lambda: Norm2d(6, ("batch", "batch")), V, ["may stand once", "batch, batch"]),
    "affine": (lambda: Norm2d(6, affine="sandwhich"), V, ["no affine map 'sandwhich'", "did you mean 'sandwich'"]),
    "affine term": (
        lambda: Norm2d(6, affine=("shared", "clas"), num_classes=3),
        V,
        ["no affine term 'clas'", "did you mean 'class'"],
    ),
    "affine term twice": (
        lambda: Norm2d(6, affine=("shared", "shared")),
        V,
        ["may stand once", "('shared', 'shared')"],
    ),
    "predicted first": (lambda: Norm2d(32, affine=("predicted", "shared")), V, ["'predicted'", "must be last"]),
    "affine of another kind": (lambda: Norm2d(6, affine=3), T, ["a name such as 'shared'", "got 3"]),  # type: ignore[arg-type]
    "affine without classes": (lambda: Norm2d(6, affine="class"), V, ["each class", "num_classes=..."]),
    "affine without branches": (lambda: Norm2d(6, affine="branch"), V, ["each branch", 'branches=("main", "aux")']),
    "sandwich of nothing": (
        lambda: Norm2d(6, affine="sandwich"),
        V,
        ["'sandwich'", "num_classes=...", "branches=(...)"],
    ),
    "predicted for runs": (lambda: InstanceLevelMetaNorm2d(32, "batch_group(4)"), V, ["whole channels", "instance"]),
    "target": (
        lambda: convert(nn.Sequential(nn.BatchNorm2d(6)), "swichable"),
        V,
        ["no target 'swichable'", "did you mean 'switchable'", "batch_group"],
    ),
    # ghost batches
    "ghost instance": (
        lambda: Norm2d(6, "instance", ghost=2),
        V,
        ["ghost=2", "over the batch", "'batch'", "'instance'"],
    ),
    "ghost layer": (lambda: Norm2d(6, "layer/ghost=2"), V, ["ghost=2", "over the batch", "'layer'"]),
    "ghost mixture": (
        lambda: SwitchNorm2d(6, ("instance", "layer"), ghost=2),
        V,
        ["ghost=2", "instance+layer has none"],
    ),
    "ghost for an own rule": (lambda: Norm2d(6, NoCombine(), ghost=2), V, ["NoCombine", "'batch/ghost=4'"]),
    "an own rule of other things": (
        lambda: Norm2d(6, Pair())(x()),
        T,
        ["Pair.combine returns Coefficients", "got tuple"],
    ),
    "an own rule without combine": (lambda: Norm2d(6, NoCombine())(x()), T, ["NoCombine", "combine(statistics"]),
    # branches
    "branches as text": (lambda: AuxiliaryBatchNorm2d(6, "main"), T, ['("main", "aux")', "got 'main'"]),
    "branches as a number": (lambda: AuxiliaryBatchNorm2d(6, 2), T, ['("main", "aux")', "got 2"]),  # type: ignore[arg-type]
    "branches as numbers": (lambda: AuxiliaryBatchNorm2d(6, (0, 1)), T, ['("main", "aux")', "(0, 1)"]),  # type: ignore[arg-type]
    "branches twice": (lambda: AuxiliaryBatchNorm2d(6, ("a", "a")), V, ["different names", "('a', 'a')"]),
    "no branches": (lambda: AuxiliaryBatchNorm2d(6, ()), V, ["at least one", "()"]),
    "branches with dots": (lambda: AuxiliaryBatchNorm2d(6, ("a.b", "c")), V, ["plain words", "a.b"]),
    "branch": (lambda: aux()("auxx"), V, ["no branch 'auxx'", "did you mean 'aux'", "main, aux"]),
    "branch names": (lambda: aux()(["main", "aus", "main", "aux"]), V, ["no branch 'aus'", "did you mean 'aux'"]),
    "branch as a fraction": (lambda: aux()(1.0), T, ["a branch is a name", "got 1.0", "main and aux"]),
    "branch out of range": (lambda: aux()(2), V, ["no branch 2", "0 to 1", "main and aux"]),
    "branch of truth": (lambda: aux()(True), T, ["a branch is a name", "got True"]),
    "branch names of other length": (lambda: aux()(["main", "aux"]), V, ["shape [2]", "expected [4]", "each sample"]),
    "branch indices of other length": (lambda: aux()(torch.zeros(3).long()), V, ["shape [3]", "expected [4]"]),
    "branch index out of range": (lambda: aux()(torch.tensor([0, 1, 2, 0])), V, ["0 to 2", "2 branches: main and aux"]),
    "branch index of float": (lambda: aux()(torch.zeros(4)), T, ["integers", "torch.float32", "branch.long()"]),
    "branch missing": (
        lambda: aux()(None),
        V,
        ["AuxiliaryBatchNorm2d needs a branch", "layer(x, branch)", "normlab.route(model, branch=...)"],
    ),
    "branch for a layer without": (
        lambda: BatchNorm2d(6)(x(), "main"),
        T,
        ["takes no label, branch or style", "x alone"],
    ),
    "branch for a layer with labels": (
        lambda: ConditionalBatchNorm2d(6, 3)(x(), 0, branch="main"),
        T,
        ["ConditionalBatchNorm2d takes no branch", "it takes label"],
    ),
    "mixed branches for a layer without": (
        lambda: BatchNorm2d(6)(x(), branch=torch.tensor([0, 1, 0, 1])),
        T,
        ["BatchNorm2d takes no branch"],
    ),
    # labels
    "label missing": (
        lambda: ccbn(None),
        V,
        ["ConditionalBatchNorm2d needs a label", "layer(x, label)", "normlab.route(model, label=...)"],
    ),
    "label out of range": (lambda: ccbn(3), V, ["label 3 is out of range", "classes 0 to 2"]),
    "negative label": (lambda: ccbn(-1), V, ["label -1", "classes 0 to 2"]),
    "labels out of range": (lambda: ccbn(torch.tensor([0, 1, 5, 2])), V, ["0 to 5", "classes 0 to 2"]),
    "labels of float": (lambda: ccbn(torch.zeros(4)), T, ["integers", "torch.float32", "label.long()"]),
    "label of float": (lambda: ccbn(1.0), T, ["an integer or a tensor of integers", "got float"]),
    "label of bool": (lambda: ccbn(True), T, ["an integer or a tensor of integers", "got bool"]),
    "label as a list": (lambda: ccbn([0, 1, 2, 0]), T, ["a tensor of integers", "got list", "torch.tensor(label)"]),
    "labels of other length": (lambda: ccbn(torch.tensor([0, 1])), V, ["shape [2]", "expected [4]", "each sample"]),
    "one-hot labels": (lambda: ccbn(torch.zeros(4, 3).long()), V, ["shape [4, 3]", "expected [4]", "label.argmax(1)"]),
    # styles
    "style missing": (lambda: adain(None), V, ["needs a style", "layer(x, style)", "route(model, style=...)"]),
    "style channels": (lambda: adain(x(4, 5, 3, 3)), V, ["shape [4, 5, 3, 3]", "expected features [N, 6, *S]"]),
    "style vectors": (lambda: adain(x(4, 6)), V, ["shape [4, 6]", "expected features [N, 6, *S]"]),
    "style samples": (lambda: adain(x(3, 6, 3, 3)), V, ["style has 3 samples", "content 4", "one for all"]),
    "style of integers": (lambda: adain(x().long()), T, ["floating-point", "torch.int64", "style.float()"]),
    "style of another kind": (lambda: adain("gogh"), T, ["features [N, C, *S] or StyleMoments", "got str"]),
    "style moments": (lambda: adain(StyleMoments(x(4, 5), x(4, 5))), V, ["[N, 6] each", "got [4, 5]"]),
    "style moments of other samples": (lambda: adain(StyleMoments(x(3, 6), x(3, 6))), V, ["3 samples", "content 4"]),
    "kalman prior": (lambda: KalmanNorm2d(6)(x(), (x(5), x(5))), V, ["[6] each", "(5,)"]),
    "kalman prior of one": (lambda: KalmanNorm2d(6)(x(), x(6)), T, ["a mean and a variance", "Tensor"]),  # type: ignore[arg-type]
    "kalman prior of numbers": (lambda: KalmanNorm2d(6)(x(), (0, 1)), V, ["[6] each", "int"]),  # type: ignore[arg-type]
    "style moments of two sizes": (
        lambda: AdaptiveInstanceNorm2d(6)(x(), StyleMoments(x(4, 6), x(3, 6))),
        V,
        ["[N, 6] each", "[4, 6] and [3, 6]"],
    ),
    "an integer dtype": (lambda: BatchNorm2d(6, dtype=torch.int32), T, ["dtype is torch.int32", "torch.float32"]),
    "a kind of pool": (lambda: Pool("chanel", True), V, ["no kind 'chanel'", "channel, group, run"]),
    "a pool without groups": (lambda: Pool("run", True), T, ["num_groups is None", "an integer of at least 1"]),
    "a pool of channels with groups": (lambda: Pool("channel", True, 3), V, ["takes no groups", "got 3"]),
    "a rule that returns something else": (
        lambda: normlab.normalize(x(), lambda moments: moments),  # type: ignore[arg-type, return-value]
        T,
        ["returns Coefficients", "got Moments"],
    ),
    # something else than a model
    "a class to convert": (
        lambda: convert(BatchNorm2d, "batch"),  # type: ignore[arg-type]
        T,
        ["convert()", "BatchNorm2d itself", "call it"],
    ),
    "a tensor to fold": (lambda: normlab.fold(x()), T, ["fold()", "torch.nn.Module", "got Tensor"]),  # type: ignore[arg-type]
    "a list to freeze": (lambda: normlab.frozen([]), T, ["frozen()", "torch.nn.Module", "got list"]),  # type: ignore[arg-type]
    "nothing to route": (lambda: normlab.route(None, label=1), T, ["route()", "got NoneType"]),  # type: ignore[arg-type]
    "a torch layer to merge": (
        lambda: normlab.merge_sandwich(nn.BatchNorm2d(6)),  # type: ignore[arg-type]
        T,
        ["normlab", "BatchNorm2d"],
    ),
    # whole models
    "a dtype for new layers": (
        lambda: convert(nn.Sequential(nn.BatchNorm2d(6)), "batch", dtype=torch.float64),
        T,
        ["'batch' takes no option 'dtype'", "known: act"],
    ),
    "an option of nothing": (
        lambda: convert(nn.Sequential(nn.BatchNorm2d(6)), "none", eps=1),
        T,
        ["'none' takes no option 'eps'", "takes none"],
    ),
    "no batches": (
        lambda: normlab.calibrate(nn.Sequential(BatchNorm2d(6)), [x()], batches=-1),
        V,
        ["batches is -1", "at least 1"],
    ),
    # batch group norm
    "groups that moved, training": (
        lambda: at_another_resolution(True),
        V,
        ["at resolution [5, 5]", "given [8, 8]", "4 groups", "6 channels", "divides the channels", "calibrate()"],
    ),
    "groups that moved, evaluating": (
        lambda: at_another_resolution(False),
        V,
        ["at resolution [5, 5]", "given [8, 8]"],
    ),
    "groups that moved, loaded": (loaded_at_another_resolution, V, ["at resolution [5, 5]", "given [8, 8]"]),
    "more groups than values": (
        lambda: BatchGroupNorm2d(6, 151)(x()),
        V,
        ["151 groups", "150 values of a sample", "6 channels of 25", "at most"],
    ),
    # one value for a statistic
    "batch of one vector": (
        lambda: BatchNorm1d(6)(x(1, 6)),
        V,
        ["more than 1 value per statistic", "[1, 6]", "batch statistics", "larger batch", "group"],
    ),
    "a layer alone to torch.fx": (
        lambda: torch.fx.symbolic_trace(BatchNorm2d(6)),
        T,
        ["BatchNorm2d", "one node to torch.fx", "nn.Sequential(layer)"],
    ),
    "torch.jit.trace": (
        traced_by_jit,
        RuntimeError,
        ["torch.jit.trace", "GroupNorm2d", "torch.export.export", "normlab.fold(model)"],
    ),
    "integers to normalize": (
        lambda: normlab.normalize(torch.ones(2, 6, 3, 3, dtype=torch.long), centre),
        T,
        ["floating-point tensor [N, C, *S]", "torch.int64", "[2, 6, 3, 3]"],
    ),
    "a vector to normalize": (lambda: normlab.normalize(x(6), centre), T, ["floating-point tensor [N, C, *S]", "[6]"]),
    "a number as coefficient": (
        lambda: normlab.normalize(x(), lambda m: normlab.Coefficients(0.0, m.var)),  # type: ignore[arg-type]
        T,
        ["coefficients are tensors", "[N, R]", "center is float"],
    ),
    "coefficients of another shape": (
        lambda: normlab.normalize(x(), lambda m: normlab.Coefficients(m.mean.T, m.var)),
        V,
        ["the center has shape [6, 4]", "broadcast against [4, 6]"],
    ),
    "coefficients elsewhere": (
        lambda: normlab.normalize(x(), lambda m: normlab.Coefficients(m.mean, m.var.to("meta"))),
        V,
        ["the input is on cpu", "the scale on meta"],
    ),
    "a weight of other channels": (
        lambda: normlab.normalize(x(), centre, weight=torch.ones(5)),
        V,
        ["the weight has shape [5]", "broadcast against [4, 6]"],
    ),
    "batch of one pixel": (lambda: BatchNorm2d(6)(x(1, 6, 1, 1)), V, ["more than 1 value", "[1, 6, 1, 1]"]),
    "mixture of one pixel": (lambda: SwitchNorm2d(6)(x(1, 6, 1, 1)), V, ["more than 1 value", "mixture without batch"]),
    "modes of one vector": (lambda: ModeNorm1d(6)(x(1, 6)), V, ["more than 1 value"]),
    "a branch of one vector": (
        lambda: AuxiliaryBatchNorm1d(6)(x(3, 6), torch.tensor([0, 0, 1])),
        V,
        ["more than 1 value", "[3, 6]"],
    ),
    "a ghost batch of one vector": (
        lambda: BatchNorm1d(6, ghost=2)(x(3, 6)),
        V,
        ["more than 1 value", "batch/ghost=2"],
    ),
    "a run of one value": (
        lambda: BatchGroupNorm2d(6, 150)(x(1, 6, 5, 5)),
        V,
        ["more than 1 value", "batch_group(150)"],
    ),
    "instances of one pixel": (
        lambda: InstanceNorm2d(6)(x(4, 6, 1, 1)),
        V,
        ["[4, 6, 1, 1]", "one value a statistic", "use layer, group or batch"],
    ),
    "instances of vectors": (lambda: InstanceNorm1d(6).eval()(x(4, 6)), V, ["[4, 6]", "one value a statistic"]),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_error_says_what_came_and_what_to_do(name):
    call, kind, parts = ROWS[name]
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    text = str(caught.value)
    missing = [part for part in parts if part not in text]
    assert not missing, f"{text!r} does not say {missing}"


def test_every_error_is_one_sentence():
    """No line breaks, no dump of values: something to read in a traceback."""
    for name, (call, kind, _) in ROWS.items():
        with pytest.raises(kind) as caught:
            call()
        text = str(caught.value)
        assert "\n" not in text, name
        assert len(text) < 400, name


def test_kernels_asked_for_on_the_cpu():
    """In a process of its own: kernels are interpreted or compiled from when they are defined."""
    pytest.importorskip("triton", reason="the kernels need Triton")
    code = """
import torch, normlab
with normlab.backend("triton"):
    for layer in (
        normlab.BatchNorm2d(6), normlab.BatchNorm2d(6).eval(), normlab.ModeNorm2d(6), normlab.PositionalNorm2d(6)
    ):
        try:
            layer(torch.randn(2, 6, 4, 4))
        except RuntimeError as error:
            print(error)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all("on the CPU" in line and "set TRITON_INTERPRET=1" in line for line in lines)


@pytest.mark.parametrize(
    ("ours", "theirs", "shape"),
    [
        (BatchNorm1d(6), nn.BatchNorm1d(6), (1, 6)),
        (BatchNorm2d(6), nn.BatchNorm2d(6), (1, 6, 1, 1)),
        (InstanceNorm2d(6), nn.InstanceNorm2d(6), (4, 6, 1, 1)),
        (InstanceNorm2d(6).eval(), nn.InstanceNorm2d(6).eval(), (4, 6, 1, 1)),
    ],
)
def test_torch_refuses_the_same_single_values(ours, theirs, shape):
    for layer in (ours, theirs):
        with pytest.raises(ValueError, match=r"(?i)more than 1|one value"):
            layer(x(*shape))


@pytest.mark.parametrize(
    "layer",
    [
        BatchNorm2d(6).eval(),
        BatchNorm2d(6, ghost=2).eval(),
        GroupNorm2d(2, 6),
        LayerNorm2d(6),
        SwitchNorm2d(6, ("instance", "layer")),
        SwitchNorm2d(6, ("layer", "group(2)")),
        normlab.PositionalNorm2d(6),
        GhostBatchGroupNorm2d(6, 2, ghost=1),
        BatchGroupNorm2d(6, 2),
    ],
    ids=lambda layer: f"{type(layer).__name__} {layer.statistics.label}",
)
def test_single_values_pass_where_the_statistics_are_defined(layer):
    assert layer(x(1, 6, 1, 1)).isfinite().all()


def test_a_refused_call_leaves_no_trace():
    """Checks come before anything is updated."""
    model = nn.Sequential(BatchNorm2d(6), AuxiliaryBatchNorm2d(6))
    before = {k: v.clone() for k, v in model[1].state_dict().items()}
    for bad in ("auxx", ["main"], torch.tensor([0, 1, 2, 0])):
        with pytest.raises(ValueError, match="branch"):
            model[1](x(), bad)
    with pytest.raises(ValueError, match="channels"):
        model[1](x(4, 5, 5, 5), "main")
    assert all(torch.equal(v, before[k]) for k, v in model[1].state_dict().items())


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    layer = BatchNorm2d(numpy.int64(6), eps=numpy.float32(1e-5), momentum=numpy.float64(0.1))
    assert layer(x()).shape == (4, 6, 5, 5)


def test_a_rule_may_return_coefficients_alone():
    x = torch.randn(2, 4, 3, 3)
    y, seen = normlab.normalize(x, centre)
    assert seen is None
    torch.testing.assert_close(y, x - x.mean((2, 3), keepdim=True))


@pytest.mark.parametrize("samples", [4, 6], ids=["other", "as-many-as-channels"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "last"])
def test_coefficients_of_a_rule_broadcast(samples: int, last: bool):
    """A number for all, and one for each channel, without the axis of samples; forward and backward."""
    x = torch.randn(samples, 6, 5, 3, dtype=torch.float64)
    x = (x.to(memory_format=torch.channels_last) if last else x).requires_grad_()
    weight = torch.rand(6, dtype=torch.float64, requires_grad=True)

    def one_for_all(m: normlab.Moments) -> normlab.Coefficients:
        return normlab.Coefficients(m.mean.mean(), 1 + m.var.mean(0), m.mean.mean(0))

    y, _ = normlab.normalize(x, one_for_all, weight=weight)
    scale, shift = 1 + x.var((2, 3), correction=0).mean(0), x.mean((0, 2, 3))
    want = ((x - x.mean()) * scale.view(6, 1, 1) + shift.view(6, 1, 1)) * weight.view(6, 1, 1)
    torch.testing.assert_close(y, want)
    found, wanted = (torch.autograd.grad(t.pow(3).sum(), (x, weight)) for t in (y, want))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("back_end", ["torch", "triton"])
def test_half_an_affine_map_is_a_sentence(name: str, back_end: str):
    for layer in (normlab.BatchNorm2d(6), normlab.PositionalNorm2d(6), normlab.SandwichBatchNorm2d(6, 3)):
        setattr(layer, name, None)
        given = (torch.zeros(2, dtype=torch.long),) if layer.num_classes else ()
        with (
            normlab.backend(back_end),
            torch.no_grad(),
            pytest.raises(ValueError, match=f"the {name} of .* is None, and its affine map needs both"),
        ):
            layer(torch.randn(2, 6, 3, 3), *given)


# --- sweeps -------------------------------------------------------------------------------------------------------


class Odd:
    """An object of no use."""


FAMILIES = sorted(
    (
        kind
        for n in normlab.__all__
        if isinstance(kind := getattr(normlab, n), type) and issubclass(kind, Norm) and kind.dims is None
    ),
    key=lambda kind: kind.__name__,
)
NEEDED = {"num_features": 6, "num_channels": 6, "num_groups": 3, "num_classes": 3, "key_size": 3}
# What no argument may be but a number or a flag, which test_arguments.py sweeps.
THINGS: list[Any] = [
    "x", "", b"x", 1j, [1], ["main", 3], [["main"]], {"a": 1}, {"main", "aux"}, Odd(), object, nn.ReLU(), lambda x: x,
    torch.ones(2), torch.ones(60, 60), torch.tensor(3), torch.zeros((), device="meta"), torch.float8_e5m2,
    torch.complex64, math.inf, math.nan, -1, 10**60, 1e300, "cuda:x",
]  # fmt: skip


def judged(call: Callable[[], object]) -> str | None:
    """None where the call raised an error of ours that is one sentence, otherwise what it did."""
    try:
        found = call()
    except (TypeError, ValueError) as error:
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        assert at is not None
        line = linecache.getline(at.tb_frame.f_code.co_filename, at.tb_lineno)
        text = str(error)
        if "normlab" not in at.tb_frame.f_code.co_filename or not line.strip().startswith("raise "):
            return f"raised what is not ours: {text}"
        return None if type(error) in (TypeError, ValueError) and "\n" not in text and len(text) < 400 else text
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"took it: {type(found).__name__}"


@pytest.mark.parametrize("kind", FAMILIES, ids=lambda kind: kind.__name__)
def test_no_argument_is_just_anything(kind: type[Norm]):
    parameters = inspect.signature(kind).parameters
    own: dict[str, Any] = {n: v for n, v in NEEDED.items() if n in parameters}
    if kind is Norm:
        own["affine"] = "class"
    kind(**own)
    for name in parameters:
        for thing in THINGS:
            if (name, type(thing)) == ("branches", dict):  # keys have an order
                continue
            said = judged(lambda name=name, thing=thing: kind(**own | {name: thing}))
            assert said is None, f"{kind.__name__}({name}={str(thing)[:40]}): {said}"


STATISTICS: dict[type, dict[str, Any]] = {
    Pool: {"kind": "group", "over_batch": True, "groups": 2},
    normlab.Single: {"pool": Pool("channel", True)},
    normlab.Mixture: {"members": (Pool("channel", True),)},
    normlab.RootMeanSquare: {}, normlab.Modes: {}, normlab.Renorm: {}, normlab.Kalman: {}, normlab.Positional: {},
    normlab.FilterResponse: {},
}  # fmt: skip


@pytest.mark.parametrize("kind", STATISTICS, ids=lambda kind: kind.__name__)
def test_no_argument_of_statistics_is_just_anything(kind: Any):
    own = STATISTICS[kind]
    Norm2d(6, kind(**own))
    for name in inspect.signature(kind).parameters:
        for thing in THINGS:
            said = judged(lambda name=name, thing=thing: Norm2d(6, kind(**own | {name: thing})))
            assert said is None, f"{kind.__name__}({name}={str(thing)[:40]}): {said}"


IMAGES = torch.randn(4, 6, 5, 5, generator=torch.Generator().manual_seed(0))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # compressed rows are a beta of torch
    # What is not a floating-point tensor with values, dense and of 16 bits or more.
    NO_IMAGES: dict[str, Any] = {
        "text": "x", "a number": 3.0, "a flag": True, "a list": [1.0], "a module": nn.ReLU(), "a tuple": (IMAGES,),
        "integers": IMAGES.long(), "truths": IMAGES > 0, "complex": IMAGES.to(torch.complex64),
        "fp8": IMAGES.to(torch.float8_e4m3fn), "sparse": IMAGES.to_sparse(), "mkldnn": IMAGES.to_mkldnn(),
        "compressed rows": torch.eye(6).to_sparse_csr(), "meta": IMAGES.to("meta"),
        "0d": torch.tensor(1.0), "1d": IMAGES[0, :, 0, 0], "no channels": IMAGES[:, :0],
        "nested": torch.nested.nested_tensor([IMAGES[0], IMAGES[1, :, :3]], layout=torch.jagged),
    }  # fmt: skip
INDEX = torch.tensor([0, 1, 1, 0])
NO_INDICES: dict[str, Any] = {
    "a negative": -1, "many": 10**30, "a fraction": 0.5, "sparse": INDEX.to_sparse(), "meta": INDEX.to("meta"),
    "complex": INDEX.to(torch.complex64), "truths": INDEX > 0, "a mapping": {"a": 1}, "a module": nn.ReLU(),
    "images": IMAGES,
}  # fmt: skip


def callable_layers() -> list[Norm]:
    made = []
    for kind in FAMILIES:
        takes = inspect.signature(kind).parameters
        two: Any = getattr(normlab, f"{kind.__name__}2d")
        affine = {"affine": True} if kind is normlab.InstanceNorm else {}
        needed = {n: v for n, v in NEEDED.items() if n in takes and (kind is not Norm or n == "num_features")}
        made.append(two(**needed, **affine))
    names = ("filter_response", "global_response", "rms", "batch_group(4)", "batch/ghost=2")
    made += [Norm2d(6, name) for name in names] + [Norm(6, "layer_last"), SwitchNorm2d(6, act="relu")]
    made += [Norm2d(6, affine=("class", "branch"), num_classes=3, branches=("main", "aux"))]
    return made


@pytest.mark.parametrize(
    "layer", callable_layers(), ids=lambda layer: f"{type(layer).__name__} {layer.statistics.label}"
)
def test_no_call_takes_just_anything(layer: Norm):
    good = {"label": torch.tensor([0, 1, 2, 0]), "branch": "main", "style": IMAGES}
    given = {n: v for n, v in good.items() if n in layer.wants}
    images = IMAGES.movedim(1, -1) if layer.statistics.channels_at_end else IMAGES
    if isinstance(layer, KalmanNorm2d):
        calls = {n: (images, (v, v)) for n, v in NO_IMAGES.items() if n != "1d"}
        each = {n: lambda args=args: layer(*args) for n, args in calls.items()}
    else:
        assert layer(images, residual=images, **given).shape == images.shape
        each = {f"residual: {n}": lambda v=v: layer(images, residual=v, **given) for n, v in NO_IMAGES.items()}
    bad = {"label": NO_INDICES, "branch": NO_INDICES, "style": NO_IMAGES}
    parameters = len(list(layer.parameters())) + len(list(layer.buffers()))
    for training in (True, False):
        layer.train(training)
        each |= {f"x: {n}": lambda v=v: layer(v, **given) for n, v in NO_IMAGES.items() if n != "meta" or parameters}
        for name in layer.wants:
            each |= {f"{name}: {n}": lambda v=v, n=name: layer(images, **given | {n: v}) for n, v in bad[name].items()}
        for what, call in each.items():
            assert (said := judged(call)) is None, f"{what}: {said}"


def test_layouts_of_earlier_calls_are_told_apart():
    """What serves repeated calls looks a call up before its checks. Compressed rows have no strides to look up by."""
    layer = BatchNorm1d(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = torch.eye(6).to_sparse_csr()
    layer._known_calls[None] = None
    assert (said := judged(lambda: layer(rows))) is None, said


@pytest.mark.parametrize("what", NO_IMAGES)
def test_style_moments_are_tensors_of_numbers(what: str):
    thing = NO_IMAGES[what]
    thing = thing[:, :, 0, 0] if isinstance(thing, Tensor) and thing.dim() == 4 and what in ("fp8", "meta") else thing
    said = judged(lambda: adain(StyleMoments(thing, thing)))
    assert said is None, said


def test_moments_of_positions_are_of_images():
    layer = normlab.PositionalNorm2d(6)
    for what, thing in NO_IMAGES.items():
        assert (said := judged(lambda thing=thing: layer.moments(thing))) is None, f"{what}: {said}"
