"""What samples are worth: values against closed forms, loops and torchmetrics; features, caches and statistics."""

import math
import socket
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import normlab
from normlab import lab
from normlab.lab import Data, Images, LabError, Settings, Watcher, build
from normlab.lab.analysis import capv
from normlab.lab.images import features as features_module
from normlab.lab.images.features import Features, classifier, features, inception, trained_classifier
from normlab.lab.images.quality import (
    IntraFid,
    Moments,
    Neighbours,
    Quality,
    fid,
    frechet,
    inception_score,
    intra_fid,
    moments,
    prdc,
    published_fid,
    published_inception_score,
)
from normlab.lab.images.statistics import STATISTICS, KeptStatistics, statistics_of, with_statistics
from normlab.lab.report import depth
from normlab.lab.report.depth import capv_by_depth, shared_by_depth
from normlab.lab.tasks import Batch, Source


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_moments(mean, cov, n=200, seed=0):
    """Features ``[n, d]`` whose mean and covariance are exactly these."""
    x = normal(n, len(mean), seed=seed)
    x = x - x.mean(0)
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(torch.cov(x.T)), x.T, upper=False).T
    return whitened @ torch.linalg.cholesky(cov).T + mean


# The functions


def test_fid_of_gaussians_is_the_closed_form():
    a, b = torch.tensor([4.0, 1.0, 0.25]).double(), torch.tensor([1.0, 9.0, 0.25]).double()
    m, n = torch.tensor([0.0, 1.0, 2.0]).double(), torch.tensor([3.0, 1.0, -2.0]).double()
    expected = 9 + 16 + (2 - 1) ** 2 + (1 - 3) ** 2
    real, fake = with_moments(m, a.diag()), with_moments(n, b.diag(), n=150, seed=1)
    assert fid(real, fake) == pytest.approx(expected, rel=1e-12)
    # Covariances that do not commute: the root of a 2 x 2 matrix has trace sqrt(tr + 2 sqrt(det)).
    s, t = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double(), torch.tensor([[1.0, -0.8], [-0.8, 3.0]]).double()
    product = s @ t
    root = math.sqrt(product.trace() + 2 * math.sqrt(torch.linalg.det(product)))
    expected = 4 + (s.trace() + t.trace()).item() - 2 * root
    zero, one = torch.zeros(2).double(), torch.tensor([0.0, 2.0]).double()
    assert frechet(Moments(zero, s, 9), Moments(one, t, 9)) == pytest.approx(expected, rel=1e-12)
    assert fid(with_moments(zero, s), with_moments(one, t, seed=3)) == pytest.approx(expected, rel=1e-12)


def test_fid_of_fewer_images_than_features_is_exact():
    """Of shifted copies only the shift is left. Eigenvalues that are noise about zero would leave more."""
    x = 100 * normal(40, 200)
    assert fid(x, x) < 1e-8 * x.square().sum(1).mean().item()
    shift = normal(200, seed=1)
    assert fid(x, x + shift) == pytest.approx(shift.square().sum().item(), rel=1e-6)
    assert fid(x.float() + 1e3, x.float() + 1e3) < 1e-3
    # The trace of the root is also the sum of the singular values of the products of all pairs of images.
    y = normal(300, 200, seed=2)
    a, b = x - x.mean(0), y - y.mean(0)
    root = torch.linalg.svdvals(a @ b.T).sum() / math.sqrt(39 * 299)
    rest = (x.mean(0) - y.mean(0)).square().sum() + a.square().sum() / 39 + b.square().sum() / 299
    assert fid(x, y) == pytest.approx((rest - 2 * root).item(), rel=1e-11)


def test_fid_does_not_depend_on_the_size_of_blocks(monkeypatch):
    from normlab.lab.images import quality

    real, fake = normal(300, 20) + 1e4, 1.5 * normal(211, 20, seed=1) + 1e4
    whole, near = fid(real, fake), prdc(real, fake, 3)
    expected = moments(real)
    torch.testing.assert_close(expected.mean, real.mean(0))
    torch.testing.assert_close(expected.cov, torch.cov(real.T))
    monkeypatch.setattr(quality, "_ROWS", 7)
    assert fid(real, fake) == pytest.approx(whole, rel=1e-10)
    assert prdc(real, fake, 3) == near


