"""The passes of the CPU in C++ and in torch operators, against float64; and which of the two a process takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import normlab
from cases import CASES, Case, assert_near, by_id, leaves, values, widen
from normlab.cpu import native, passes
from normlab.engine import build
from normlab.engine.contract import Coefficients
from normlab.engine.masks import mask_of
from normlab.engine.rows import Rows, rows_of_runs

built = pytest.mark.skipif(native.BUILT.missing() is not None, reason=f"no library: {native.BUILT.missing()}")
layouts = pytest.mark.parametrize("last", [False, True], ids=["contiguous", "last"])
NAN = float("nan")


def negative(t: Tensor) -> Tensor:
    """``-t`` as torch keeps it for a part of a conjugate: memory holds ``t``."""
    return torch.complex(torch.zeros_like(t), t).conj().imag


# --- every pass -------------------------------------------------------------------------------------------------------

# Rows of a few values, of vectors and a rest, of several pieces; one channel; more channels than a line is wide.
SHAPES = [(4, 1, 3, 1), (3, 5, 7, 7), (2, 64, 9, 11), (1, 8, 4, 8), (2, 300, 2, 3), (2, 2, 140, 130), (1, 70, 40, 30)]
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 4e-3, "atol": 1e-4},  # half a unit of rounding
}


class Given:
    """What passes take, and the same as rows of float64 in which values that do not count are zero."""

    def __init__(self, shape: tuple[int, ...], rows: Rows, dtype: torch.dtype, last: bool, masked: bool) -> None:
        n, c, *space = shape
        layout = torch.channels_last if last else torch.contiguous_format
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        keep = torch.ones(n, 1, *space, dtype=torch.bool)
        if masked:
            keep = torch.rand(n, 1, *space) < 0.6
            keep[0] = False
        self.rows, self.mask = rows, mask_of(keep) if masked else None
        x, dy = (torch.where(keep, t.to(dtype), NAN) for t in (torch.randn(shape) * 2 + 3, torch.randn(shape)))
        self.x, self.dy = (t.contiguous(memory_format=layout) for t in (x, dy))
        self.wide_x, self.wide_dy = (torch.where(keep, t, 0).double().reshape(n, -1) for t in (x, dy))
        self.keep = keep.expand(shape).reshape(n, -1)
        r = rows.number
        lengths = torch.tensor(rows.lengths if rows.cuts else [self.keep.shape[1] // r] * r)
        self.of = torch.repeat_interleave(torch.arange(r), lengths)
        self.standard = Coefficients(
            3 + torch.randn(1, r, dtype=kind), torch.rand(n, r, dtype=kind) + 0.5, torch.randn(1, 1, dtype=kind)
        )
        self.weight, self.bias = torch.rand(n, c, dtype=kind), torch.rand(c, dtype=kind)
        self.offset, self.slope = torch.randn(n, r, dtype=kind), torch.randn(1, r, dtype=kind)

    def spread(self, t: Tensor) -> Tensor:  # [1 or N, 1 or R] to [N, D]
        return t.double().expand(len(self.x), self.rows.number)[:, self.of]

    def sum(self, t: Tensor) -> Tensor:  # [N, D] to [N, R]
        return torch.zeros(len(self.x), self.rows.number, dtype=torch.float64).index_add(1, self.of, t)

    def hidden(self, t: Tensor) -> Tensor:
        return torch.where(self.keep, t, 0)


def check_passes(way: Any, given: Given) -> None:
    g, x, rows, mask = given, given.x, given.rows, given.mask
    wide, most = x.dtype == torch.float64, 2e-4 + 2e-7 * x[0, 0].numel()  # sums of that many values
    near: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-11} if wide else {"rtol": 1e-5, "atol": most}
    close = TOLERANCE[x.dtype]
    count = g.sum(g.keep.double())
    mean = g.sum(g.wide_x) / count.clamp_min(1)
    var = g.sum(g.hidden(g.wide_x - g.spread(mean)).square()) / count.clamp_min(1)
    stats = way.moments(x, rows, mask)
    share = 1e-12 if wide else 1e-5 if way is native else 2e-4  # operators lose digits in columns of 18,200 values
    exact: dict[str, Any] = {"rtol": share, "atol": share}
    assert_close(stats.double(), torch.stack((mean, torch.where(count > 0, var, 1))), **exact)

    def same(found: Tensor, wanted: Tensor) -> None:
        assert found.stride() == x.stride() and found.dtype == x.dtype
        assert_close(found.double().reshape(len(x), -1), g.hidden(wanted), **close)

    spatial = x[0, 0].numel()
    weight, bias = (rows.from_channels(t, spatial) for t in (g.weight, g.bias.unsqueeze(0)))
    center, scale, shift = g.standard
    assert shift is not None
    y = way.apply(x, rows, g.standard, g.weight, g.bias, mask, far=False)
    apart = g.wide_x - g.spread(center)
    same(y, (apart * g.spread(scale) + g.spread(shift)) * g.spread(weight) + g.spread(bias))

    found = way.gradients(g.dy, x, rows, g.standard, g.weight, g.bias, (True, True), mask)
    total, dot = g.sum(g.wide_dy), g.sum(g.wide_dy * g.hidden(apart))
    assert_close(found.shift.double(), total * weight.double(), **near)
    assert_close(found.scale.double(), dot * weight.double(), **near)
    assert_close(found.center.double(), -total * weight.double() * scale.double(), **near)
    assert_close(found.bias.double(), rows.to_channels(total, spatial).sum(0), **near)

    far = stats[0]
    steep = g.spread(g.slope) * (g.wide_x - g.spread(far))
    factor = g.spread(scale) * g.wide_dy
    rest = (x, rows)
    same(way.input_gradient(g.dy, *rest, scale, g.offset, g.slope, far, mask), factor + g.spread(g.offset) + steep)
    same(way.input_gradient(None, *rest, None, g.offset, g.slope, far, mask), g.spread(g.offset) + steep)
    same(way.input_gradient(g.dy, *rest, scale, None, None, far, mask), factor)


ways = pytest.mark.parametrize("way", [pytest.param(native, marks=built), passes], ids=["native", "torch"])


@ways
@layouts
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_passes_against_float64(shape: tuple[int, ...], dtype: torch.dtype, masked: bool, last: bool, way: Any):
    check_passes(way, Given(shape, Rows(shape[1]), dtype, last, masked))


@ways
@layouts
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("parts", [2, 8])
def test_rows_that_are_parts_of_channels(parts: int, dtype: torch.dtype, last: bool, way: Any):
    check_passes(way, Given((3, 6, 8, 10), Rows(6, parts), dtype, last, False))


@ways
@layouts
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("groups", [5, 7, 500])
def test_rows_of_different_lengths(groups: int, dtype: torch.dtype, last: bool, way: Any):
    rows = rows_of_runs(6, 41 * 33, (groups,))
    assert rows.cuts
    check_passes(way, Given((3, 6, 41, 33), rows, dtype, last, False))


@built
@layouts
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("shape", [(3, 40, 37, 29), (1, 2, 200, 210)], ids=str)
def test_any_number_of_threads_gives_the_same_bits(shape: tuple[int, ...], masked: bool, last: bool):
    g = Given(shape, Rows(shape[1]), torch.float32, last, masked)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        stats = native.moments(g.x, g.rows, g.mask)
        sums = native.gradients(g.dy, g.x, g.rows, g.standard, None, None, (False, False), g.mask)
        y = native.apply(g.x, g.rows, g.standard, None, None, g.mask, far=False)
        found.append((stats, sums.scale, sums.shift, y))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def _uneven(channels: int) -> normlab.Norm:
    return normlab.BatchGroupNorm2d(channels, 7)


@built
@layouts
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("make", [normlab.SwitchNorm2d, normlab.LayerNorm2d, normlab.PositionalNorm2d, _uneven])
def test_any_number_of_threads_gives_the_same_layer(make: Any, masked: bool, last: bool):
    if masked and make is _uneven:
        pytest.skip("groups that cut channels take no mask")
    g = Given((5, 40, 37, 29), Rows(40), torch.float32, last, masked)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        layer, x = make(40), g.x.clone().requires_grad_()
        y = layer(x) if g.mask is None else layer(x, mask=g.mask.valid)
        found.append((y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), g.dy)))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@built
@layouts
def test_far_means_are_measured_in_float64(last: bool):
    x = (torch.randn(2, 5, 130, 40) + torch.tensor([0, 1e4, -1e4, 3, 1e6]).reshape(5, 1, 1)).contiguous(
        memory_format=torch.channels_last if last else torch.contiguous_format
    )
    mean, var = native.moments(x, Rows(5))
    assert mean.dtype == torch.float64 and native.moments(x[:, :1], Rows(1)).dtype == torch.float32
    wide = x.double().flatten(2)
    assert_close(mean, wide.mean(2), rtol=1e-8, atol=1e-6)
    assert_close(var, wide.var(2, correction=0), rtol=1e-5, atol=0)


@built
@layouts
def test_what_is_not_finite_stays_in_its_row(last: bool):
    x = torch.randn(3, 8, 5, 5)
    x[1, 2, 0, 0], x[2, 4, 1, 1] = torch.inf, NAN
    mean, var = native.moments(x.contiguous(memory_format=torch.channels_last) if last else x, Rows(8))
    broken = torch.zeros(3, 8, dtype=torch.bool)
    broken[1, 2] = broken[2, 4] = True
    assert torch.equal(~var.isfinite(), broken) and torch.equal(~mean.isfinite(), broken)


# --- layers -----------------------------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_torch_operators_compute_every_normalizer(case: Case, last: bool):
    """The suite runs what this process has decided for, the library if there is one. This is the other way."""
    layer, x = case.build(dtype=torch.float32), case.input(dtype=torch.float32, size=(6, 7))
    x = (x.contiguous(memory_format=torch.channels_last) if last else x).requires_grad_()
    given, dy = case.give(x), torch.randn_like(x)
    wide_x, wide, p = x.detach().double().requires_grad_(), {k: widen(v) for k, v in given.items()}, values(layer)
    learned = {n: q for n, q in layer.named_parameters() if q.requires_grad}
    want = case.expected(p, wide_x, wide, True)
    with normlab.backend("torch"):
        y = case.call(layer, x, given)
        inputs = (x, *leaves(given), *learned.values())
        found = torch.autograd.grad(y, inputs, dy, allow_unused=True)
    wide_inputs = (wide_x, *leaves(wide), *(p[n] for n in learned))
    wanted = torch.autograd.grad(want.y, wide_inputs, dy.double(), allow_unused=True)
    buffers = {n: b.double() for n, b in layer.named_buffers() if n in want.buffers}
    assert_near({"y": y.detach(), **buffers}, {"y": want.y.detach(), **want.buffers}, 2e-5)

    def named(gradients: tuple[Tensor | None, ...], inputs: Any) -> dict[str, Tensor]:
        both = enumerate(zip(gradients, inputs, strict=True))
        return {str(i): torch.zeros_like(t) if g is None else g.detach() for i, (g, t) in both}

    assert_near(named(found, inputs), named(wanted, wide_inputs), 2e-4)


@built
def test_who_serves(monkeypatch: pytest.MonkeyPatch):
    x, rows = torch.randn(2, 4, 3, 3), Rows(4)
    assert native.serves(x, rows) and native.serves(x.bfloat16(), rows)
    assert not native.serves(x.half(), rows)
    assert not native.serves(x[:0], rows)
    assert not native.serves(x[:, :, :1, :1], rows)
    assert not native.serves(negative(x), rows)
    with normlab.backend("torch"):
        assert not native.serves(x, rows)

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Watching():  # whoever watches operators sees operators
        assert not native.serves(x, rows)


@built
def test_gradients_and_masks_in_other_layouts():
    """What is not dense is copied, never read as if it were."""
    layer, x = by_id("switch").build(dtype=torch.float32), torch.randn(4, 16, 6, 5)
    keep = torch.rand(4, 6, 1) < 0.7
    dys = (torch.ones(()).expand(x.shape), torch.randn(4, 16, 5, 6).mT, negative(torch.randn(x.shape)))
    for dy in dys:
        found = []
        for way, given in (("auto", dy), ("torch", dy.resolve_neg())):
            a = x.detach().requires_grad_()
            with normlab.backend(way), normlab.no_update(layer):
                y = layer(a, mask=keep.expand(4, 6, 5))
                found.append(torch.autograd.grad(y, (a, *layer.parameters()), given))
        for mine, theirs in zip(*found, strict=True):
            assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    wide = torch.randn(4, 16, 6, 10)[..., ::2]
    with normlab.no_update(layer):
        assert torch.equal(layer(wide), layer(wide.contiguous()))


@built
@pytest.mark.parametrize(
    ("kind", "twin"), [(normlab.LayerNorm2d, lambda c: nn.GroupNorm(1, c)), (normlab.BatchNorm2d, nn.BatchNorm2d)]
)
def test_large_channels_last_inputs(kind: Any, twin: Any):
    x = torch.randn(2, 64, 128, 64).contiguous(memory_format=torch.channels_last).requires_grad_()
    layer, exact, dy = kind(64), twin(64).double(), torch.randn_like(x)
    wide = x.detach().double().requires_grad_()
    y, want = layer(x), exact(wide.contiguous())
    assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(y, (x, *layer.parameters()), dy)
    for mine, theirs in zip(found, torch.autograd.grad(want, (wide, *exact.parameters()), dy.double()), strict=True):
        assert_close(mine.double(), theirs, rtol=1e-4, atol=2e-3 if mine.dim() == 1 else 1e-5)


# --- which way --------------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing built and nothing decided yet, and whatever is built lies in a folder of its own.

    The compiler copies what is built already: the real one takes ten seconds.
    """
    copy = f'for last; do :; done; cp {native.BUILT.path} "$last"'
    monkeypatch.setenv("CXX", compiler(tmp_path / "copies", copy))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(native, "_state", native._State())
    monkeypatch.setattr(native.BUILT, "process", None)
    yield tmp_path
    if native.BUILT.process is not None:
        native.BUILT.process.wait()


