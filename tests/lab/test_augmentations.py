"""Augmentations: each operation is PIL's to the bit, each pipeline what its definition makes of the same draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from normlab.lab.augmentations import (
    AUGMENTATIONS,
    Augmentation,
    Augmented,
    RandAugment,
    operators,
    parse_augmentation,
    policies,
)
from normlab.lab.augmentations.base import Draw
from normlab.lab.augmentations.mixing import boxes, cutmix, mixup
from normlab.lab.augmentations.operators import Kind, apply
from normlab.lab.augmentations.policies import AUTOAUGMENT_CIFAR10, Reach, arguments
from normlab.lab.data import Data, Images, augment, pixels
from normlab.lab.errors import LabError
from normlab.lab.evaluate import measure
from normlab.lab.predict import accuracy
from normlab.lab.seeds import generator

MAPS = (Kind.ROTATE, Kind.SHEAR_X, Kind.SHEAR_Y, Kind.TRANSLATE_X, Kind.TRANSLATE_Y)
ENHANCEMENTS = (Kind.CONTRAST, Kind.BRIGHTNESS, Kind.COLOR, Kind.SHARPNESS)
CPU = torch.device("cpu")


def pictures(height: int = 32, width: int = 32, channels: int = 3) -> Tensor:
    """Bytes that make operations differ: gradients, noise, few values, narrow ranges, one value."""
    torch.manual_seed(0)
    ramp = torch.linspace(0, 255, height).view(-1, 1) * 0.5 + torch.linspace(0, 255, width) * 0.5
    soft = ramp + 20 * torch.randn(4, channels, height, width)
    noise = torch.randint(0, 256, (2, channels, height, width))
    narrow = torch.randint(100, 131, (1, channels, height, width))
    few = torch.randint(0, 2, (2, channels, height, width)) * 173
    flat = torch.full((1, channels, height, width), 9)
    return torch.cat([soft.clamp(0, 255), noise, narrow, few, flat]).to(torch.uint8)


def toy(x: Tensor, **more: Any) -> Data:
    images = Images(x, torch.arange(len(x)) % 3)
    c = x.shape[1]
    return replace(Data("toy", images, images, ("a", "b", "c"), (0.5, 0.4, 0.3, 0.2)[:c], (0.25,) * c), **more)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(text: str | Augmentation, x: Tensor, seed: int = 0, **more: Any) -> Augmented:
    data = toy(x, **more)
    return parse_augmentation(text)(x, data.train.y, data, source(seed))


# --- operations ----------------------------------------------------------------------------------------------------


def as_pil(x: Tensor) -> Image.Image:
    return Image.fromarray(x.permute(1, 2, 0).numpy().squeeze(2) if len(x) == 1 else x.permute(1, 2, 0).numpy())


def as_tensor(image: Image.Image) -> Tensor:
    found = torch.from_numpy(np.array(image))
    return found.unsqueeze(0) if found.dim() == 2 else found.permute(2, 0, 1)


def by_pil(image: Image.Image, kind: Kind, a: float, resample: Any = Image.Resampling.NEAREST) -> Image.Image:
    def affine(*matrix: float) -> Image.Image:
        return image.transform(image.size, Image.Transform.AFFINE, matrix, resample=resample)

    def opaque(change: Callable[[Image.Image], Image.Image]) -> Image.Image:
        return change(image.convert("RGB")).convert("RGBA") if image.mode == "RGBA" else change(image)

    match kind:
        case Kind.IDENTITY:
            return image
        case Kind.ROTATE:
            return image.rotate(a, resample=resample)
        case Kind.SHEAR_X:
            return affine(1, a, 0, 0, 1, 0)
        case Kind.SHEAR_Y:
            return affine(1, 0, 0, a, 1, 0)
        case Kind.TRANSLATE_X:
            return affine(1, 0, a, 0, 1, 0)
        case Kind.TRANSLATE_Y:
            return affine(1, 0, 0, 0, 1, a)
        case Kind.AUTOCONTRAST:
            return opaque(ImageOps.autocontrast)
        case Kind.EQUALIZE:
            return opaque(ImageOps.equalize)
        case Kind.INVERT:
            return opaque(ImageOps.invert)
        case Kind.SOLARIZE:
            return opaque(lambda i: ImageOps.solarize(i, int(a)))
        case Kind.POSTERIZE if a < 1:  # PIL refuses what it once made black
            return opaque(lambda i: i.point([0] * 256 * len(i.getbands())))
        case Kind.POSTERIZE:
            return opaque(lambda i: ImageOps.posterize(i, int(a)))
        case Kind.CONTRAST:
            return ImageEnhance.Contrast(image).enhance(a)
        case Kind.BRIGHTNESS:
            return ImageEnhance.Brightness(image).enhance(a)
        case Kind.COLOR:
            return ImageEnhance.Color(image).enhance(a)
        case Kind.SHARPNESS:
            return ImageEnhance.Sharpness(image).enhance(a)


def argument(kind: Kind, level: float, sign: int = 1, tpu: bool = False) -> float:
    """What AutoAugment's published code gives an operation at a level of 10."""
    if kind == Kind.ROTATE:
        return sign * int(level * 30 / 10)
    if kind in (Kind.SHEAR_X, Kind.SHEAR_Y):
        return sign * level * 0.3 / 10
    if kind in (Kind.TRANSLATE_X, Kind.TRANSLATE_Y):
        return sign * int(level * 10 / 10)
    if kind == Kind.SOLARIZE:
        return int(level / 10 * 256) if tpu else 256 - int(level * 256 / 10)
    if kind == Kind.POSTERIZE:
        return int(level / 10 * 4) if tpu else 4 - int(level * 4 / 10)
    return level * 1.8 / 10 + 0.1 if kind in ENHANCEMENTS else 0.0