@pytest.mark.parametrize("count", [400, 60], ids=["full rank", "fewer images than features"])
def test_fid_and_is_are_those_of_torchmetrics(count):
    """Ours, ours through torchmetrics' sums, and torchmetrics fed with the features."""
    from torchmetrics.image.fid import FrechetInceptionDistance

    real, fake = normal(count, 80), 1.2 * normal(count + 50, 80, seed=1) @ (torch.eye(80) + 0.1).double() + 0.3

    class Given(nn.Module):
        num_features = 80

        def forward(self, x):
            return x

    oracle = FrechetInceptionDistance(feature=Given()).set_dtype(torch.float64)
    oracle.update(real, real=True)
    oracle.update(fake, real=False)
    expected = float(oracle.compute())
    assert fid(real, fake) == pytest.approx(expected, rel=1e-6)
    assert published_fid(moments(real), moments(fake)) == pytest.approx(expected, rel=1e-9)


def test_the_inception_score_by_hand_and_by_torchmetrics():
    logits = 2 * normal(100, 5)
    p = logits.softmax(1)
    scores = []
    for part in p.split(20):
        q = part.mean(0)
        kl = [sum(float(v) * math.log(float(v) / float(w)) for v, w in zip(row, q, strict=True)) for row in part]
        scores.append(math.exp(sum(kl) / len(kl)))
    mean = sum(scores) / 5
    deviation = math.sqrt(sum((s - mean) ** 2 for s in scores) / 5)
    assert inception_score(p, 5) == pytest.approx((mean, deviation), rel=1e-12)
    assert inception_score(torch.eye(4), 1) == (pytest.approx(4), 0)  # zeros are no NaN
    assert inception_score(torch.full((30, 8), 0.125), 3) == (pytest.approx(1), pytest.approx(0, abs=1e-12))
    # In one part the order of the images, which torchmetrics draws, does not matter.
    before = torch.get_rng_state()
    assert published_inception_score(logits, 1)[0] == pytest.approx(inception_score(p, 1)[0], rel=1e-12)
    assert published_inception_score(logits, 5) == published_inception_score(logits, 5)
    assert torch.equal(torch.get_rng_state(), before)


def brute_force(real, fake, k):
    def radius(i, x):
        return sorted(math.dist(x[i], x[j]) for j in range(len(x)) if j != i)[k - 1]

    real, fake = real.tolist(), fake.tolist()
    of_real = [radius(i, real) for i in range(len(real))]
    of_fake = [radius(j, fake) for j in range(len(fake))]
    inside = [[math.dist(r, f) <= of_real[i] for f in fake] for i, r in enumerate(real)]
    precision = sum(any(row[j] for row in inside) for j in range(len(fake))) / len(fake)
    recall = sum(any(math.dist(r, f) <= of_fake[j] for j, f in enumerate(fake)) for r in real) / len(real)
    density = sum(map(sum, inside)) / (k * len(fake))
    coverage = sum(map(any, inside)) / len(real)
    return Neighbours(precision, recall, density, coverage)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_neighbours_against_loops(k):
    real, fake = normal(60, 4) + 50, 0.7 * normal(43, 4, seed=1) + 50.8
    found = prdc(real, fake, k)
    assert found == pytest.approx(brute_force(real, fake, k), rel=1e-12)
    assert len({*found, 0.0, 1.0}) == 6, "an easy case: each number is of its own"
    swapped = prdc(fake, real, k)
    assert (swapped.precision, swapped.recall) == (found.recall, found.precision)


def test_neighbours_of_copies_and_of_far_samples():
    x = normal(50, 3)
    assert prdc(x, x, 4) == pytest.approx((1, 1, 5 / 4, 1))  # each ball has its center and four neighbours
    assert prdc(x, x + 100, 4) == Neighbours(0, 0, 0, 0)
    one = x[:1].expand(50, -1)  # a generator that knows one image: precise, and covers what is about it
    found = prdc(x, one, 4)
    assert found.precision == 1
    assert found == pytest.approx(brute_force(x, one, 4))


def test_intra_class_fid_is_the_mean_of_the_classes():
    eye = torch.eye(2).double()
    real = {c: with_moments(torch.tensor([float(c), 0.0]).double(), eye, seed=c) for c in range(3)}
    fake = {c: with_moments(torch.tensor([3.0 * c, 0.0]).double(), eye, seed=9 + c) for c in (2, 1)}
    found = intra_fid(real, fake)
    assert isinstance(found, IntraFid) and list(found.classes) == [1, 2]
    assert [*found.classes.values(), found.mean] == pytest.approx([4.0, 16.0, 10.0])
    assert intra_fid({c: moments(t) for c, t in real.items()}, fake) == found
    with pytest.raises(LabError, match=r"of class 7, and there are no real ones of it; .* of class 0, 1, 2"):
        intra_fid(real, {7: fake[1]})
    with pytest.raises(LabError, match="at least one class"):
        intra_fid(real, {})
    with pytest.raises(LabError, match="generated images of class 1 are 1; expected at least 2"):
        intra_fid(real, {1: fake[1][:1]})


