"""Corruptions against formulas in float64, and against the libraries that made the published sets."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

from normlab.lab import corruptions as c
from normlab.lab.corruptions import blur, jpeg, operators, textures, weather
from normlab.lab.corruptions.constants import CIFAR, IMAGENET
from normlab.lab.corruptions.spatter import canny, distance, equalised
from normlab.lab.errors import LabError

CIFAR_SIZE, LARGE = 32, 64
RNG = np.random.default_rng


@pytest.fixture(scope="module")
def photos() -> dict[int, np.ndarray]:
    """Real pictures, uint8 [4, S, S, 3]: pieces of two photographs that come with scikit-learn."""
    found = {}
    for size in (CIFAR_SIZE, LARGE, 45):
        pieces = [p[top : top + 300, left : left + 300] for p in load_sample_images().images
                  for top, left in ((20, 40), (120, 300))]  # fmt: skip
        found[size] = np.stack(
            [np.asarray(Image.fromarray(p).resize((size, size), Image.Resampling.BOX)) for p in pieces]
        )
    return found


def tensor(images: np.ndarray) -> Tensor:
    """uint8 [N, H, W, C] to pixels [N, C, H, W]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255


def levels(x: Tensor) -> np.ndarray:
    """Pixels [N, C, H, W] to levels 0..255, float64 [N, H, W, C]."""
    return x.double().permute(0, 2, 3, 1).numpy() * 255


def each(images: np.ndarray, change: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
    """``change`` of each image in [0, 1], as float64 levels clipped to [0, 255]."""
    return np.stack([np.clip(change(p / 255.0, i), 0, 1) * 255 for i, p in enumerate(images)])


# ------------------------------------------------------------------------------------------------- formulas by hand


@pytest.mark.parametrize("severity", c.SEVERITIES)
@pytest.mark.parametrize("size", [CIFAR_SIZE, LARGE])
def test_contrast_brightness_saturate(photos, severity, size):
    table = CIFAR if size == CIFAR_SIZE else IMAGENET
    (factor,), (amount,) = table["contrast"][severity - 1], table["brightness"][severity - 1]
    scale, summand = table["saturate"][severity - 1]
    images = photos[size].copy()
    images[0, :4] = 0  # black has no hue
    images[1, :4] = 77  # nor has grey
    x = tensor(images)

    def contrast(p, _):
        mean = p.mean((0, 1))
        return (p - mean) * factor + mean

    def through_hsv(change):
        def one(p, _):
            out = np.empty_like(p)
            for at in np.ndindex(p.shape[:2]):
                h, s, v = hsv(p[at])
                out[at] = rgb(*change(h, s, v))
            return out

        return one

    expected = {
        "contrast": each(images, contrast),
        "brightness": each(images[:2], through_hsv(lambda h, s, v: (h, s, min(v + amount, 1)))),
        "saturate": each(images[:2], through_hsv(lambda h, s, v: (h, min(max(s * scale + summand, 0), 1), v))),
    }
    for name, wanted in expected.items():
        found = c.corrupt(x[: len(wanted)], name, severity, eight_bit=False)
        np.testing.assert_allclose(levels(found), wanted, atol=2e-4, err_msg=name)


def hsv(pixel):
    import colorsys

    return colorsys.rgb_to_hsv(*pixel)


def rgb(h, s, v):
    import colorsys

    return colorsys.hsv_to_rgb(h, s, v)


@pytest.mark.parametrize("border", ["nearest", "reflect", "mirror"])
def test_borders(border):
    padding: dict[str, Any] = {"nearest": "edge", "reflect": "symmetric", "mirror": "reflect"}
    expected = np.pad(np.arange(5), 4, mode=padding[border])
    assert operators.fold(torch.arange(-4, 9), 5, border).tolist() == expected.tolist()


@pytest.mark.parametrize("sigma", [0.05, 0.4, 1.0, 2.0])
def test_gaussian_blur_is_that_of_a_padded_picture(photos, sigma):
    reach = int(4 * sigma + 0.5)
    taps = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    taps /= taps.sum()

    def one(p, _):
        p = np.pad(p, ((reach, reach), (reach, reach), (0, 0)), mode="edge")
        for axis in (0, 1):
            p = np.apply_along_axis(lambda line: np.convolve(line, taps, mode="valid"), axis, p)
        return p

    found = blur.gaussian_blur(tensor(photos[32]), sigma)
    np.testing.assert_allclose(levels(found), each(photos[32], one), atol=2e-4)


@pytest.mark.parametrize(("radius", "rim"), [CIFAR["defocus_blur"][i] for i in (0, 3, 4)] + [(3, 0.1), (10, 0.5)])
def test_defocus_is_a_correlation_with_the_disk(photos, radius, rim):
    half, reach = (8, 1) if radius <= 8 else (radius, 2)
    a, b = np.mgrid[-half : half + 1, -half : half + 1]
    inside = np.pad(np.where(a**2 + b**2 <= radius**2, 1.0, 0.0), reach, mode="reflect")
    a, b = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    soft = np.exp(-(a**2 + b**2) / (2 * rim**2))
    windows = np.lib.stride_tricks.sliding_window_view(inside, soft.shape)
    kernel = (windows * soft).sum((2, 3)) / soft.sum() / inside[reach:-reach, reach:-reach].sum()
    image = photos[32][0] / 255
    expected = np.zeros_like(image)
    padded = np.pad(image, ((half, half), (half, half), (0, 0)), mode="reflect")
    for a, b in np.ndindex(kernel.shape):
        expected += kernel[a, b] * padded[a : a + 32, b : b + 32]
    found = blur.defocus_blur(tensor(photos[32][:1]), radius, rim)
    np.testing.assert_allclose(levels(found)[0], expected * 255, atol=1e-3)


@pytest.mark.parametrize("severity", c.SEVERITIES)
def test_motion_blur_by_steps(photos, severity):
    """ImageMagick's: whole steps along the line, half a Gaussian, border repeated, rounded."""
    radius, sigma = CIFAR["motion_blur"][severity - 1]
    angles = [-44.0, -12.5, 0.0, 31.0]
    weights = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * sigma**2))
    weights /= weights.sum()

    def one(p, i):
        h, w, _ = p.shape
        out = np.zeros_like(p)
        for k, weight in enumerate(weights):
            across = math.ceil(k * math.cos(math.radians(angles[i])) - 0.5)
            down = math.ceil(k * math.sin(math.radians(angles[i])) - 0.5)
            rows, columns = np.clip(np.arange(h) + down, 0, h - 1), np.clip(np.arange(w) + across, 0, w - 1)
            out += weight * p[rows][:, columns]
        return out

    exact = each(photos[32], one)
    found = c.corrupt(tensor(photos[32]), "motion_blur", severity, angle=torch.tensor(angles))
    assert np.abs(levels(found) - exact).max() <= 0.5 + 2e-3
    np.testing.assert_array_equal(np.round(levels(found), 3) % 1, 0)