def of(kind: Kind, levels: list[float], signs: list[int], **more: Any) -> Tensor:
    shape = torch.zeros(len(levels), dtype=torch.float64)
    level, sign = shape + torch.tensor(levels, dtype=torch.float64), shape + torch.tensor(signs)
    return arguments(shape.long() + int(kind), level, sign, Reach(10, 10), **more)


LEVELS = [float(m) for m in range(31) for _ in (0, 1)] + [2.5, 7.7]
SIGNS = [1, -1] * 31 + [1, -1]


@pytest.mark.parametrize("kind", list(Kind), ids=lambda k: k.name.lower())
@pytest.mark.parametrize("tpu", [False, True])
def test_a_level_is_a_tenth_of_the_range(kind: Kind, tpu: bool) -> None:
    want = [argument(kind, level, sign, tpu) for level, sign in zip(LEVELS, SIGNS, strict=True)]
    assert of(kind, LEVELS, SIGNS, tpu=tpu).tolist() == want


@pytest.mark.parametrize(("height", "width", "channels"), [(32, 32, 3), (28, 28, 1), (9, 14, 3), (2, 3, 1)])
@pytest.mark.parametrize("kind", list(Kind), ids=lambda k: k.name.lower())
def test_an_operation_is_pils_to_the_bit(kind: Kind, height: int, width: int, channels: int) -> None:
    x = pictures(height, width, channels)
    levels, signs = (LEVELS, SIGNS) if height == 32 else (LEVELS[1::6], SIGNS[1::6])
    amounts = of(kind, levels, signs).unique()
    if kind in MAPS:
        amounts = torch.cat([amounts, -amounts])
    # PIL's Color of one channel is the image: its grey is itself.
    for resample in (Image.Resampling.NEAREST, Image.Resampling.BILINEAR)[: 2 if kind in MAPS else 1]:
        want = torch.stack([as_tensor(by_pil(as_pil(i), kind, a, resample)) for a in amounts.tolist() for i in x])
        found = apply(
            x.repeat(len(amounts), 1, 1, 1), torch.full((len(want),), int(kind)), amounts.repeat_interleave(len(x)),
            colours=channels, bilinear=resample == Image.Resampling.BILINEAR,
        )  # fmt: skip
        assert torch.equal(found, want), (resample, (found != want).float().mean())


def test_a_grey_image_has_no_color() -> None:
    x = pictures(channels=1)
    found = apply(x, torch.full((len(x),), int(Kind.COLOR)), torch.full((len(x),), 3.0).double(), colours=1)
    assert torch.equal(found, x)


