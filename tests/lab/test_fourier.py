"""Waves, heat maps and low-pass filters: exact properties, and models whose errors are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normlab
from normlab.lab.errors import LabError
from normlab.lab.fourier import basis, frequencies, heat_map, low_pass

SIZES = [(32, 32), (8, 8), (7, 7), (6, 9), (5, 4)]


@pytest.mark.parametrize(("h", "w"), SIZES)
def test_a_wave_is_one_pair_of_frequencies(h, w):
    for i, j in frequencies(h, w):
        wave = basis(i, j, h, w).numpy()
        assert np.linalg.norm(wave) == pytest.approx(1, abs=1e-12)
        spectrum = np.abs(np.fft.fft2(wave))
        here = {(i, j), (-i % h, -j % w)}
        assert set(zip(*np.nonzero(spectrum > 1e-9), strict=True)) == here
        # Energy: a lone frequency has all of it, a pair half each.
        assert spectrum[i, j] == pytest.approx(math.sqrt(h * w / len(here)))
        np.testing.assert_allclose(basis(-i, -j, h, w).numpy(), wave, atol=1e-12)
        np.testing.assert_allclose(basis(i + 3 * h, j - w, h, w).numpy(), wave, atol=1e-12)


@pytest.mark.parametrize(("h", "w"), SIZES)
def test_half_of_the_frequencies_are_all_of_the_waves(h, w):
    half = frequencies(h, w)
    alone = sum((-i % h, -j % w) == (i, j) for i in range(h) for j in range(w))
    assert len(half) == len(set(half)) == (h * w + alone) // 2
    assert {p for i, j in half for p in ((i, j), (-i % h, -j % w))} == {(i, j) for i in range(h) for j in range(w)}
    if (h, w) == (32, 32):
        assert len(half) == 514
    waves = torch.stack([basis(i, j, h, w).flatten() for i, j in half])
    torch.testing.assert_close(waves @ waves.mT, torch.eye(len(half), dtype=torch.float64))


def test_the_strength_of_a_wave():
    """At norm 8 on 32 x 32 a pixel changes by at most 0.354 (a pair) and by 0.25 (a lone frequency)."""
    assert 8 * basis(3, 5, 32, 32).abs().max().item() == pytest.approx(0.3536, abs=1e-4)
    assert 8 * basis(16, 0, 32, 32).abs().max().item() == pytest.approx(0.25)


def sensitive(i: int, j: int, h: int, w: int, limit: float = 0.05):
    """Class 1 where any channel holds more of a wave than ``limit``, else class 0."""
    wave = basis(i, j, h, w).float()

    def predict(x: Tensor) -> Tensor:
        amount = (x * wave).sum((2, 3)).abs().amax(1)
        return torch.stack((torch.full_like(amount, limit), amount), 1)

    return predict


@pytest.mark.parametrize(("h", "w"), [(8, 8), (7, 7), (6, 9)])
@pytest.mark.parametrize("batch_size", [None, 3, 64])
def test_heat_map_finds_the_frequency(h, w, batch_size):
    """Grey images have every frequency but 0 at strength 0, and small waves are not clipped."""
    x, y = torch.full((5, 3, h, w), 0.5), torch.zeros(5, dtype=torch.long)
    for i, j in ((1, 2), (0, 3), (h // 2, 0), (2, w - 1)):
        found = heat_map(sensitive(i, j, h, w), (x, y), norm=0.3, batch_size=batch_size)
        expected = torch.zeros(h, w)
        for sign in (1, -1):  # around the middle, both of the pair
            expected[(h // 2 + sign * i) % h, (w // 2 + sign * j) % w] = 1
        assert torch.equal(found, expected)
    # All images are of frequency 0: the model of that frequency always says 1, whatever is added.
    assert heat_map(sensitive(0, 0, h, w), (x, y), norm=0.3).min() == 1


def test_heat_map_is_symmetric_through_its_middle_and_seeded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 7 * 8, 5))
    x, y = torch.rand(40, 3, 7, 8), torch.randint(5, (40,))
    found = heat_map(model, (x, y), norm=1.0, seed=1)
    unshifted = torch.fft.ifftshift(found)
    mirrored = unshifted.roll((-1, -1), (0, 1)).flip((0, 1))
    assert torch.equal(unshifted, mirrored)
    assert 0 < found.min() < found.max() < 1
    assert torch.equal(found, heat_map(model, (x, y), norm=1.0, seed=1))
    assert not torch.equal(found, heat_map(model, (x, y), norm=1.0, seed=2))


def test_what_is_added():
    """Strength for each channel, a sign for each channel and image, and pixels that stay in [0, 1]."""
    seen: list[Tensor] = []

    def predict(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return torch.zeros(len(x), 2)

    x, y = torch.full((50, 3, 8, 8), 0.5), torch.zeros(50, dtype=torch.long)
    heat_map(predict, (x, y), norm=0.5, batch_size=50)
    assert len(seen) == len(frequencies(8, 8)) == 34
    added = torch.stack(seen) - x
    torch.testing.assert_close(added.flatten(3).norm(dim=3), torch.full((34, 50, 3), 0.5))
    signs = added[:, :, :, 0, 0].sign()  # every wave is positive in the corner
    n = signs.numel()
    assert abs(signs.mean()) < 5 / math.sqrt(n)
    assert abs((signs[..., 0] * signs[..., 1]).mean()) < 5 / math.sqrt(n / 3)
    assert abs((signs[:, 1:] * signs[:, :-1]).mean()) < 5 / math.sqrt(n)
    assert abs((signs[1:] * signs[:-1]).mean()) < 5 / math.sqrt(n)

    seen.clear()
    heat_map(predict, (x, y), norm=40.0)
    assert min(s.min() for s in seen) == 0 and max(s.max() for s in seen) == 1


def test_heat_map_takes_uint8_and_reports_progress():
    x, y = torch.full((4, 1, 6, 6), 128, dtype=torch.uint8), torch.zeros(4, dtype=torch.long)
    calls: list[tuple[int, int]] = []
    heat_map(sensitive(1, 1, 6, 6), (x, y), batch_size=8, progress=lambda *at: calls.append(at))
    total = len(frequencies(6, 6))
    assert calls == [(k, total) for k in range(2, total + 1, 2)]


def test_a_model_is_left_as_found_and_its_branch_is_measured():
    torch.manual_seed(0)
    norm = normlab.AuxiliaryBatchNorm2d(3)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(3 * 64, 4))
    with torch.no_grad():
        for name, p in norm.named_parameters():
            p.copy_(torch.randn_like(p) if "aux" in name else p)
    x, y = torch.rand(20, 3, 8, 8), torch.randint(4, (20,))
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with normlab.route(model, branch="main"):
        main = heat_map(model, (x, y), norm=2.0)
    with normlab.route(model, branch="aux"):
        aux = heat_map(model, (x, y), norm=2.0)
    assert all(m.training for m in model.modules())
    for k, v in model.state_dict().items():
        assert torch.equal(v, before[k]), k
    assert not torch.equal(main, aux)
    plain = nn.BatchNorm2d(3)  # what the routed branch computes in evaluation mode
    with torch.no_grad():
        plain.weight.copy_(before["0.branch_weight.aux"])
        plain.bias.copy_(before["0.branch_bias.aux"])
    alone = nn.Sequential(plain, model[1], model[2]).eval()
    assert torch.equal(aux, heat_map(alone, (x, y), norm=2.0))
    assert torch.equal(aux, heat_map(lambda x: alone(x), (x, y), norm=2.0))


# ------------------------------------------------------------------------------------------------------------ low-pass


@pytest.mark.parametrize(("h", "w"), SIZES)
def test_low_pass_keeps_its_band(h, w):
    x = torch.rand(2, 3, h, w, dtype=torch.float64)
    spectrum = np.fft.fftshift(np.fft.fft2(x.numpy()), axes=(2, 3))
    for band in range(1, max(h, w) + 1):
        kept = np.zeros_like(spectrum)
        rows, columns = (slice(s // 2 - min(band, s) // 2, s // 2 - min(band, s) // 2 + min(band, s)) for s in (h, w))
        kept[..., rows, columns] = spectrum[..., rows, columns]
        expected = np.fft.ifft2(np.fft.ifftshift(kept, axes=(2, 3))).real
        np.testing.assert_allclose(low_pass(x, band).numpy(), expected, atol=1e-12)
    assert torch.equal(low_pass(x, max(h, w)), x)  # the full size is the identity
    torch.testing.assert_close(low_pass(x, 1), x.mean((2, 3), keepdim=True).expand_as(x))  # 1 is the mean


def test_an_odd_band_is_a_projection():
    x = torch.rand(2, 1, 32, 32, dtype=torch.float64)
    for band in (3, 9, 31):
        once = low_pass(x, band)
        torch.testing.assert_close(low_pass(once, band), once)
        torch.testing.assert_close(low_pass(low_pass(x, band + 2 if band < 31 else 32), band), once)
        reach = (band - 1) // 2
        inside, outside = basis(reach, -reach, 32, 32), basis(0, reach + 1, 32, 32)
        torch.testing.assert_close(low_pass(inside[None, None], band)[0, 0], inside)
        assert low_pass(outside[None, None], band).abs().max() < 1e-12


def test_low_pass_clips_when_asked():
    x = (torch.rand(2, 1, 16, 16) > 0.5).float()
    assert low_pass(x, 9).max() > 1 and low_pass(x, 9).min() < 0
    assert torch.equal(low_pass(x, 9, clip=True), low_pass(x, 9).clamp(0, 1))
    bytes_ = (x * 255).byte()
    torch.testing.assert_close(low_pass(bytes_, 9), low_pass(x, 9))


def test_low_pass_keeps_the_frequency_from_its_band_on():
    wave = basis(0, 3, 12, 12).float()[None, None]
    kept = [(low_pass(wave, band) * wave).sum().item() for band in range(1, 13)]
    assert kept[:5] == pytest.approx([0] * 5, abs=1e-6)
    assert kept[5] == pytest.approx(0.5)  # a band of 6 has -3 only
    assert kept[6:] == pytest.approx([1] * 6)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: heat_map(lambda x: x, (torch.zeros(1, 1, 4, 4), torch.zeros(1)), norm=0.0), "positive, but norm=0"),
        (lambda: heat_map(lambda x: x, (torch.zeros(1, 4, 4), torch.zeros(1))), r"\[1, 4, 4\]"),
        (lambda: heat_map(lambda x: x, (torch.zeros(2, 1, 4, 4), torch.zeros(1))), r"\[1\] were given"),
        (lambda: low_pass(torch.zeros(1, 1, 4, 4), 0), "bands 1 to 4"),
        (lambda: low_pass(torch.zeros(1, 1, 4, 6), 7), "bands 1 to 6"),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence(call, sentence):
    with pytest.raises(LabError, match=sentence):
        call()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_finds_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 5)).cuda()
    x, y = torch.rand(20, 3, 8, 8), torch.randint(5, (20,))
    found = heat_map(model, (x, y), norm=1e-6)  # so weak that signs do not matter
    clean = (model(x.cuda()).argmax(1).cpu() != y).float().mean()
    torch.testing.assert_close(found, torch.full((8, 8), clean.item()))
    torch.testing.assert_close(low_pass(x.cuda(), 5).cpu(), low_pass(x, 5))