def test_glass_blur_copies_in_the_order_of_the_scan():
    """The loop of the published programs, and what their swap of two views does: a copy."""
    rng = RNG(0)
    for reach, rounds, h, w in ((1, 2, 12, 12), (2, 3, 14, 11), (4, 2, 20, 24)):
        image = rng.integers(0, 256, (2, h, w, 3), dtype=np.uint8)
        offsets = rng.integers(-reach, reach, (rounds, 2, 2, h, w))
        expected = image.copy()
        for n in range(2):
            x = expected[n]
            for k in range(rounds):
                for row in range(h - reach, reach, -1):
                    for column in range(w - reach, reach, -1):
                        dx, dy = offsets[k, :, n, row, column]
                        x[row, column], x[row + dy, column + dx] = x[row + dy, column + dx], x[row, column]
        found = blur.glass_blur(tensor(image), 0.0, reach, rounds, offsets=torch.from_numpy(offsets))
        np.testing.assert_array_equal(levels(found).round(), expected)
        assert (expected != image).mean() > 0.3


@pytest.mark.parametrize("severity", c.SEVERITIES)
@pytest.mark.parametrize("size", [32, 45])
def test_zoom_blur_by_interpolation(photos, severity, size):
    (stop, step), image = CIFAR["zoom_blur"][severity - 1], photos[size][2] / 255
    factors = np.arange(1, stop, step)
    assert operators.arange(1, stop, step) == factors.tolist()
    total = image.copy()
    for factor in factors:
        crop = math.ceil(size / factor)
        top, full = (size - crop) // 2, round(crop * factor)
        at = np.linspace(0, crop - 1, full)
        p = image[top : top + crop, top : top + crop]
        for axis in (0, 1):
            p = np.apply_along_axis(lambda line, at=at, n=crop: np.interp(at, np.arange(n), line), axis, p)
        trim = (full - size) // 2
        total += p[trim : trim + size, trim : trim + size]
    expected = total / (len(factors) + 1) * 255
    found = c.corrupt(tensor(photos[size][2:3]), "zoom_blur", severity, eight_bit=False, constants="cifar")
    np.testing.assert_allclose(levels(found)[0], expected, atol=1e-3)