# What torchvision makes of tensors, which is PIL's up to: the unrounded grey of contrast and color (a factor of up to
# 2.6 at level 14 enlarges it), places halfway between pixels in shears and turns, the last bit of a stretched range.
TORCHVISION: dict[Kind, tuple[Callable[[Tensor, float], Tensor], float, int]] = {
    Kind.ROTATE: (lambda x, a: tv.rotate(x, a), 0.995, 255),
    Kind.SHEAR_X: (lambda x, a: skewed(x, shear=[math.degrees(math.atan(a)), 0.0]), 0.98, 255),
    Kind.SHEAR_Y: (lambda x, a: skewed(x, shear=[0.0, math.degrees(math.atan(a))]), 0.98, 255),
    Kind.TRANSLATE_X: (lambda x, a: skewed(x, translate=[-int(a), 0]), 1, 0),
    Kind.TRANSLATE_Y: (lambda x, a: skewed(x, translate=[0, -int(a)]), 1, 0),
    Kind.AUTOCONTRAST: (lambda x, a: tv.autocontrast(x), 0.9, 1),
    Kind.EQUALIZE: (lambda x, a: tv.equalize(x), 1, 0),
    Kind.INVERT: (lambda x, a: tv.invert(x), 1, 0),
    Kind.SOLARIZE: (lambda x, a: tv.solarize(x, a), 1, 0),
    Kind.POSTERIZE: (lambda x, a: tv.posterize(x, int(a)), 1, 0),
    Kind.CONTRAST: (lambda x, a: tv.adjust_contrast(x, a), 0.4, 3),
    Kind.BRIGHTNESS: (lambda x, a: tv.adjust_brightness(x, a), 1, 0),
    Kind.COLOR: (lambda x, a: tv.adjust_saturation(x, a), 0.5, 3),
    Kind.SHARPNESS: (lambda x, a: tv.adjust_sharpness(x, a), 0.99, 1),
}


def skewed(x: Tensor, shear: list[float] | None = None, translate: list[float] | None = None) -> Tensor:
    return tv.affine(
        x, angle=0.0, translate=translate or [0.0, 0.0], scale=1.0, shear=shear or [0.0, 0.0], center=[0, 0]
    )


@pytest.mark.parametrize("kind", list(TORCHVISION), ids=lambda k: k.name.lower())
def test_torchvision_differs_from_pil_by_little(kind: Kind) -> None:
    x = pictures()[:6]
    make, share, most = TORCHVISION[kind]
    for level in (0, 1, 4, 7, 9, 14):
        a = of(kind, [level], [-1])
        if kind in (Kind.POSTERIZE, Kind.SOLARIZE) and not 1 <= a <= 255:
            continue  # refused by torchvision
        found = apply(x, torch.full((len(x),), int(kind)), a.expand(len(x)), colours=3)
        apart = (found.int() - make(x, a.item()).int()).abs()
        assert apart.max() <= most
        assert (apart == 0).float().mean() >= share


def test_torchvisions_magnitudes_are_thirds_of_the_papers() -> None:
    space = v2.RandAugment._AUGMENTATION_SPACE

    def theirs(name: str, level: int) -> float:
        made = space[name][0](31, 32, 32)
        assert made is not None
        return float(made[3 * level])

    for level in range(11):
        ours = {kind: of(kind, [level], [1]).item() for kind in Kind}
        assert theirs("ShearX", level) == pytest.approx(ours[Kind.SHEAR_X])
        assert theirs("Rotate", level) == pytest.approx(ours[Kind.ROTATE])
        assert theirs("TranslateX", level) == pytest.approx(150 / 331 * 32 / 10 * level)
        assert ours[Kind.TRANSLATE_X] == level  # ten pixels of 32, not 14.5
        assert 255 * theirs("Solarize", level) == pytest.approx(ours[Kind.SOLARIZE], abs=2)
        assert theirs("Posterize", level) >= ours[Kind.POSTERIZE] + 3  # down to 4 bits, not to none
        assert theirs("Brightness", level) == pytest.approx(0.09 * level)  # about 1, in both directions
        assert ours[Kind.BRIGHTNESS] == pytest.approx(0.1 + 0.18 * level)
    assert len(policies._PAPER) == len(space) == 14


def test_autoaugments_policy_is_the_papers() -> None:
    names = {k: k.name.title().replace("_", "").replace("contrast", "Contrast") for k in Kind}
    names |= {Kind.CONTRAST: "Contrast", Kind.AUTOCONTRAST: "AutoContrast"}
    theirs = v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)._policies
    for ours, want in zip(AUTOAUGMENT_CIFAR10, theirs, strict=True):
        for (kind, probability, level), (name, p, magnitude) in zip(ours, want, strict=True):
            assert (names[kind], probability) == (name, p)
            assert magnitude is None or level == magnitude