def compiler(at: Path, script: str) -> str:
    at.write_text(f"#!/bin/sh\n{script}\n")
    at.chmod(0o755)
    return str(at)


def test_without_a_compiler_torch_operators_serve(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler" in normlab.host_status("cpu")
    native.settle()
    assert not native.serves(torch.randn(2, 4, 3, 3), Rows(4))
    assert normlab.host_status("cpu").startswith("torch: no C++ compiler")
    with pytest.raises(RuntimeError, match=r"the library of passes cannot be built: no C\+\+ compiler"):
        normlab.build_host("cpu")


@built
def test_a_process_stays_with_what_it_decided(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing waits for the build. The library is for processes that start later, and for those that ask for it."""
    x, rows = torch.randn(2, 4, 3, 3), Rows(4)
    path, copies = native.BUILT.path, (elsewhere / "copies").read_text()
    wait = f"while ! test -e {elsewhere}/go; do sleep 0.02; done"
    monkeypatch.setenv("CXX", compiler(elsewhere / "slow", f"{wait}\n{copies}\necho once >> {elsewhere}/runs"))
    assert not native.serves(x, rows)
    assert "is being built" in normlab.host_status("cpu")
    others = [native.BUILT.start("background") for _ in range(2)]
    (elsewhere / "go").touch()
    assert native.BUILT.process is not None
    assert [p.wait() for p in (native.BUILT.process, *others)] == [0, 0, 0]
    assert (elsewhere / "runs").read_text() == "once\n"
    assert path.exists() and not native.serves(x, rows)
    assert normlab.build_host("cpu") == path and native.serves(x, rows)
    assert normlab.host_status("cpu") == f"compiled: {path}"


@built
def test_settling_waits_for_the_build(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", compiler(elsewhere / "broken", "echo no such header >&2; exit 1"))
    native.settle()
    assert "its build failed" in normlab.host_status("cpu")
    assert "no such header" in native.BUILT.path.with_name(build.FAILED).read_text()
    with pytest.raises(RuntimeError, match="no such header"):
        normlab.build_host("cpu")
    monkeypatch.setenv("CXX", str(elsewhere / "copies"))
    normlab.build_host("cpu")  # tries again
    native.settle()
    assert normlab.host_status("cpu").startswith("compiled: ")


@built
def test_a_build_that_was_killed_is_begun_again(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    killed = 'kill -9 $PPID; for last; do :; done; echo part > "$last"'
    monkeypatch.setenv("CXX", compiler(elsewhere / "killed", killed))
    native.settle()
    assert not native.BUILT.path.exists() and not native.BUILT.path.with_name(build.FAILED).exists()
    monkeypatch.setenv("CXX", str(elsewhere / "copies"))
    assert normlab.build_host("cpu").exists()


@built
@pytest.mark.parametrize("content", ["file", "garbage"])
def test_a_cache_that_cannot_be_used(content: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    if content == "file":  # no folder can be made: as in a cache that is read-only, also for root
        (elsewhere / "normlab_passes").write_text("")
    else:
        native.BUILT.path.parent.mkdir(parents=True)
        native.BUILT.path.write_text("no library")
    native.settle()
    assert not native.serves(torch.randn(2, 4, 3, 3), Rows(4))
    assert ("does not load" if content == "garbage" else "wrote nothing") in normlab.host_status("cpu")
    layer, x = normlab.SwitchNorm2d(4), torch.randn(3, 4, 5, 5)
    with normlab.no_update(layer), normlab.backend("torch"):
        want = layer(x)
    assert torch.equal(layer(x), want)


def test_a_device_without_a_library():
    with pytest.raises(ValueError, match="no compiled library for device 'cup'; did you mean 'cpu'"):
        normlab.host_status("cup")


@built
def test_the_environment_forces_torch_operators():
    script = "import normlab, torch; normlab.BatchNorm2d(4)(torch.randn(2, 4, 3, 3)); print(normlab.host_status('cpu'))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                           env={**os.environ, "NORMLAB_BACKEND": "torch"})  # fmt: skip
    assert found.stdout.startswith("torch: NORMLAB_BACKEND")