def test_plasma_is_diamond_square_with_squared_roughness():
    rng, side, decay = RNG(1), 16, 2.5
    draws: list[np.ndarray] = []

    def uniform(a: int, b: int) -> Tensor:
        draws.append(rng.uniform(-1, 1, (2, a, b)))
        return torch.from_numpy(draws[-1])

    found = weather.plasma_fractal(side, decay, uniform).numpy()
    expected = np.zeros((2, side, side))
    drawn = iter(draws[1:])  # the first call only tells shape and type
    step, rough = side, 100.0
    while step >= 2:
        half = step // 2
        for kind in ("centre", "top", "left"):  # corners' middle, then the middles of horizontal and vertical sides
            bump = next(drawn)
            rows = range(0 if kind == "top" else half, side, step)
            columns = range(0 if kind == "left" else half, side, step)
            reach = ((-1, -1), (-1, 1), (1, -1), (1, 1)) if kind == "centre" else ((-1, 0), (1, 0), (0, -1), (0, 1))
            for (a, row), (b, column) in ((u, v) for u in enumerate(rows) for v in enumerate(columns)):
                around = [expected[:, (row + dy * half) % side, (column + dx * half) % side] for dy, dx in reach]
                expected[:, row, column] = sum(around) / 4 + rough * rough * bump[:, a, b]
        step, rough = half, rough / decay
    expected -= expected.min((1, 2), keepdims=True)
    expected /= expected.max((1, 2), keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("severity", c.SEVERITIES)
def test_fog_and_frost_are_mixtures(photos, severity):
    rng, images = RNG(2), photos[32]
    plasma = rng.random((4, 32, 32))
    amount, _ = CIFAR["fog"][severity - 1]
    found = c.corrupt(tensor(images), "fog", severity, plasma=torch.from_numpy(plasma).float(), eight_bit=False)
    expected = each(images, lambda p, i: (p + amount * plasma[i][..., None]) * p.max() / (p.max() + amount))
    np.testing.assert_allclose(levels(found), expected, atol=2e-4)

    share, strength, _ = CIFAR["frost"][severity - 1]
    crop = torch.tensor([[0, 1, 4, 2], [3, 0, 7, 9], [5, 20, 1, 0]])
    packed = textures._packed(None, 0.2, 32, 32)
    pieces = []
    for which, top, left in crop.mT.tolist():
        start, h, w = (int(v[which]) for v in (packed.starts, packed.heights, packed.widths))
        picture = packed.values[:, start : start + h * w].view(3, h, w)
        pieces.append(picture[:, top : top + 32, left : left + 32].permute(1, 2, 0).double().numpy())
    found = weather.frost(tensor(images), share, strength, 0.2, crop=crop, root="/nowhere")
    expected = each(images, lambda p, i: share * p + strength * pieces[i])
    np.testing.assert_allclose(levels(found.clamp(0, 1)), expected, atol=2e-4)


@pytest.mark.parametrize("severity", c.SEVERITIES)
def test_noise_with_given_fields(photos, severity):
    rng, images = RNG(3), photos[32]
    field = rng.standard_normal((4, 3, 32, 32)).astype(np.float32)
    normal = field.transpose(0, 2, 3, 1).astype(np.float64)
    uniform = rng.random((4, 3, 32, 32), dtype=np.float32)
    even = uniform.transpose(0, 2, 3, 1)
    (sigma,), (rough,), (amount,) = (
        CIFAR[n][severity - 1] for n in ("gaussian_noise", "speckle_noise", "impulse_noise")
    )
    for name, field_name, given, formula in (
        ("gaussian_noise", "noise", field, lambda p, i: p + sigma * normal[i]),
        ("speckle_noise", "noise", field, lambda p, i: p + p * rough * normal[i]),
        ("impulse_noise", "uniform", uniform, lambda p, i: np.where(even[i] < amount / 2, 0, np.where(
            even[i] >= 1 - amount / 2, 1, p))),
    ):  # fmt: skip
        fields: dict[str, Any] = {field_name: torch.from_numpy(given)}
        found = c.corrupt(tensor(images), name, severity, eight_bit=False, **fields)
        np.testing.assert_allclose(levels(found), each(images, formula), atol=2e-4, err_msg=name)
        cut = c.corrupt(tensor(images), name, severity, **fields)  # 8 bits, downwards
        lost = levels(found) - levels(cut)
        assert lost.min() > -2e-3 and lost.max() < 1 and (lost.std() > 0.2) == (name != "impulse_noise"), name


def test_truncation_keeps_whole_levels():
    whole = torch.arange(256) / 255
    assert torch.equal(operators.truncated(whole), whole)
    assert torch.equal(operators.truncated(whole[1:] - 0.01 / 255), whole[:-1])
    assert torch.equal(operators.rounded(whole[1:] - 0.01 / 255), whole[1:])


# ------------------------------------------------------------------------------------------------------ distributions


def test_noise_in_distribution():
    x = torch.full((64, 3, 32, 32), 0.4)
    n = x.numel()
    for severity in c.SEVERITIES:
        (sigma,), (rough,), (rate,), (amount,) = (
            CIFAR[k][severity - 1] for k in ("gaussian_noise", "speckle_noise", "shot_noise", "impulse_noise")
        )
        for name, var in (
            ("gaussian_noise", sigma**2),
            ("speckle_noise", (0.4 * rough) ** 2),
            ("shot_noise", 0.4 / rate),
            ("impulse_noise", amount / 2 * (0.16 + 0.36)),
        ):
            made = c.corrupt(x, name, severity, seed=severity, eight_bit=False).double()
            mean = 0.4 + (amount / 2 * (0.6 - 0.4) if name == "impulse_noise" else 0)
            moved = made - mean
            assert abs(moved.mean()) < 5 * math.sqrt(var / n), (name, severity)
            # The variance's own error: kurtosis 3 for the normal ones, more for salt and pepper.
            spread = math.sqrt(moved.pow(4).mean() - moved.pow(2).mean() ** 2) / math.sqrt(n)
            assert abs(moved.pow(2).mean() - (var - (amount / 2 * 0.2) ** 2 * (name == "impulse_noise"))) < 5 * spread
            # Channels are independent, and so are neighbours.
            for a, b in ((moved[:, 0], moved[:, 1]), (moved[..., 1:], moved[..., :-1])):
                assert abs((a * b).mean() / var) < 5 / math.sqrt(a.numel()), (name, severity)
    salt = c.corrupt(x, "impulse_noise", 5, seed=1)
    assert ((salt == 1).sum() / n).item() == pytest.approx(0.035, abs=0.002)
    assert ((salt == 0).sum() / n).item() == pytest.approx(0.035, abs=0.002)


def test_random_fields_have_their_distribution():
    x = torch.full((400, 1, 32, 32), 0.5)
    seen = {}

    def spy(name, keep):
        def wrapped(*args, **kwargs):
            seen.setdefault(name, []).append(keep(*args, **kwargs))
            return real(*args, **kwargs)

        real = getattr(blur, name)
        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blur, "moved", spy("moved", lambda x, radius, sigma, angle: angle))
        patch.setattr(weather, "moved", blur.moved)
        c.corrupt(x, "motion_blur", 1, seed=4)
        c.corrupt(x, "snow", 1, seed=4)
    motion, snow = (v.double() for v in seen["moved"])
    for angle, low, high in ((motion, -45, 45), (snow, -135, -45)):
        assert low <= angle.min() < low + 2 and high - 2 < angle.max() <= high
        assert angle.mean().item() == pytest.approx((low + high) / 2, abs=5 * 90 / math.sqrt(12 * 400))
    # A texture is chosen for each image, all five alike, and cut anywhere.
    made = c.corrupt(torch.zeros(2000, 1, 32, 32), "frost", 5, seed=1, eight_bit=False, root="/nowhere")
    packed = textures._packed(None, 0.2, 32, 32)
    means = made.mean((1, 2, 3)) / 0.45
    pictures = packed.values.split((packed.heights * packed.widths).tolist(), 1)
    grey = torch.stack([operators.grey(p.view(1, 3, 1, -1)).mean() for p in pictures])
    nearest_picture = (means.unsqueeze(1) - grey).abs().argmin(1).bincount(minlength=5)
    assert nearest_picture.min() > 250
    # Fog differs from image to image, and covers [0, amount] in each.
    fog = c.corrupt(torch.zeros(8, 1, 32, 32) + 1, "fog", 3, seed=2, eight_bit=False)
    flat = fog.flatten(1) * 1.75 - 1
    torch.testing.assert_close(flat.clamp_max(0.75).amax(1), torch.full((8,), 0.75))
    assert flat.amin(1).abs().max() < 1e-5
    assert flat.std(0).mean() > 0.05