def test_a_gpus_way_and_a_cpus_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x = pictures().repeat(40, 1, 1, 1)
    before = [run(text, x).x for text in ("randaugment(n=4, m=9)", "augmix(all_ops=true)")]
    monkeypatch.setattr(operators, "_may_ask", lambda device: False)
    monkeypatch.setattr(operators, "_AT_ONCE", {"cpu": 100_000})
    for text, want in zip(("randaugment(n=4, m=9)", "augmix(all_ops=true)"), before, strict=True):
        assert torch.equal(run(text, x).x, want)


# --- pipelines -----------------------------------------------------------------------------------------------------


def seen_through(image: Image.Image, mean: tuple[float, ...]) -> Tensor:
    found = as_tensor(image)
    return torch.where(found[3:] > 0, found[:3].float() / 255, torch.tensor(mean).view(3, 1, 1))


@pytest.mark.parametrize(("m", "tpu"), [(4, False), (9, False), (14, True)])
def test_randaugment_is_the_published_pipeline(m: int, tpu: bool) -> None:
    x = pictures().repeat(30, 1, 1, 1)
    for fill, mode in (("mean", "RGBA"), ("black", "RGB")):
        found = run(RandAugment(n=3, m=m, cutout=0, tpu=tpu, fill=fill), x).x
        draw = Draw(source(), CPU)
        kinds = draw.below(14, len(x), 3)
        signs = 1 - 2 * draw.coin(len(x), 3).int()
        for i, (image, kind, sign) in enumerate(zip(x, kinds.tolist(), signs.tolist(), strict=True)):
            made = as_pil(image).convert(mode)
            for k, s in zip(kind, sign, strict=True):
                op = policies._PAPER[k]
                made = by_pil(made, op, argument(op, m, s, tpu))
            want = seen_through(made, (0.5, 0.4, 0.3)) if fill == "mean" else as_tensor(made).float() / 255
            assert torch.equal(found[i], want), (i, kind, sign)


def test_autoaugment_is_the_published_pipeline() -> None:
    x = pictures().repeat(40, 1, 1, 1)
    found = run("autoaugment(cutout=0)", x).x
    draw = Draw(source(), CPU)
    chosen, coins = draw.below(25, len(x)), draw.uniform(len(x), 2)
    signs = 1 - 2 * draw.coin(len(x), 2).int()
    for i, image in enumerate(x):
        made = as_pil(image).convert("RGBA")
        for j, (kind, probability, level) in enumerate(AUTOAUGMENT_CIFAR10[int(chosen[i])]):
            if coins[i, j] < probability:
                made = by_pil(made, kind, argument(kind, level, int(signs[i, j])))
        assert torch.equal(found[i], seen_through(made, (0.5, 0.4, 0.3))), (i, chosen[i])


@pytest.mark.parametrize(("text", "ops"), [("augmix", 9), ("augmix(severity=10, all_ops=true, width=2)", 13)])
def test_augmix_is_the_published_mixture(text: str, ops: int) -> None:
    x = pictures().repeat(12, 1, 1, 1)
    augmentation: Any = parse_augmentation(text)
    found = run(augmentation, x).x
    draw, n, width = Draw(source(), CPU), len(x), augmentation.width
    chains, mixtures = draw.shares(width, 1, n), draw.shares(2, 1, n)[:, 0]
    kinds, depths = draw.below(ops, n, width, 3), 1 + draw.below(3, n, width, 1)
    levels = 0.1 + (augmentation.severity - 0.1) * draw.uniform(n, width, 3)
    signs = 1 - 2 * draw.coin(n, width, 3).int()
    assert depths.unique().tolist() == [1, 2, 3] and levels.min() < 1 < augmentation.severity - 0.5 < levels.max()
    for i, image in enumerate(x):
        mix = torch.zeros(3, 32, 32, dtype=torch.float64)
        for j in range(width):
            made = as_pil(image)
            for d in range(int(depths[i, j])):
                op = policies._AUGMIX_ALL[int(kinds[i, j, d])]
                level, sign = levels[i, j, d].item(), int(signs[i, j, d])
                # Translations are of a third of the image; the others are AutoAugment's.
                third = op in (Kind.TRANSLATE_X, Kind.TRANSLATE_Y)
                a = sign * int(level * (32 / 3) / 10) if third else argument(op, level, sign)
                made = by_pil(made, op, a, Image.Resampling.BILINEAR)
            mix += chains[i, j].item() * as_tensor(made).double() / 255
        m = mixtures[i].item()
        want = (1 - m) * image.double() / 255 + m * mix
        torch.testing.assert_close(found[i].double(), want, rtol=0, atol=1e-6)