def test_what_cannot_be_judged_is_told():
    x, lost = normal(20, 3), normal(20, 3)
    lost[3, 1], lost[4, 0] = math.nan, math.inf
    with pytest.raises(LabError, match="features of 2 of 20 of the generated images are no finite numbers"):
        fid(x, lost)
    with pytest.raises(LabError, match="features of 2 of 20 of the real images are no finite"):
        prdc(lost, x)
    with pytest.raises(LabError, match="same dimension; got 3 and 4"):
        fid(x, normal(20, 4))
    with pytest.raises(LabError, match="same dimension; got 3 and 4"):
        prdc(x, normal(20, 4))
    with pytest.raises(LabError, match="real images are 1; expected at least 2"):
        fid(x[:1], x)
    with pytest.raises(LabError, match=r"features \[N, d\], floating-point numbers; got torch.int64 \[20, 3\]"):
        fid(x.long(), x)
    with pytest.raises(LabError, match="k = 20 nearest neighbours need more than 20 images of each kind; got 20 real"):
        prdc(x, normal(30, 3), 20)
    with pytest.raises(LabError, match="10 parts of 9 images"):
        inception_score(torch.full((9, 2), 0.5))
    with pytest.raises(LabError, match=r"takes probabilities; got rows with values from -2 .* softmax"):
        inception_score(torch.tensor([[3.0, -2.0]]), 1)


# Features


def tiny_data(n=60, side=8, channels=1, name="tiny"):
    g = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    x = (torch.rand(n, channels, side, side, generator=g) * 80 + 60 * y.view(-1, 1, 1, 1)).to(torch.uint8)
    half = n // 2
    return Data(name, Images(x[:half], y[:half]), Images(x[half:], y[half:]), ("a", "b", "c"), (0.4,), (0.25,))


class Bare(Source):
    name = "bare"

    def number(self, part):
        return 40

    def rows(self, part, index, device):
        return Batch(x=(torch.arange(64).view(1, 1, 8, 8) + index.view(-1, 1, 1, 1)).to(torch.uint8))