# -------------------------------------------------------------------------------------------- against the libraries


def pil_jpeg(image: np.ndarray, quality: int) -> np.ndarray:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return np.asarray(Image.open(buffer))


@pytest.mark.parametrize("quality", [7, 15, 25, 40, 58, 80, 95])
@pytest.mark.parametrize("size", [(32, 32), (64, 64), (45, 45), (28, 30)])
def test_jpeg_against_pillow(photos, quality, size):
    """Pixel for pixel, but for a coefficient now and then that is rounded the other way."""
    images = photos[64 if size == (64, 64) else 45][:, : size[0], : size[1]]
    found = levels(jpeg.jpeg_compression(tensor(np.ascontiguousarray(images)), quality))
    expected = np.stack([pil_jpeg(i, quality) for i in images]).astype(float)
    assert np.abs(found - expected).mean() < 0.1
    assert (np.round(found) == expected).mean() > 0.96
    grey = images[..., :1]
    found = levels(jpeg.jpeg_compression(tensor(np.ascontiguousarray(grey)), quality))[..., 0]
    expected = np.stack([pil_jpeg(i[..., 0], quality) for i in grey]).astype(float)
    assert np.abs(found - expected).mean() < 0.1


@pytest.mark.parametrize("quality", [7, 25, 40, 50, 80])
def test_quantisation_tables_are_pillows(quality):
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "JPEG", quality=quality)
    tables = Image.open(buffer).quantization  # type: ignore[attr-defined]
    for mine, key in zip(jpeg.quantisation(quality), (0, 1), strict=True):
        assert mine.int().tolist() == list(tables[key])


@pytest.mark.parametrize("severity", c.SEVERITIES)
@pytest.mark.parametrize("size", [32, 45, 64])
def test_pixelate_is_pillows_box(photos, severity, size):
    table = CIFAR if size == 32 else IMAGENET
    (factor,), images = table["pixelate"][severity - 1], photos[size]
    small, box = int(size * factor), Image.Resampling.BOX
    expected = np.stack([
        np.asarray(Image.fromarray(i).resize((small, small), box).resize((size, size), box)) for i in images
    ]).astype(float)  # fmt: skip
    np.testing.assert_allclose(levels(c.corrupt(tensor(images), "pixelate", severity)), expected, atol=1e-3)