def test_operations_are_drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Tensor] = []
    real = policies.apply

    def watched(x: Tensor, kind: Tensor, argument: Tensor, **more: Any) -> Tensor:
        drawn.append(torch.stack([kind.double(), argument], 1))
        return real(x, kind, argument, **more)

    monkeypatch.setattr(policies, "apply", watched)
    n = 7000
    run("randaugment(n=2, m=4, cutout=0)", torch.zeros(n, 3, 4, 4, dtype=torch.uint8))
    kinds, amounts = torch.cat(drawn).unbind(1)
    counts = kinds.long().bincount(minlength=15).double()
    assert counts[Kind.INVERT] == 0
    expected = torch.full((14,), 2 * n / 14, dtype=torch.float64)
    observed = counts[[int(k) for k in policies._PAPER]]
    assert ((observed - expected).square() / expected).sum() < 34.5  # chi-square, 13 degrees, one in a thousand
    turns = amounts[kinds == Kind.ROTATE]
    assert set(turns.tolist()) == {12.0, -12.0} and abs((turns > 0).double().mean() - 0.5) < 0.07


def test_standard_is_the_data_sets_own_augmentation() -> None:
    x = pictures().repeat(8, 1, 1, 1)
    data = toy(x, flip=True, crop=4)
    for text, own in (("standard", data), ("flip", replace(data, crop=0)), ("crop", replace(data, flip=False))):
        found = run(text, x, 3, flip=True, crop=4)
        assert torch.equal(found.x, pixels(augment(x, own, source(3)))) and torch.equal(found.y, data.train.y)
        assert found.y2 is None and found.weight is None
    same = run("crop(pad=2)", x, 3, flip=True, crop=4).x
    assert torch.equal(same, pixels(augment(x, replace(data, flip=False, crop=2), source(3))))
    assert torch.equal(run("identity", x, flip=True, crop=4).x, x.float() / 255)
    assert torch.equal(run("standard", x).x, x.float() / 255)  # neither flip nor crop is allowed


def test_beyond_the_border_is_black_or_the_mean_colour() -> None:
    white = torch.full((200, 3, 8, 8), 255, dtype=torch.uint8)
    for text, want in (
        ("standard", (0, 0, 0)),
        ("standard(fill=mean)", (0.5, 0.4, 0.3)),
        ("cutout(0)", (0.5, 0.4, 0.3)),
    ):
        found = run(text, white, crop=4).x
        beyond = (found != 1).all(1)  # [N, H, W]
        assert 0.2 < beyond.float().mean() < 0.6
        there = found.transpose(0, 1)[:, beyond]
        assert torch.equal(there, torch.tensor(want).float().view(3, 1).expand_as(there))


@pytest.mark.parametrize("size", [1, 4, 5, 16, 99])
def test_cutout_is_a_square_around_a_pixel(size: int) -> None:
    white = torch.full((600, 3, 8, 12), 255, dtype=torch.uint8)
    found = run(f"cutout({size})", white).x
    draw = Draw(source(), CPU)
    rows, columns = draw.below(8, 600).tolist(), draw.below(12, 600).tolist()
    for image, row, column in zip(found, rows, columns, strict=True):
        want = torch.ones(3, 8, 12)
        top, left = row - size // 2, column - size // 2
        hole = want[:, max(0, top) : max(0, top + size), max(0, left) : max(0, left + size)]
        hole[:] = torch.tensor((0.5, 0.4, 0.3)).view(3, 1, 1)
        assert torch.equal(image, want)
    if size == 1:  # every pixel alike
        hit = (found != 1).all(1).sum(0)
        assert hit.sum() == 600 and (hit - 600 / 96).abs().max() < 5 * math.sqrt(600 / 96)