class Rows(nn.Module):
    """The mean of each row of pixels, and three logits. Counts the images that it sees."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 24).reshape(3, 8))
        self.seen = 0

    def forward(self, x):
        self.seen += len(x)
        rows = x.mean((1, 3))
        return rows, rows @ self.weight.T


def rows(**kw):
    return Features("rows", Rows(), 8, channels=1, **kw)


@pytest.mark.parametrize("name", ["small", "resnet20", "vgg8", "mlp", "torchvision:resnet18"])
def test_features_of_a_classifier_are_what_its_last_layer_reads(name):
    data = tiny_data(side=32, channels=3)
    model = build(name, data, "batch", seed=0)
    found = classifier(model, name, channels=3, classes=3)
    x = torch.rand(4, 3, 32, 32)
    model.train()
    z, logits = found(x)
    assert model.training, "it is left as it was"
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(logits, model(x))
        torch.testing.assert_close(z @ found.model.head[0].weight.T + found.model.head[0].bias, logits)  # type: ignore
    assert z.shape == (4, found.dimension)
    with pytest.raises(LabError, match="images of 3 channels; got 1: it was trained on other data"):
        found(x[:, :1])
    with pytest.raises(LabError, match=r"pixels in \[0, 1\], floats .* got torch.uint8"):
        found((x * 255).byte())


def test_a_network_without_a_last_layer_has_no_features():
    with pytest.raises(LabError, match="bare has no linear layer with 10 outputs"):
        classifier(nn.Sequential(nn.Conv2d(3, 10, 1)), "bare", channels=3, classes=10)

    class Unordered(nn.Module):
        """Its last layer is not the last that is defined."""

        def __init__(self):
            super().__init__()
            self.head, self.body = nn.Linear(5, 3), nn.Linear(4, 5)

        def forward(self, x):
            return self.head(self.body(x.flatten(1)).relu())

    model = Unordered()
    x = torch.rand(2, 1, 2, 2)
    assert torch.equal(classifier(model, "own", channels=1, classes=3)(x)[0], model.body(x.flatten(1)).relu().detach())

    class Twice(nn.Linear):
        def forward(self, input):
            return super().forward(super().forward(input))

    net = nn.Sequential(nn.Flatten(), twice := Twice(4, 4))
    twice.register_forward_hook(lambda m, a, out: m.forward(out))
    model = nn.Sequential(net, nn.Flatten())
    model.add_module("again", net[1])
    with pytest.raises(LabError, match="ran 2 times"):
        classifier(model, "twice", channels=1, classes=4)(torch.rand(2, 1, 2, 2))


def test_features_of_a_run_by_its_folder(tmp_path):
    data = tiny_data(name="digits")
    settings = Settings(data="digits", model="mlp", depth=2, width=5, epochs=1, seed=3, norm="layer")
    model = build(settings.model, data, settings.norm, seed=3, **settings.model_options())
    lab.fit(model, data, settings, folder=tmp_path)
    for where in (tmp_path, tmp_path / "best.safetensors"):
        found = features(str(where), data)
        assert (found.name, found.dimension, found.published) == ("mlpw5-layer-digits-seed3", 5, False)
        x = torch.rand(3, 1, 8, 8)
        with torch.no_grad():
            torch.testing.assert_close(found(x)[1], model(x))
    assert found.title("FID") == "FID on mlpw5-layer-digits-seed3 features"


def test_features_by_name_with_weights(tmp_path):
    from safetensors.torch import save_file

    data = tiny_data(side=32, channels=3)
    net = build("resnet20", data, "batch", seed=5)
    save_file(net[1].state_dict(), tmp_path / "mine.safetensors")
    found = features(f"resnet20(weights={tmp_path / 'mine.safetensors'}, standardize=none)", data)
    plain = build("resnet20", data, "batch", seed=5, standardize="none").eval()
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(found(x)[1], plain(x))
    assert (found.name, found.dimension) == ("mine", 64)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("classifer", "no features 'classifer': expected inception, classifier"),
        ("classifier(depth=3)", "has an argument 'depth'; expected seed"),
        ("classifier(first)", "whole number; got 'first'"),
        ("inception(weights=nowhere.pth)", "not in nowhere.pth; name the file, .* features = classifier"),
        ("resnet20(weights=nowhere.pth)", "no file of weights nowhere.pth"),
    ],
)
def test_names_that_are_no_features(text, match):
    with pytest.raises(LabError, match=match):
        features(text, tiny_data(side=32, channels=3))


def test_a_classifier_is_trained_once_and_kept(tmp_path, monkeypatch):
    told = []

    class Tells(Watcher):
        def note(self, sentence):
            told.append(sentence)

    data = tiny_data()
    quick = Settings(model="vgg8", width=2, data="tiny", epochs=2, batch_size=10)
    monkeypatch.setattr(features_module, "_settings", lambda data, seed: quick.with_(seed=seed))
    first = features("classifier", data, cache=tmp_path, watch=Tells())
    assert (first.name, first.dimension) == ("vgg8w2-tiny-seed0", 16)
    assert len(told) == 1 and "Training the classifier vgg8w2-tiny-seed0" in told[0] and "2 epochs of 30" in told[0]
    again = features("classifier", data, cache=tmp_path, watch=Tells())
    assert again.digest == first.digest and len(told) == 1
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            anew = trained_classifier(data, watch=Tells())
        assert anew.digest == first.digest, "without a folder the same, trained anew"
    assert len(told) == 3
    assert features("classifier(1)", data, cache=tmp_path).digest != first.digest
    (own,) = tmp_path.glob("*seed0*")
    assert features(str(own), data).digest == first.digest, "a run as any other"
    monkeypatch.chdir(own.parent)
    own.rename("classifier")
    assert features("./classifier", data).digest == first.digest
    assert features("classifier(1)", data, cache=tmp_path).name.endswith("seed1")
    changed = replace(data, train=Images(255 - data.train.x, data.train.y))
    assert features("classifier(1)", changed, cache=tmp_path).digest != features("classifier(1)", data).digest
    assert len(list(tmp_path.glob("*seed1*"))) == 2, "other images of the same name"
    with pytest.raises(LabError, match=r"labelled images; got Bare\. Name the folder of a run"):
        features("classifier", Bare())
    with pytest.raises(LabError, match=r"bare does not say its channels, which the network resnet20 is built for"):
        features("resnet20(weights=x)", Bare())


def test_fixed_settings_of_the_classifier():
    small = features_module._settings(tiny_data(), 4)
    assert (small.model, small.width, small.seed, small.train_size, small.size) == ("vgg8", 8, 4, 30, 8)
    y = torch.zeros(20_000, dtype=torch.int64)
    many = Images(torch.zeros(20_000, 3, 1, 1, dtype=torch.uint8), y)
    large = replace(tiny_data(channels=3, side=1), train=many)
    assert features_module._settings(large, 0).model == "resnet20"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A file with the names and shapes of the published weights, and random values."""
    from torch_fidelity import feature_extractor_inceptionv3 as theirs

    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        torch.manual_seed(0)
        patch.setattr(theirs, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(theirs.FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        network = theirs.FeatureExtractorInceptionV3("inception-v3-compat", ["2048", "logits_unbiased"])
        for module in network.modules():  # torch's own start would let nothing of the image through
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    path = tmp_path_factory.mktemp("inception") / "stand-in.pth"
    torch.save(network.state_dict(), path)
    return path, network


def test_inception_computes_what_torch_fidelity_computes(stand_in, tmp_path):
    path, network = stand_in
    found = features(f"inception({path})", tiny_data())
    assert (found.name, found.published, found.dimension) == ("Inception with stand-in.pth", False, 2048)
    images = torch.randint(256, (2, 3, 9, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        z, logits = network(images)
    assert (z[0] - z[1]).abs().mean() > 0.01
    for x in (images / 255, images / 255 - 1e-3, images / 255 + 1e-3):  # to the nearest byte
        mine = found(x)
        torch.testing.assert_close(mine[0], z)
        torch.testing.assert_close(mine[1], logits)
    grey = images[:, :1]
    torch.testing.assert_close(found(grey / 255)[0], found(grey.expand(-1, 3, -1, -1) / 255)[0])


def test_only_the_published_weights_are_named_so(stand_in, monkeypatch):
    path, _ = stand_in
    monkeypatch.setattr(features_module, "_SHA256", features_module.sha256(path.read_bytes()).hexdigest())
    found = inception(path)
    assert found.published and found.title("FID") == "FID" and found.name == "Inception"


def test_weights_of_something_else_are_told(tmp_path, monkeypatch):
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(LabError, match=r"text\.pth cannot be read as weights of the Inception network"):
        inception(tmp_path / "text.pth")
    torch.save({"fc.weight": torch.zeros(2)}, tmp_path / "other.pth")
    with pytest.raises(LabError, match=r"other\.pth has no weights of the Inception network of torch-fidelity"):
        inception(tmp_path / "other.pth")
    torch.save(nn.Linear(2, 2), tmp_path / "code.pth")  # unpickling would run what it names
    with pytest.raises(LabError, match=r"code\.pth cannot be read"):
        inception(tmp_path / "code.pth")

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", offline)
    monkeypatch.setattr(socket, "getaddrinfo", offline)
    with pytest.raises(LabError, match=r"not in .*6726825d\.pth; name the file"):
        inception()
    with pytest.raises(LabError, match=r"could not be downloaded .*no network.*; bring https://github"):
        inception(download=True)
    assert not list((tmp_path / "hub").rglob("*.pth"))


def test_without_torchmetrics_everything_else_works(monkeypatch):
    code = (
        "import sys; sys.modules['torchmetrics'] = sys.modules['torch_fidelity'] = None\n"
        "import torch\n"
        "from normlab.lab import LabError\n"
        "from normlab.lab.images import features, quality, statistics\n"
        "assert quality.fid(torch.eye(3), torch.eye(3) + 1) > 2.9\n"
        "try: quality.published_fid(quality.moments(torch.eye(3)), quality.moments(torch.eye(3)))\n"
        "except LabError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "computed by the package torchmetrics; pip install torchmetrics" in done.stdout


# A sampler's images


def replay(data, noise=0.0):
    """A sampler that returns the next training image of each label."""
    images = {c: data.train.x[data.train.y == c].float() / 255 for c in range(3)}
    at = dict.fromkeys(images, 0)

    def sample(labels, generator):
        found = []
        for c in labels.tolist():
            found.append(images[c][at[c] % len(images[c])])
            at[c] += 1
        x = torch.stack(found)
        return (x + noise * torch.randn(x.shape, generator=generator)).clamp(0, 1) if noise else x

    return sample


def test_the_worth_of_the_training_images_themselves():
    data = tiny_data()
    quality = Quality(rows(), data, k=3, splits=2)
    found = quality.of(replay(data), 30)
    assert found["fid"] == pytest.approx(0, abs=1e-9) and found["intra_fid"] == pytest.approx(0, abs=1e-9)
    assert (found["precision"], found["recall"], found["coverage"]) == (1, 1, 1)
    assert found["density"] == pytest.approx(4 / 3)
    assert set(found) == {*quality.metrics, "is_deviation"}
    held_out = Quality(rows(), data, "test", k=3, splits=2).of(replay(data), 30)
    assert held_out["fid"] > 1e-4


def test_numbers_are_those_of_the_functions_on_what_the_sampler_gave():
    data, f = tiny_data(), rows()
    made: list[Any] = []
    sampler = replay(data, noise=0.2)

    def spy(labels, generator):
        x = sampler(labels, generator)
        made.append((x, labels.clone()))
        return x

    found = Quality(f, data, k=3, splits=4, neighbours=100).of(spy, 240, seed=5)
    assert [len(y) for _, y in made] == [100, 100, 40]
    x, y = (torch.cat(t) for t in zip(*made, strict=True))
    assert y.bincount().tolist() == [80, 80, 80] and not torch.equal(y, torch.arange(240) % 3)
    z, logits = f((x * 255).round() / 255)
    real = f(data.train.x.float() / 255)[0]
    assert found["fid"] == fid(real, z)
    assert (found["is"], found["is_deviation"]) == inception_score(logits.double().softmax(1), 4)
    assert prdc(real, z[:100], 3) == tuple(found[n] for n in ("precision", "recall", "density", "coverage"))
    own = intra_fid({c: real[data.train.y == c] for c in range(3)}, {c: z[y == c] for c in range(3)})
    assert (found["intra_fid"], found.classes) == own
    again = Quality(f, data, k=3, splits=4, neighbours=100).of(replay(data, noise=0.2), 240, seed=5)
    assert again == found
    assert Quality(f, data, k=3).of(replay(data, noise=0.2), 240, seed=6)["fid"] != found["fid"]


def test_scores_through_torchmetrics_where_the_features_are_inceptions(monkeypatch):
    from normlab.lab.images import quality as module

    data = tiny_data()
    plain = Quality(rows(), data, k=3, splits=1).of(replay(data, noise=0.1), 60)
    called = []
    for name in ("published_fid", "published_inception_score"):
        theirs = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, name=name, theirs=theirs: called.append(name) or theirs(*a))

    def colours(f):  # the images are grey, and Inception sees three equal channels
        return Features(f.name, f.model, 8, channels=3, by_torchmetrics=True, published=True)

    found = Quality(colours(rows()), data, k=3, splits=1).of(replay(data, noise=0.1), 60)
    assert called == ["published_fid", "published_inception_score"]
    for name in ("fid", "is", "precision", "coverage", "intra_fid"):
        assert found[name] == pytest.approx(plain[name], rel=1e-6), name


def test_titles_and_notes_say_what_numbers_are_of():
    data = tiny_data()
    quality = Quality(rows(), data, k=3)
    metrics = quality.metrics
    assert metrics["fid"] == ("", False, "FID on rows features")
    assert metrics["intra_fid"].title == "intra-class FID on rows features"
    assert [m.higher for m in metrics.values()] == [False, True, True, True, True, True, False]
    assert Quality(rows(published=True), data).metrics["fid"].title == "FID"
    notes = quality.notes(30, 3)
    assert "nothing with published scores" in notes[0] and len(quality.notes(300, 3)) == 1
    assert Quality(rows(published=True), data).notes(300, 3) == []
    few = quality.of(replay(data), 6)
    said = " ".join(few.notes)
    assert "FID of 6 generated images with 8 features is too large" in said
    assert "Intra-class FID of 2 generated images a class with 8 features" in said
    assert "no IS of 6 images in 10 parts" in said
    assert math.isnan(few["is"]) and few["fid"] >= 0 and len(few.classes) == 3
    one = Quality(rows(), data, k=30).of(replay(data), 4)
    assert math.isnan(one["precision"]) and math.isnan(one["intra_fid"])
    assert "no precision or recall of 4 images with k = 30" in " ".join(one.notes)
    assert quality.about["features"] == "rows" and quality.about["part"] == "train" and quality.about["real"] == 30


def test_a_sampler_that_is_wrong_is_told():
    data = tiny_data()
    quality = Quality(rows(), data)
    with pytest.raises(LabError, match=r"images in \[0, 1\]; got values from -1 to 1; of tanh it is \(x \+ 1\) / 2"):
        quality.of(lambda y, g: torch.linspace(-1, 1, 64).view(1, 1, 8, 8).expand(len(y), 1, 8, 8), 30)
    with pytest.raises(LabError, match=r"floats \[30, C, H, W\] for 30 labels; got torch.float32 \[1, 1, 8, 8\]"):
        quality.of(lambda y, g: torch.zeros(1, 1, 8, 8), 30)
    with pytest.raises(LabError, match="got NoneType"):
        quality.of(lambda y, g: None, 30)  # type: ignore
    with pytest.raises(LabError, match="at least 2 images, of at least one class; got 1 of 3"):
        quality.of(replay(data), 1)
    with pytest.raises(LabError, match="balanced or uniform; got 'random'"):
        quality.of(replay(data), 30, labels="random")
    with pytest.raises(LabError, match="of class 3, and there are no real ones"):
        quality.of(lambda y, g: torch.rand(len(y), 1, 8, 8), 40, classes=4)
    drawn = []
    quality.of(lambda y, g: drawn.append(y) or torch.rand(len(y), 1, 8, 8), 90, labels="uniform")
    counts = torch.cat(drawn).bincount()
    assert counts.sum() == 90 and counts.tolist() != [30, 30, 30]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sampler_that_diverged_has_no_numbers(value):
    def diverged(y, g):
        return torch.full((len(y), 1, 8, 8), 0.5).index_fill(0, torch.tensor([3]), value)

    found = Quality(rows(), tiny_data()).of(diverged, 30)
    assert all(math.isnan(v) for v in found.values()) and len(found) == 8
    assert "diverged" in found.notes[-1]


def test_features_of_real_images_are_kept(tmp_path):
    data = tiny_data()
    f = rows()
    first = Quality(f, data, cache=tmp_path).of(replay(data, 0.1), 60)
    assert f.model.seen == 30 + 60
    (path,) = tmp_path.glob("*.safetensors")
    again = Quality(f, data, cache=tmp_path)
    assert again.of(replay(data, 0.1), 60) == first and f.model.seen == 30 + 60 + 60
    again.of(replay(data, 0.1), 60)
    assert f.model.seen == 30 + 60 + 60 + 60, "asked twice, they are read once"
    # Damaged, they are computed again and replaced.
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert Quality(f, data, cache=tmp_path).of(replay(data, 0.1), 60) == first
    assert path.read_bytes() == whole
    # Another part, other weights and other images are other files.
    Quality(f, data, "test", cache=tmp_path).of(replay(data), 30)
    other = rows()
    with torch.no_grad():
        other.model.weight.add_(1)  # type: ignore[operator]
    Quality(Features("rows", other.model, 8, channels=1), data, cache=tmp_path).of(replay(data), 30)
    changed = replace(data, train=Images(255 - data.train.x, data.train.y))
    assert Quality(f, changed, cache=tmp_path).of(replay(data, 0.1), 60)["fid"] > first["fid"]
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_numbers_of_the_gpu_are_those_of_the_cpu():
    data = tiny_data()
    changed = replay(data)

    def darker(labels, generator):
        return (changed(labels, generator) * 0.9).to(labels.device)

    numbers = []
    for device in ("cpu", "cuda"):
        changed = replay(data)  # all images once, in whatever order the device draws the labels
        numbers.append(Quality(rows(), data, device=device, k=3, splits=1).of(darker, 30))
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-4)
    assert numbers[1].classes == pytest.approx(numbers[0].classes, rel=1e-4)


def test_data_without_labels_have_no_fid_within_classes():
    seen = []
    quality = Quality(rows(), Bare(), k=3, splits=2)
    found = quality.of(lambda y, g: seen.append(y) or torch.rand(len(y), 1, 8, 8, generator=g), 40)
    assert math.isnan(found["intra_fid"]) and found["fid"] > 0 and seen[0].unique().tolist() == [0]


# Statistics


class Generator(nn.Module):
    def __init__(self, norm: Any = normlab.ConditionalBatchNorm2d):
        super().__init__()
        self.linear = nn.Linear(4, 3 * 4)
        self.norm = norm(3, 2)
        self.last = nn.BatchNorm2d(3)

    def forward(self, z, y):
        x = self.norm(self.linear(z).view(-1, 3, 2, 2), y)
        return self.last(x)


def arguments(seed, n=50):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g), torch.randint(2, (n,), generator=g)


def test_standing_live_and_averaged_statistics_by_values():
    torch.manual_seed(0)
    network, live = Generator().eval(), Generator().eval()
    for _, buffer in (*network.named_buffers(), *live.named_buffers()):
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    kept = KeptStatistics(network)
    kept.keep(live)
    z, y = arguments(9)
    outputs = {}
    for how in STATISTICS:
        with with_statistics(network, how, live=kept, batches=[arguments(i) for i in range(4)]) as given:
            assert given is network and not network.training
            outputs[how] = network(z, y).detach()
            inside = {k: v.clone() for k, v in statistics_of(network).items()}
        assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items()), f"restored after {how}"
        if how == "live":
            assert all(torch.equal(v, inside[k]) for k, v in statistics_of(live).items())
        if how == "averaged":
            assert torch.equal(outputs[how], network(z, y).detach())
        if how == "standing":  # those of the samples, by the formula
            zs, _ = (torch.cat(t) for t in zip(*(arguments(i) for i in range(4)), strict=True))
            h = network.linear(zs).view(-1, 3, 2, 2).transpose(0, 1).flatten(1)
            torch.testing.assert_close(inside["norm.running_mean"], h.mean(1))
            torch.testing.assert_close(inside["norm.running_var"], h.var(1))
    assert len({round(t.double().sum().item(), 6) for t in outputs.values()}) == 3
    with with_statistics(network, "live", live=live):
        assert torch.equal(network(z, y).detach(), outputs["live"])


def test_kept_statistics_are_in_the_checkpoint():
    network = Generator()
    model = nn.ModuleDict({"generator": network, "kept": KeptStatistics(network)})
    network.train()
    network(*arguments(0))
    model["kept"].keep(network)  # type: ignore[operator]
    state = model.state_dict()
    fresh = nn.ModuleDict({"generator": (other := Generator()), "kept": (kept := KeptStatistics(other))})
    fresh.load_state_dict(state)
    for name, value in kept.values().items():
        assert torch.equal(value, statistics_of(network)[name]), name
    assert set(statistics_of(network)) == {
        f"{layer}.{b}" for layer in ("norm", "last") for b in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_statistics_that_are_not_there_are_told_and_an_error_inside_restores():
    network = Generator()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    with (
        pytest.raises(LabError, match=r"no statistics 'lives' .* did you mean 'live'"),
        with_statistics(network, "lives"),
    ):
        pass
    with pytest.raises(LabError, match=r"'live'.* needs live="), with_statistics(network, "live"):
        pass
    with pytest.raises(LabError, match=r"'standing'.* needs batches="), with_statistics(network, "standing"):
        pass
    wrong = nn.Sequential(nn.BatchNorm2d(3))
    with (
        pytest.raises(LabError, match="of another network than Generator"),
        with_statistics(network, "live", live=wrong),
    ):
        pass
    with pytest.raises(RuntimeError, match="stop"), with_statistics(network, "standing", batches=[arguments(0)]):
        raise RuntimeError("stop")
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    plain = nn.Sequential(nn.Linear(2, 2))
    with with_statistics(plain, "standing", batches=[(torch.ones(1, 2),)]):
        assert not statistics_of(plain)


# Figures over depth


def test_figures_over_depth_show_every_layer_and_model(monkeypatch):
    def rows_of(make):
        net = nn.Sequential(make(4, 3, init_std=0.2), nn.BatchNorm2d(4), make(4, 3, init_std=0.2), make(4, 3))
        return capv(net)

    found = {
        "CCBN": rows_of(normlab.ConditionalBatchNorm2d),
        "SaBN": rows_of(normlab.SandwichBatchNorm2d),
        "AuxBN": capv(normlab.AuxiliaryBatchNorm2d(4)),
    }
    drawn = capv_by_depth(found)
    for text in ("CCBN", "SaBN", "SaBN, own", "AuxBN", "dashed: without the shared scale"):
        assert f">{text}<" in drawn or text in drawn, text
    assert "CCBN, own" not in drawn
    ticks = [t for t in "1234" if f">{t}</text>" in drawn]
    assert ticks == ["1", "3", "4"], "the second layer has no classes"
    shared = shared_by_depth(found)
    assert ">SaBN<" in shared and "CCBN" not in shared
    series: dict[str, Any] = {}
    monkeypatch.setattr(depth, "lines", lambda found, *_, **__: series.update((x.label, x) for x in found) or "")
    capv_by_depth(found)
    values = {label: [c.mean for c in line.cells] for label, line in series.items()}
    assert values["SaBN"] == [r.effective for r in found["SaBN"]] and series["SaBN"].x == [1, 3, 4]
    assert values["SaBN, own"] == [r.independent for r in found["SaBN"]] != values["SaBN"]
    assert series["SaBN, own"].look == series["SaBN"].look._replace(dash=1)
    shared_by_depth(found)
    assert [c.mean for c in series["SaBN"].cells] == [r.shared for r in found["SaBN"]]
    with pytest.raises(LabError, match="CCBN: no layer has a shared scale"):
        shared_by_depth({"CCBN": found["CCBN"]})
    with pytest.raises(LabError, match="plain: no layer has a scale for each of several classes"):
        capv_by_depth({"plain": capv(nn.BatchNorm2d(2)), **found})