@pytest.fixture(scope="module")
def published():
    """The package that follows ImageNet-C's program, with OpenCV and scikit-image behind it."""
    return pytest.importorskip("imagecorruptions.corruptions", reason="imagecorruptions-imaug is not installed")


@pytest.mark.parametrize("severity", c.SEVERITIES)
@pytest.mark.parametrize(
    ("name", "mean", "most"),
    # One level apart where the exact value is whole: in float64 the package lands below it now and then, and truncates.
    [("contrast", 0.01, 1), ("brightness", 0.03, 1), ("saturate", 0.15, 1), ("gaussian_blur", 0.01, 1),
     ("defocus_blur", 0.05, 1), ("jpeg_compression", 0.1, 40), ("pixelate", 0.0, 0)],
)  # fmt: skip
def test_deterministic_ones_against_the_package(photos, published, name, mean, most, severity):
    images = photos[LARGE]
    expected = np.stack([np.uint8(getattr(published, name)(Image.fromarray(i), severity)) for i in images]).astype(
        float
    )
    apart = np.abs(levels(c.corrupt(tensor(images), name, severity)) - expected)
    assert apart.mean() <= mean + 1e-4 and apart.max() <= most + 1e-3


@pytest.mark.parametrize("severity", c.SEVERITIES)
def test_motion_fog_spatter_with_the_package_s_draws(photos, published, severity):
    images, angle = photos[LARGE], 23.0
    radius, sigma = IMAGENET["motion_blur"][severity - 1]
    found = levels(blur.moved(tensor(images), radius, sigma, torch.full((4,), angle)))
    expected = np.stack([published._motion_blur(i.astype(float), radius, sigma, angle) for i in images])
    np.testing.assert_allclose(found, expected, atol=2e-2)

    amount, decay = IMAGENET["fog"][severity - 1]
    plasma = np.stack([published.plasma_fractal(64, decay) for _ in images])
    found = levels(weather.fog(tensor(images), amount, decay, plasma=torch.from_numpy(plasma).float()).clamp(0, 1))
    expected = each(images, lambda p, i: (p + amount * plasma[i][..., None]) * p.max() / (p.max() + amount))
    np.testing.assert_allclose(found, expected, atol=1e-3)

    noise, expected = [], []
    for k, image in enumerate(images):
        np.random.seed(k)  # noqa: NPY002 - the package draws from NumPy's global generator
        noise.append(np.random.standard_normal((64, 64)))  # noqa: NPY002
        np.random.seed(k)  # noqa: NPY002
        expected.append(published.spatter(Image.fromarray(image), severity))
    field = torch.from_numpy(np.stack(noise)).float().unsqueeze(1)
    found = levels(c.corrupt(tensor(images), "spatter", severity, noise=field, eight_bit=False))
    apart = np.abs(found - np.stack(expected))
    assert apart.mean() < 0.02 and np.quantile(apart, 0.999) < 1


@pytest.mark.parametrize("severity", [2, 3])  # zooms that need no cutting, which the package does later and off centre
def test_snow_with_the_package_s_draws(photos, published, severity):
    images, noise, angle, expected = photos[LARGE], [], [], []
    for k, image in enumerate(images):
        np.random.seed(k)  # noqa: NPY002
        noise.append(np.random.standard_normal((64, 64)))  # noqa: NPY002
        angle.append(np.random.uniform(-135, -45))  # noqa: NPY002
        np.random.seed(k)  # noqa: NPY002
        expected.append(published.snow(Image.fromarray(image), severity))
    given: dict[str, Any] = {"noise": torch.tensor(np.stack(noise)).float().unsqueeze(1), "angle": torch.tensor(angle)}
    apart = np.abs(levels(c.corrupt(tensor(images), "snow", severity, eight_bit=False, **given)) - np.stack(expected))
    assert apart.max() < 3  # flakes are cut to 8 bits before the blur in ImageNet-C's program, after it in the package
    assert apart.mean() < 0.7