def test_a_pad_size_of_code_for_tpus_is_half_a_side() -> None:
    white = torch.full((100, 1, 32, 32), 255, dtype=torch.uint8)
    found = run("cutout(fill=black)", white).x  # 16 of 32 by itself
    draw = Draw(source(), CPU)
    rows, columns = draw.below(32, 100).tolist(), draw.below(32, 100).tolist()
    for image, row, column in zip(found[:, 0], rows, columns, strict=True):
        pad = 8
        lower, upper, left, right = (
            max(0, row - pad),
            max(0, 32 - row - pad),
            max(0, column - pad),
            max(0, 32 - column - pad),
        )
        want = torch.nn.functional.pad(
            torch.zeros(32 - lower - upper, 32 - left - right), (left, right, lower, upper), value=1
        )
        assert torch.equal(image, want)
    assert run("randaugment", white[:, :, :20, :14]).x.shape == (100, 1, 20, 14)
    assert torch.equal(run("cutout", white[:, :, :20, :14]).x, run("cutout(7)", white[:, :, :20, :14]).x)


def test_gaussian_noise_has_its_deviation_and_is_clipped() -> None:
    grey = torch.full((400, 3, 8, 8), 128, dtype=torch.uint8)
    noise = run("gaussian(std=0.1)", grey).x - 128 / 255
    assert noise.std().item() == pytest.approx(0.1, rel=0.01) and abs(noise.mean().item()) < 1e-3
    assert abs(noise[:, 0].flatten().dot(noise[:, 1].flatten()).item()) / noise[:, 0].numel() < 3e-4
    x = pictures()
    torch.manual_seed(0)
    want = (pixels(x) + 0.2 * torch.randn(x.shape, generator=source())).clamp(0, 1)
    assert torch.equal(run("gaussian", x).x, want)
    cropped = run("gaussian(0)", x, crop=4, flip=True).x
    assert torch.equal(cropped, run("standard", x, crop=4, flip=True).x)
    assert torch.equal(run("gaussian(0, standard=false)", x, crop=4, flip=True).x, pixels(x))


# --- images of two -------------------------------------------------------------------------------------------------


def test_mixup_is_torchvisions() -> None:
    x, labels = pixels(pictures()), torch.arange(10)
    theirs = v2.MixUp(num_classes=10)
    for weight in (0.0, 0.3, 1.0):
        params = {"labels": labels, "batch_size": 10, "lam": weight}
        want, target = theirs.transform(x, params), theirs.transform(labels, params)
        found = mixup(x, x.roll(1, 0), torch.full((10,), weight))
        torch.testing.assert_close(found, want)
        onehot = torch.eye(10)
        torch.testing.assert_close(weight * onehot[labels] + (1 - weight) * onehot[labels.roll(1)], target)


def test_cutmix_is_torchvisions() -> None:
    x, labels = pixels(pictures(24, 32)), torch.arange(10)
    theirs = v2.CutMix(num_classes=10)
    draw = Draw(source(), CPU)
    for weight, row, column in zip(draw.uniform(40).tolist(), draw.below(24, 40), draw.below(32, 40), strict=True):
        half = 0.5 * math.sqrt(1 - weight)
        y1, y2 = (int((row + s * int(half * 24)).clamp(0, 24)) for s in (-1, 1))
        x1, x2 = (int((column + s * int(half * 32)).clamp(0, 32)) for s in (-1, 1))
        left = 1 - (x2 - x1) * (y2 - y1) / (24 * 32)
        params = {"labels": labels, "batch_size": 10, "box": (x1, y1, x2, y2), "lam_adjusted": left}
        many = (torch.tensor(weight).expand(10), row.expand(10), column.expand(10))
        found, share = cutmix(x, x.roll(1, 0), boxes(*many, 24, 32))
        assert torch.equal(found, theirs.transform(x, params))
        torch.testing.assert_close(share, torch.full((10,), left))


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_labels_follow_their_images(name: str) -> None:
    # Image i is of one colour, i, so that a mixture says what it is made of.
    n = 250
    x = torch.arange(n, dtype=torch.uint8).view(-1, 1, 1, 1).expand(n, 1, 16, 16).contiguous()
    classes = tuple(map(str, range(n)))
    data = replace(toy(x, crop=4), train=Images(x, torch.arange(n)), classes=classes)
    found = parse_augmentation(f"{name}(standard=false)")(x, torch.arange(n), data, source())
    assert not parse_augmentation(name).keeps_labels
    assert found.y2 is not None and found.weight is not None
    assert torch.equal(found.y, torch.arange(n)) and torch.equal(found.y2.sort().values, torch.arange(n))
    mean = found.x.mean((1, 2, 3)) * 255
    torch.testing.assert_close(mean, found.weight * found.y + (1 - found.weight) * found.y2, rtol=0, atol=1e-3)
    again = parse_augmentation(f"{name}(alpha=0.2, standard=false)")(x, torch.arange(n), data, source(1))
    assert again.weight is not None
    if name == "mixup":  # Beta(1, 1) is uniform, of variance 1/12; Beta(0.2, 0.2) has 1 / 5.6
        assert abs(found.weight.mean() - 0.5) < 0.06 and abs(found.weight.var() - 1 / 12) < 0.02
        assert abs(again.weight.var() - 0.25 / 1.4) < 0.03
    cropped = run(name, x, crop=4).x
    assert (cropped == 0).float().mean() > (found.x == 0).float().mean() + 0.02