@pytest.mark.parametrize("severity", c.SEVERITIES)
@pytest.mark.parametrize("size", [32, 64])
def test_elastic_against_opencv_and_scipy(photos, severity, size):
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")
    from scipy.ndimage import gaussian_filter, map_coordinates

    amplitude, sigma, shift = (v * size for v in (CIFAR if size == 32 else IMAGENET)["elastic_transform"][severity - 1])
    rng, images = RNG(severity), photos[size]
    corners, field = rng.uniform(-1, 1, (4, 3, 2)), rng.uniform(-1, 1, (4, 2, size, size))
    arm, middle = size // 3, size // 2
    before = np.array(
        [[middle + arm, middle + arm], [middle + arm, middle - arm], [middle - arm, middle - arm]], dtype=np.float32
    )
    y, x = np.mgrid[:size, :size]

    def one(p, i):
        matrix = cv2.getAffineTransform(before, (before + corners[i] * shift).astype(np.float32))
        p = cv2.warpAffine(p.astype(np.float32), matrix, (size, size), borderMode=cv2.BORDER_REFLECT_101)
        dx, dy = (gaussian_filter(f, sigma, mode="reflect", truncate=3) * amplitude for f in field[i])
        at = [y + dy, x + dx]
        return np.stack([map_coordinates(p[..., k], at, order=1, mode="reflect") for k in range(3)], -1)

    given: dict[str, Any] = {"corners": torch.from_numpy(corners).float(), "field": torch.from_numpy(field).float()}
    found = levels(c.corrupt(tensor(images), "elastic_transform", severity, eight_bit=False, **given))
    apart = np.abs(found - each(images, one))
    assert apart.mean() < 0.5  # OpenCV's warp may round positions to 1/32 pixel


def test_canny_and_distance_against_opencv():
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")
    rng = RNG(5)
    rough = torch.from_numpy(rng.standard_normal((12, 1, 40, 52))).float()
    soft = operators.separable(rough, operators.gaussian(40, 1.5), operators.gaussian(52, 1.5))
    pictures = [
        (soft * 600 + 128).clamp(0, 255).floor(),  # weak and strong edges, long chains
        (rough * 60 + 128).clamp(0, 255).floor(),
        ((soft > 0.1) * 200.0),
    ]
    edge, expected = torch.empty(0), np.empty(0)
    for picture in pictures:
        edge = canny(picture, 50, 150)
        image = picture[:, 0].numpy().astype(np.uint8)
        expected = np.stack([cv2.Canny(i, 50, 150) > 0 for i in image])
        assert 0.02 < expected.mean() < 0.9
        np.testing.assert_array_equal(edge[:, 0].numpy(), expected)
    far = distance(edge)[:, 0].numpy()
    exact = np.stack([cv2.distanceTransform(np.uint8(255 * (1 - e)), cv2.DIST_L2, 5) for e in expected])
    np.testing.assert_allclose(far, np.minimum(exact, 20), atol=1e-4)
    lonely = torch.zeros(1, 1, 60, 60, dtype=torch.bool)
    lonely[0, 0, 7, 50] = True
    exact = cv2.distanceTransform(np.uint8(255 * (1 - lonely[0, 0].numpy())), cv2.DIST_L2, 5)
    np.testing.assert_allclose(distance(lonely)[0, 0].numpy(), np.minimum(exact, 20), atol=1e-4)
    flat = torch.floor(torch.rand(5, 1, 30, 30) ** 2 * 21)
    flat[4] = 7
    expected = np.stack([cv2.equalizeHist(np.uint8(f[0].numpy())) for f in flat])
    np.testing.assert_array_equal(equalised(flat)[:, 0].numpy(), expected)


# ------------------------------------------------------------------------------------------------------- all nineteen

RANDOM = ("gaussian_noise", "shot_noise", "impulse_noise", "glass_blur", "motion_blur", "snow", "frost", "fog",
          "elastic_transform", "speckle_noise", "spatter")  # fmt: skip


@pytest.mark.parametrize("name", c.CORRUPTIONS)
def test_contract(photos, name, monkeypatch, tmp_path):
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path))
    for images in (
        photos[32],
        photos[32][:, :24, :20],
        photos[64][:, :, :50],
        photos[32][..., :1],
        photos[32][:, 4:12, 4:12],
    ):
        x = tensor(np.ascontiguousarray(images))
        before = x.clone()
        changes = []
        for severity in c.SEVERITIES:
            made = c.corrupt(x, name, severity, seed=1)
            assert made.shape == x.shape and made.dtype == x.dtype and made.isfinite().all()
            assert made.min() >= 0 and made.max() <= 1
            torch.testing.assert_close((made * 255).round() / 255, made)
            assert torch.equal(made, c.corrupt(x, name, severity, seed=1))
            changes.append((made - x).abs().mean().item())
            if name in RANDOM:
                assert not torch.equal(made, c.corrupt(x, name, severity, seed=2))
                if severity == 3:  # no two images share their noise
                    twice = c.corrupt(x[:1].expand(2, -1, -1, -1), name, severity, seed=1)
                    assert not torch.equal(twice[0], twice[1])
            else:
                assert torch.equal(made, c.corrupt(x, name, severity, seed=2))
            in_bytes = c.corrupt((x * 255).round().byte(), name, severity, seed=1)
            assert in_bytes.dtype == torch.uint8
            torch.testing.assert_close(in_bytes.float() / 255, made, atol=1.01 / 255, rtol=0)
            assert (in_bytes.float() / 255 - made).abs().mean() < 1e-4
        assert torch.equal(x, before)
        if (name != "saturate" or x.shape[1] == 3) and min(x.shape[-2:]) > 8:
            assert min(changes) > 0.0005
    assert c.corrupt(x[:0], name, 1).shape == x[:0].shape


def test_size_chooses_the_constants():
    x = torch.full((1, 3, 33, 40), 0.5)
    assert torch.equal(c.corrupt(x, "brightness", 1), c.corrupt(x, "brightness", 1, constants="imagenet"))
    assert torch.equal(
        c.corrupt(x[..., :32, :], "brightness", 1), c.corrupt(x[..., :32, :], "brightness", 1, constants="cifar")
    )
    assert not torch.equal(c.corrupt(x, "brightness", 1), c.corrupt(x, "brightness", 1, constants="cifar"))


def test_a_generator_goes_on_where_a_seed_starts_again():
    x = torch.full((6, 3, 32, 32), 0.5)
    draw = torch.Generator().manual_seed(3)
    parts = [c.corrupt(x[:3], "gaussian_noise", 1, seed=draw) for _ in range(2)]
    assert not torch.equal(*parts)
    assert torch.equal(torch.cat(parts), c.corrupt(x, "gaussian_noise", 1, seed=torch.Generator().manual_seed(3)))
    assert not torch.equal(c.corrupt(x, "gaussian_noise", 1), c.corrupt(x, "speckle_noise", 1))


def test_more_images_than_are_worked_on_at_once(monkeypatch):
    x = torch.rand(7, 3, 32, 32)
    whole = c.corrupt(x, "zoom_blur", 2)
    monkeypatch.setitem(c._AT_ONCE, "cpu", 2 * 3 * 32 * 32)
    assert torch.equal(c.corrupt(x, "zoom_blur", 2), whole)
    noisy = c.corrupt(torch.full_like(x, 0.5), "gaussian_noise", 2)
    assert len({row.sum().item() for row in noisy}) == 7


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "guassian_noise"}, "did you mean 'gaussian_noise'"),
        ({"severity": 0}, "1, 2, 3, 4 or 5, but 0"),
        ({"severity": 2.5}, "but 2.5"),
        ({"x": torch.zeros(3, 32, 32)}, r"\[3, 32, 32\]"),
        ({"x": torch.zeros(1, 4, 32, 32)}, "1 or 3 channels"),
        ({"x": torch.zeros(1, 3, 2, 32)}, "4 x 4"),
        ({"x": torch.zeros(1, 3, 32, 32, dtype=torch.int64)}, "torch.int64"),
        ({"x": torch.full((1, 3, 32, 32), 128.0)}, "divide 0 to 255 by 255"),
        ({"x": torch.full((1, 3, 32, 32), -0.1)}, "from -0.1"),
        ({"x": torch.full((1, 3, 32, 32), math.nan)}, "nan"),
        ({"constants": "imagenette"}, "did you mean 'imagenet'"),
    ],
)
def test_bad_input_is_a_sentence(arguments, sentence):
    given: dict[str, Any] = {"x": torch.zeros(1, 3, 32, 32), "name": "fog", "severity": 1} | arguments
    with pytest.raises(LabError, match=sentence):
        c.corrupt(**given)


# ------------------------------------------------------------------------------------------------------------ textures


def test_published_textures_are_used_where_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path))
    assert c.label("frost") == "frost (drawn texture)" and c.label("fog") == "fog"
    folder = tmp_path / "frost"
    folder.mkdir()
    rng = RNG(6)
    pictures = [rng.integers(0, 256, (180 + 10 * k, 240, 3), dtype=np.uint8) for k in range(5)]
    for name, picture in zip(textures.FILES[:4], pictures, strict=False):
        Image.fromarray(picture).save(folder / name, quality=95)
    with pytest.raises(LabError, match=r"frost5\.jpg"):
        c.label("frost")
    Image.fromarray(pictures[4]).save(folder / textures.FILES[4], quality=95)
    assert c.label("frost") == "frost"
    crop = torch.tensor([[0, 2], [1, 3], [4, 0]])
    x = torch.zeros(2, 3, 32, 32)
    found = levels(c.corrupt(x, "frost", 5, crop=crop, eight_bit=False))
    every_fifth = [p[2::5, 2::5] for p in pictures]  # OpenCV's linear resize to a fifth
    expected = np.stack([every_fifth[k][top : top + 32, left : left + 32] for k, top, left in crop.mT.tolist()]) * 0.45
    np.testing.assert_allclose(found, expected, atol=1e-3)
    (folder / "frost1.png").write_bytes(b"not a picture")
    textures._packed.cache_clear()
    with pytest.raises(LabError, match="cannot be read"):
        c.corrupt(x, "frost", 1)


def test_drawn_textures_are_bright_bluish_and_always_the_same():
    first, second = textures.drawn(), textures.drawn.__wrapped__()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for picture in first:
        red, green, blue = picture.mean((1, 2)).tolist()
        assert 0.35 < green < 0.9 and red < green < blue
        assert 0.03 < picture.std((1, 2)).mean() < 0.2