# --- what they all have ----------------------------------------------------------------------------------------------

TEXTS = [*AUGMENTATIONS, "randaugment(n=2, m=14, tpu=true)", "augmix(all_ops=true)", "cutout(fill=black)"]


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 5, 17), (1, 1, 1)])
@pytest.mark.parametrize("text", TEXTS)
def test_any_size_and_the_same_from_the_same_seed(text: str, shape: tuple[int, int, int]) -> None:
    x = pictures(*shape[1:], channels=shape[0]).repeat(3, 1, 1, 1)
    kept = x.clone()
    found, again, other = (run(text, x, seed, flip=True, crop=1) for seed in (1, 1, 2))
    assert torch.equal(x, kept)
    assert found.x.shape == x.shape and found.x.dtype == torch.float32
    assert found.x.min() >= 0 and found.x.max() <= 1
    assert torch.equal(found.y, torch.arange(30) % 3)
    for a, b in zip(found, again, strict=True):
        assert a is b is None or (a is not None and b is not None and torch.equal(a, b))
    if text != "identity" and shape[1] > 1:
        assert not torch.equal(found.x, other.x)
    none = run(text, x[:0], flip=True, crop=1)
    assert none.x.shape == (0, *shape) and len(none.y) == 0


@pytest.mark.parametrize(
    "text",
    ["identity", "crop(pad=2, fill=mean)", "cutout(size=8)", "gaussian(std=0.1)", "mixup(alpha=0.2)",
     "randaugment(n=2, m=14)", "randaugment(n=3, m=4.5, cutout=0, translate=4, tpu=true, fill=black)",
     "augmix(severity=5, depth=2, all_ops=true, standard=false)"],
)  # fmt: skip
def test_a_label_is_the_text_that_makes_it(text: str) -> None:
    assert parse_augmentation(text).label == text == str(parse_augmentation(text))
    assert parse_augmentation(parse_augmentation(text).label) == parse_augmentation(text)


def test_options_have_an_order_and_defaults() -> None:
    assert parse_augmentation("randaugment(2, 9)") == RandAugment(n=2, m=9)
    assert parse_augmentation("randaugment(n=2, 9)") == RandAugment(n=2, m=9)
    assert parse_augmentation("randaugment").label == "randaugment(n=3, m=4)"
    assert parse_augmentation(" Cutout ( 16 ) ").label == "cutout(size=16)"
    assert all(parse_augmentation(name).name == name and kind.about for name, kind in AUGMENTATIONS.items())


@pytest.mark.parametrize(
    ("text", "said"),
    [("cutuot", "no augmentation 'cutuot'; did you mean 'cutout'"), ("randaugment(n=3", "closing bracket"),
     ("randaugment(k=3)", "no option 'k'"), ("randaugment(nn=3)", "did you mean 'n'"), ("identity(3)", "has no name"),
     ("flip(p=1)", "it takes none"), ("randaugment(m=31)", "randaugment: m=31: 31 is out of range"),
     ("randaugment(n=1.5)", "whole number"), ("cutout(fill=red)", "'red' is not known"),
     ("crop(pad=0)", "out of range"), ("randaugment(n=3, n=4)", "twice"), ("randaugment(m=1, 4)", "twice"),
     ("mixup(alpha=0)", "out of range"), ("gaussian(std=x)", "not a number"), ("augmix(severity=11)", "out of range")],
)  # fmt: skip
def test_a_text_that_does_not_read_gets_a_sentence(text: str, said: str) -> None:
    with pytest.raises(LabError, match=said.replace("(", r"\(")):
        parse_augmentation(text)