def test_textures_grow_for_large_images(monkeypatch, tmp_path):
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path))
    made = c.corrupt(torch.zeros(1, 3, 400, 560), "frost", 2, seed=0)
    assert made.std() > 0.03


# ------------------------------------------------------------------------------------------------------------- metrics


def test_the_three_means():
    errors = {name: [float(k), 2.0 * k, 3.0 * k, 4.0 * k, 5.0 * k] for k, name in enumerate(c.CORRUPTIONS)}
    assert tuple(errors)[:15] == c.COMMON and tuple(errors)[15:] == c.EXTRA
    assert c.uce(errors) == pytest.approx(3 * 7.0)  # 3 k, k = 0 .. 14
    assert c.mce_19(errors) == pytest.approx(3 * 9.0)  # k = 0 .. 18
    ce = c.ce_alexnet(errors)
    assert ce["shot_noise"] == pytest.approx(100 * 15 / (5 * 89.4468))
    alexnet = {name: [0.5 * e, 0.8 * e, e, 1.2 * e, 1.5 * e] for name, e in c.ALEXNET.items()}
    assert c.mce_alexnet(alexnet) == pytest.approx(100)
    assert c.uce(alexnet) == pytest.approx(78.9, abs=0.05)  # AlexNet's mean error on ImageNet-C
    del errors["saturate"]
    assert c.uce(errors) == pytest.approx(21)
    with pytest.raises(LabError, match="missing: saturate"):
        c.mce_19(errors)
    with pytest.raises(LabError, match="fog has 4"):
        c.uce(errors | {"fog": [1.0] * 4})


def test_published_files(tmp_path):
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    rng = RNG(7)
    images, labels = (
        rng.integers(0, 256, (5 * 6, 32, 32, 3), dtype=np.uint8),
        np.tile(np.arange(6, dtype=np.uint8), 5),
    )
    np.save(folder / "fog.npy", images)
    with pytest.raises(LabError, match=r"labels\.npy.*zenodo"):
        c.read_cifar10c(tmp_path, "fog")
    np.save(folder / "labels.npy", labels)
    for root in (tmp_path, folder):
        parts = c.read_cifar10c(root, "fog")
        assert len(parts) == 5
        for severity, part in enumerate(parts):
            assert part.x.dtype == torch.uint8 and part.y.dtype == torch.int64
            assert part.y.tolist() == list(range(6))
            np.testing.assert_array_equal(part.x[2].permute(1, 2, 0).numpy(), images[6 * severity + 2])
    with pytest.raises(LabError, match="did you mean 'frost'"):
        c.read_cifar10c(tmp_path, "forst")
    np.save(folder / "fog.npy", images[:-1])
    with pytest.raises(LabError, match=r"\[29, 32, 32, 3\] beside 30 labels"):
        c.read_cifar10c(tmp_path, "fog")
    (folder / "fog.npy").write_bytes((folder / "fog.npy").read_bytes()[:500])
    with pytest.raises(LabError, match="cut off"):
        c.read_cifar10c(tmp_path, "fog")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", c.CORRUPTIONS)
def test_cuda_agrees_with_cpu(photos, name):
    rng = RNG(8)
    fields = {
        "gaussian_noise": {"noise": rng.standard_normal((4, 3, 32, 32))},
        "speckle_noise": {"noise": rng.standard_normal((4, 3, 32, 32))},
        "shot_noise": {"counts": rng.poisson(100, (4, 3, 32, 32))},
        "impulse_noise": {"uniform": rng.random((4, 3, 32, 32))},
        "glass_blur": {"offsets": rng.integers(-1, 1, (1, 2, 4, 32, 32))},
        "motion_blur": {"angle": rng.uniform(-45, 45, 4)},
        "snow": {"noise": rng.standard_normal((4, 1, 32, 32)), "angle": rng.uniform(-135, -45, 4)},
        "frost": {"crop": rng.integers(0, 5, (3, 4))},
        "fog": {"plasma": rng.random((4, 32, 32))},
        "elastic_transform": {"corners": rng.uniform(-1, 1, (4, 3, 2)), "field": rng.uniform(-1, 1, (4, 2, 32, 32))},
        "spatter": {"noise": rng.standard_normal((4, 1, 32, 32))},
    }.get(name, {})
    given: dict[str, Any] = {k: torch.from_numpy(np.asarray(v)) for k, v in fields.items()}
    given = {k: v.float() if v.is_floating_point() or k == "counts" else v for k, v in given.items()}
    x = tensor(photos[32])
    was = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True  # must not matter
    try:
        here = c.corrupt(x, name, 3, **given)
        there = c.corrupt(x.cuda(), name, 3, **{k: v.cuda() for k, v in given.items()}).cpu()
        assert (here - there).abs().mean() * 255 < 0.02
        drawn = c.corrupt(x.cuda(), name, 5, seed=1)
        assert torch.equal(drawn, c.corrupt(x.cuda(), name, 5, seed=1))
        large = c.corrupt(tensor(photos[64]).cuda(), name, 5, seed=1)
        assert large.isfinite().all()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = was