def test_options_are_checked_without_a_text_too() -> None:
    with pytest.raises(LabError, match="randaugment: n=-1: -1 is out of range"):
        RandAugment(n=-1)
    with pytest.raises(LabError, match="fill='white'"):
        RandAugment(fill="white")


@pytest.mark.parametrize("text", ["identity", "cutout", "randaugment", "mixup"])
def test_other_ranges_get_a_sentence(text: str) -> None:
    x = pictures()
    data, y = toy(x), torch.zeros(10, dtype=torch.int64)
    augmentation = parse_augmentation(text)
    for wrong, said in (
        (pixels(x), "got float32 .* from 0 to 1"),
        (pixels(x) * 4 - 2, "from -2 to 2"),
        (x.int() * 4, "got int32 .* from 0 to 1020"),
        (x.to(torch.int8), "got int8"),
        (x[0], r"got uint8 \[3, 32, 32\]"),
    ):
        with pytest.raises(LabError, match=f"{text} works on bytes.*{said}"):
            augmentation(wrong, y, data, source())
    with pytest.raises(LabError, match=r"a label for each of the 10 images.*int64 \[4\]"):
        augmentation(x, y[:4], data, source())
    with pytest.raises(LabError, match="got float32"):
        augmentation(x, y.float(), data, source())
    with pytest.raises(LabError, match="the images have 1 channels, those of toy have 3"):
        augmentation(x[:, :1], y, data, source())


def test_what_is_not_defined_on_the_data_gets_a_sentence() -> None:
    x = pictures(channels=4)
    with pytest.raises(LabError, match="red, green and blue; these have 4 channels"):
        run("randaugment", x)
    assert run("cutout(8)", x).x.shape == x.shape
    with pytest.raises(LabError, match="mirrored image of toy may be of another class"):
        run("flip", pictures())
    with pytest.raises(LabError, match=r"crop\(pad=4\)"):
        run("crop", pictures())


def test_affinity_takes_an_augmentation() -> None:
    x = pictures().repeat(20, 1, 1, 1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 3))
    data = toy(x)
    data = replace(data, test=Images(x, model(pixels(x)).argmax(1)))  # right on every clean image
    change = parse_augmentation("randaugment(n=2, m=9)").on_pixels(data)
    texts = [f"affinity(augmentation={name})" for name in ("randaugment(n=2, m=9)", "identity")]
    found, same = (r["values"]["affinity"] for r in measure(model, data, texts, seed=5, batch_size=200))
    after = accuracy(model, change(pixels(x), generator(5, "affinity")), data.test.y)
    assert found == pytest.approx(after - 100) and found < -5
    assert same == 0
    with pytest.raises(LabError, match="two classes"):
        measure(model, data, ["affinity(augmentation=mixup)"])
    with pytest.raises(LabError, match=r"floats in \[0, 1\], before standardisation; got torch.float32 from -1"):
        change(pixels(x) * 2 - 1, source())


def test_pixels_become_the_bytes_they_were() -> None:
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    data = toy(x)
    for text in ("identity", "cutout", "randaugment(fill=black)"):
        augmentation = parse_augmentation(text)
        want = augmentation(x, data.train.y, data, source()).x
        assert torch.equal(augmentation.on_pixels(data)(pixels(x), source()), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("text", TEXTS)
def test_a_gpu_makes_the_same_of_the_same_draws(text: str) -> None:
    x = pictures().repeat(30, 1, 1, 1)
    want = run(text, x, flip=True, crop=4)
    data = toy(x, flip=True, crop=4).to("cuda")
    found = parse_augmentation(text)(data.train.x, data.train.y, data, source())
    assert found.x.is_cuda
    for a, b in zip(found, want, strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=1e-6)
    on_it = torch.Generator("cuda").manual_seed(0)
    assert parse_augmentation(text)(data.train.x, data.train.y, data, on_it).x.isfinite().all()
