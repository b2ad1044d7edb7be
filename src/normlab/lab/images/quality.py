"""What generated images are worth, from features of real and of generated ones: FID, IS, precision, recall, coverage.

The functions take features ``[N, d]`` or probabilities ``[N, K]`` of any device and return floats. They compute in
float64, on the CPU where a device has none. :class:`Quality` asks a sampler for images and calls them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...engine.numerics import widest
from ..errors import LabError
from ..seeds import generator
from ..store import load_checkpoint, save_checkpoint
from ..tasks import Metric, Source, pixels
from .features import Features, content, torchmetrics

__all__ = [
    "IntraFid", "Moments", "Neighbours", "Quality", "Worth", "fid", "frechet", "inception_score", "intra_fid",
    "moments", "prdc", "published_fid", "published_inception_score",
]  # fmt: skip

_ROWS = 2048  # features that are compared or summed at once


class Moments(NamedTuple):
    """Mean and covariance of features, and of how many. The covariance is divided by one less, as in published FIDs."""

    mean: Tensor  # [d]
    cov: Tensor  # [d, d]
    number: int


def moments(features: Tensor, what: str = "the images") -> Moments:
    """Mean and covariance of features ``[N, d]``, in float64. ``what`` they are of is said in errors."""
    features = _checked(features, what, least=2)
    mean = sum((part.double().sum(0) for part in features.split(_ROWS)), start=_zero(features)) / len(features)
    cov = _zero(features)
    for part in features.split(_ROWS):
        centred = part.double() - mean
        cov = cov + centred.T @ centred
    return Moments(mean, cov / (len(features) - 1), len(features))


def frechet(a: Moments, b: Moments) -> float:
    """The Frechet distance of two Gaussians: ``|m - n|^2 + tr(S + T - 2 (S T)^(1/2))``.

    The trace of the root is the sum of the singular values of ``S^(1/2) T^(1/2)``. So no root is taken of the
    eigenvalues of a product, which of covariances without full rank are noise about zero.

    >>> eye = torch.eye(2, dtype=torch.float64)
    >>> round(frechet(Moments(torch.zeros(2).double(), eye, 9), Moments(torch.ones(2).double(), 4 * eye, 9)), 9)
    4.0
    """
    if a.mean.shape != b.mean.shape:
        raise LabError(f"features to compare have the same dimension; got {len(a.mean)} and {len(b.mean)}: they are of "
                       "different networks.")  # fmt: skip
    b = b._replace(mean=b.mean.to(a.mean), cov=b.cov.to(a.cov))
    apart = (a.mean - b.mean).square().sum() + a.cov.trace() + b.cov.trace()
    return max(0.0, (apart - 2 * torch.linalg.svdvals(_root(a.cov) @ _root(b.cov)).sum()).item())


def _root(cov: Tensor) -> Tensor:
    """The symmetric root of a covariance. Eigenvalues that rounding alone has made are zero."""
    values, vectors = torch.linalg.eigh(cov)
    values = torch.where(values > values[-1] * len(values) * torch.finfo(cov.dtype).eps, values, 0.0)
    return (vectors * values.sqrt()) @ vectors.T


def fid(real: Tensor, fake: Tensor) -> float:
    """The Frechet distance between features of real and of generated images, ``[N, d]`` and ``[M, d]``."""
    return frechet(moments(real, "the real images"), moments(fake, "the generated images"))


class IntraFid(NamedTuple):
    """FID within classes: the mean over classes, and each class' own."""

    mean: float
    classes: dict[int, float]


def intra_fid(real: Mapping[int, Tensor | Moments], fake: Mapping[int, Tensor]) -> IntraFid:
    """FID between the real and the generated images of each class, given as features by class.

    Real ones may be :func:`moments`, so that they need not be computed again.
    """
    if not fake:
        raise LabError("intra-class FID needs generated images of at least one class; got none.")
    if missing := sorted(k for k in fake if k not in real):
        raise LabError(f"images were generated of class {', '.join(map(str, missing))}, and there are no real ones of "
                       f"it; real images are of class {', '.join(map(str, sorted(real))) or 'none'}.")  # fmt: skip
    found = {}
    for k in sorted(fake):
        known = real[k]
        known = known if isinstance(known, Moments) else moments(known, f"the real images of class {k}")
        found[k] = frechet(known, moments(fake[k], f"the generated images of class {k}"))
    return IntraFid(math.fsum(found.values()) / len(found), found)


def inception_score(probabilities: Tensor, splits: int = 10) -> tuple[float, float]:
    """The inception score and its deviation: of ``splits`` parts, one after the other, the mean of
    ``exp(mean KL(p(y|x) || p(y)))``, where p(y) is the part's mean. The deviation is divided by the number of parts.

    >>> inception_score(torch.eye(4).repeat(5, 1), splits=5)  # sure of every image, and every class alike
    (4.0, 0.0)
    """
    p = _checked(probabilities, "the probabilities of the generated images", least=1)
    if not 1 <= splits <= len(p):
        raise LabError(f"the inception score takes the mean over {splits} parts of {len(p)} images; expected at least "
                       "one image for each part, and one part.")  # fmt: skip
    sums = p.sum(1)
    if not bool((p >= 0).all() and ((sums - 1).abs() < 1e-3).all()):
        raise LabError(f"the inception score takes probabilities; got rows with values from {p.min().item():.3g} and "
                       f"sums from {sums.min().item():.3g} to {sums.max().item():.3g}; softmax(1) makes them of logits."
                       )  # fmt: skip
    scores = []
    for k in range(splits):
        part = p[k * len(p) // splits : (k + 1) * len(p) // splits].double()
        part = part / part.sum(1, keepdim=True)
        q = part.mean(0, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        scores.append((torch.xlogy(part, part) - torch.xlogy(part, q)).sum(1).mean().exp())
    found = torch.stack(scores)
    return found.mean().item(), found.std(correction=0).item()


class Neighbours(NamedTuple):
    """How generated images lie among real ones, by balls to the k-th nearest neighbour of the same kind."""

    precision: float  # share of generated images inside the ball of a real one
    recall: float  # share of real images inside the ball of a generated one
    density: float  # balls of real images that a generated one is inside of, divided by k
    coverage: float  # share of real images whose ball has a generated one inside


def prdc(real: Tensor, fake: Tensor, k: int = 5) -> Neighbours:
    """Precision and recall (Kynkaanniemi et al. 2019), density and coverage (Naeem et al. 2020).

    A ball has its border. Distances are computed in blocks of rows, so memory grows with the number of images and not
    with its square.
    """
    real, fake = (_checked(t, f"the {what} images", least=2) for t, what in ((real, "real"), (fake, "generated")))
    if real.shape[1] != fake.shape[1]:
        raise LabError(f"features to compare have the same dimension; got {real.shape[1]} and {fake.shape[1]}: they "
                       "are of different networks.")  # fmt: skip
    if not 1 <= k < min(len(real), len(fake)):
        raise LabError(f"k = {k} nearest neighbours need more than {k} images of each kind; got {len(real)} real and "
                       f"{len(fake)} generated ones.")  # fmt: skip
    center = real.double().mean(0)  # distances lose digits to a mean that is far from zero
    real, fake = real.double() - center, fake.double() - center
    # Equal distances, as of copies, may differ in their last digits: a border is that much wider.
    border_of_real, border_of_fake = (_radii(t, k) * (1 + 1e-9) for t in (real, fake))
    precise = torch.zeros(len(fake), dtype=torch.bool, device=fake.device)
    balls = torch.zeros((), dtype=torch.int64, device=fake.device)
    recalled, covered = [], []
    for part, border in zip(real.split(_ROWS), border_of_real.split(_ROWS), strict=True):
        apart = _squares(part, fake)
        inside = apart <= border[:, None]
        precise |= inside.any(0)
        balls += inside.sum()
        covered.append(inside.any(1))
        recalled.append((apart <= border_of_fake).any(1))
    shares = [t.double().mean() for t in (precise, torch.cat(recalled))]
    found = torch.stack([*shares, balls.double() / (k * len(fake)), torch.cat(covered).double().mean()])
    return Neighbours(*found.tolist())


def _squares(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances ``[len(a), len(b)]``."""
    return torch.addmm(b.square().sum(1) + a.square().sum(1)[:, None], a, b.T, alpha=-2).clamp_min_(0)


def _radii(x: Tensor, k: int) -> Tensor:
    """The squared distance of each row to its k-th nearest neighbour, itself left out."""
    found, first = [], 0
    for part in x.split(_ROWS):
        apart = _squares(part, x)
        rows = torch.arange(len(part), device=x.device)
        apart[rows, rows + first] = math.inf
        found.append(apart.topk(k, 1, largest=False).values[:, -1])
        first += len(part)
    return torch.cat(found)


def _zero(features: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=features.device)


def _checked(features: Tensor, what: str, least: int) -> Tensor:
    if not isinstance(features, Tensor) or features.dim() != 2 or not features.is_floating_point():
        got = f"{features.dtype} {list(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise LabError(f"{what} are given as features [N, d], floating-point numbers; got {got}.")
    if len(features) < least:
        raise LabError(f"{what} are {len(features)}; expected at least {least}.")
    if lost := int((~features.isfinite()).any(1).sum()):
        raise LabError(f"the features of {lost:,} of {len(features):,} of {what} are no finite numbers: the network "
                       "that made them diverged.")  # fmt: skip
    features = features.detach()
    return features if widest(features.device) == torch.float64 else features.cpu()


# The same numbers by torchmetrics, where they stand beside published ones


class _Given(nn.Module):
    """Stands in torchmetrics for the network: what it is given are features."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.num_features = dimension

    def forward(self, x: Tensor) -> Tensor:
        return x


def published_fid(real: Moments, fake: Moments) -> float:
    """The Frechet distance as torchmetrics computes it, from its sums."""
    metric = torchmetrics("image.fid").FrechetInceptionDistance(feature=_Given(len(real.mean)), sync_on_compute=False)
    metric = metric.set_dtype(torch.float64).to(real.mean.device)
    for name, (mean, cov, n) in (("real", real), ("fake", fake)):
        setattr(metric, f"{name}_features_sum", mean * n)
        setattr(metric, f"{name}_features_cov_sum", cov * (n - 1) + n * torch.outer(mean, mean))
        setattr(metric, f"{name}_features_num_samples", torch.tensor(n, device=mean.device))
    metric.orig_dtype = torch.float64
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric .* was called before")
        return float(metric.compute())


def published_inception_score(logits: Tensor, splits: int = 10) -> tuple[float, float]:
    """The inception score as torchmetrics computes it, in an order drawn from a seed of its own. Its deviation is
    divided by the number of parts less one.
    """
    logits = _checked(logits, "the logits of the generated images", least=splits).double().cpu()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", message="Metric `InceptionScore` will save all extracted features")
        warnings.filterwarnings("ignore", message=r"std\(\)")  # one part has none
        metric = torchmetrics("image.inception").InceptionScore(
            feature=_Given(logits.shape[1]), splits=splits, sync_on_compute=False
        )
        metric.update(logits)
        torch.manual_seed(0)
        mean, deviation = metric.compute()
    return mean.item(), deviation.item()


# A sampler's images

Sampler = Callable[[Tensor, torch.Generator], Tensor]  # labels [B] to images [B, C, H, W] in [0, 1]
_BATCH = 100  # images that are asked for at once, as in the papers


class Worth(dict[str, float]):
    """The numbers of samples, by the names of :attr:`Quality.metrics`, and the deviation of IS."""

    classes: dict[int, float]  # FID of each class
    notes: list[str]  # what to know about the numbers


class Quality:
    """Judges the images of a sampler beside those of a part of the data.

    Args:
        features: what images are compared by.
        source: the data; batches have images ``x``, and labels ``y`` if FID within classes is wanted.
        part: of the data. Published scores of CIFAR-10 take the training images.
        device: where features are computed.
        cache: a folder that keeps the features of the real images, by data, part and weights.
        k: nearest neighbours of precision, recall, density and coverage.
        splits: parts of the inception score.
        neighbours: of how many images, at most, neighbours are searched.
    """

    def __init__(
        self,
        features: Features,
        source: Source,
        part: str = "train",
        *,
        device: torch.device | str = "cpu",
        cache: str | Path | None = None,
        k: int = 5,
        splits: int = 10,
        neighbours: int = 10_000,
    ) -> None:
        self.features, self.source, self.part, self.device = features.to(device), source, part, torch.device(device)
        self.cache = None if cache is None else Path(cache).expanduser()
        self.k, self.splits, self.neighbours = k, splits, neighbours

    @property
    def metrics(self) -> dict[str, Metric]:
        """What the numbers are, with the name of their features, for a task's ``metrics``."""
        title = self.features.title
        return {
            "fid": Metric("", False, title("FID")),
            "is": Metric("", True, title("IS")),
            "precision": Metric("", True, title("precision")),
            "recall": Metric("", True, title("recall")),
            "density": Metric("", True, title("density")),
            "coverage": Metric("", True, title("coverage")),
            "intra_fid": Metric("", False, title("intra-class FID")),
        }

    @property
    def about(self) -> dict[str, Any]:
        """What the numbers depend on, for a record."""
        f = self.features
        return {"features": f.name, "digest": f.digest[:16], "published": f.published, "part": self.part,
                "real": self.source.number(self.part), "k": self.k, "splits": self.splits}  # fmt: skip

    def of(
        self, sampler: Sampler, n: int, *, classes: int | None = None, labels: str = "balanced", seed: int = 0
    ) -> Worth:
        """The worth of ``n`` images of a sampler, ``sampler(labels, generator)``, in batches of 100.

        Labels are of ``classes`` classes, by default those of the data: as many of each ("balanced"), or drawn
        ("uniform"). The same seed gives the sampler the same labels and an equal generator on the device.

        Images are rounded to bytes, as they would be stored. Of a sampler that diverged all numbers are NaN.
        """
        classes = self.classes if classes is None else classes
        if n < 2 or classes < 1:
            raise LabError(f"quality is that of at least 2 images, of at least one class; got {n} of {classes}.")
        drawn = _labels(n, classes, labels, generator(seed, "labels of samples", device=self.device))
        seen = self._of_samples(sampler, drawn, generator(seed, "samples", device=self.device))
        found = Worth(dict.fromkeys((*self.metrics, "is_deviation"), math.nan))
        found.classes, found.notes = {}, self.notes(n, classes)
        if seen is None:
            found.notes.append("The sampler gave values that are no finite numbers: it diverged.")
            return found
        features, logits = seen
        fake, by_hand = moments(features, "the generated images"), not self.features.by_torchmetrics
        found["fid"] = frechet(self._moments, fake) if by_hand else published_fid(self._moments, fake)
        if n >= self.splits:
            score = inception_score(logits.double().softmax(1), self.splits) if by_hand else \
                published_inception_score(logits, self.splits)  # fmt: skip
            found["is"], found["is_deviation"] = score
        near = min(len(self.real[0]), n, self.neighbours)
        if near > self.k:
            found.update(prdc(self._few(self.real[0]), features[: self.neighbours], self.k)._asdict())
        if self.real[1] is not None and n >= 2 * classes:
            groups = {c: features[drawn == c] for c in range(classes)}
            groups = {c: t for c, t in groups.items() if len(t) > 1}
            intra = intra_fid({c: self.real[0][self.real[1] == c] for c in self._present}, groups)
            found["intra_fid"], found.classes = intra
        return found

    def notes(self, n: int, classes: int = 1) -> list[str]:
        """What to know about the numbers of ``n`` images."""
        f, real = self.features, self.source.number(self.part)
        found = [] if f.published else [f"The numbers are on {f.name} features. They compare samples of the same data "
                                        "on the same features, and nothing with published scores."]  # fmt: skip
        few = [f"{count:,} {what}" for count, what in ((real, "real"), (n, "generated")) if count <= f.dimension]
        if few:
            found.append(f"FID of {' and '.join(few)} images with {f.dimension:,} features is too large: the "
                         "covariance lacks full rank. Compare numbers of as many images only.")  # fmt: skip
        if n // classes <= f.dimension and classes > 1:
            found.append(f"Intra-class FID of {n // classes:,} generated images a class with {f.dimension:,} features "
                         "is too large: covariances lack full rank.")  # fmt: skip
        if n < self.splits:
            found.append(f"There is no IS of {n} images in {self.splits} parts.")
        if min(real, n) <= self.k:
            found.append(f"There is no precision or recall of {min(real, n)} images with k = {self.k} neighbours.")
        return found

    @property
    def classes(self) -> int:
        """How many classes the data has; 1 if it does not say."""
        return len(getattr(self.source, "classes", ())) or len(self.source.about.get("classes", ())) or 1

    @cached_property
    def real(self) -> tuple[Tensor, Tensor | None]:
        """Features and labels of the real images; the latter None if the data has none."""
        path = None if self.cache is None else self.cache / self._file()
        if path is not None and path.is_file():
            try:
                kept = load_checkpoint(path, device=self.device)[0]
                return kept["features"], kept.get("labels")
            except (LabError, KeyError):
                pass  # damaged: computed again, and replaced
        features, labels = [], []
        numbers = torch.arange(self.source.number(self.part))
        for batch in self.source.stream(self.part, numbers.split(_BATCH), self.device):
            features.append(self.features(pixels(batch)["x"].to(self.device))[0])
            labels += [batch["y"]] if "y" in batch else []
        found = _checked(torch.cat(features), f"the real images of {self.source.name}", least=2).float()
        known = torch.cat(labels).to(found.device) if labels else None
        if path is not None:
            kept = {"features": found} | ({} if known is None else {"labels": known})
            save_checkpoint(path, kept, {"kind": "features", **self.about})
        return found, known

    def _file(self) -> str:
        """The name of the file of real features: other data, part or weights have another."""
        key = sha256(f"{self.features.digest} {content(self.source, self.part)}".encode())
        return f"real-{key.hexdigest()[:20]}.safetensors"

    @cached_property
    def _moments(self) -> Moments:
        return moments(self.real[0], f"the real images of {self.source.name}")

    @cached_property
    def _present(self) -> list[int]:
        return [] if self.real[1] is None else self.real[1].unique().tolist()

    def _few(self, features: Tensor) -> Tensor:
        """As many rows as neighbours are searched among, always the same."""
        if len(features) <= self.neighbours:
            return features
        chosen = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))[: self.neighbours]
        return features[chosen.to(features.device)]

    def _of_samples(self, sampler: Sampler, labels: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor] | None:
        features, logits, limits = [], [], []
        with torch.no_grad():
            for part in labels.split(_BATCH):
                x = sampler(part, draw)
                if not isinstance(x, Tensor) or x.dim() != 4 or len(x) != len(part) or not x.is_floating_point():
                    got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                    raise LabError(f"a sampler returns images in [0, 1], floats [{len(part)}, C, H, W] for {len(part)} "
                                   f"labels; got {got}.")  # fmt: skip
                x = x.float()
                limits.append(torch.stack(x.aminmax()))
                found = self.features((x * 255).round().clamp(0, 255) / 255)
                for kept, t in zip((features, logits), found, strict=True):
                    kept.append(t)
        low, high = torch.stack(limits).T
        low, high = low.min().item(), high.max().item()  # the only wait for the device
        if not (math.isfinite(low) and math.isfinite(high)):
            return None
        if low < -1e-3 or high > 1 + 1e-3:
            raise LabError(f"a sampler returns images in [0, 1]; got values from {low:.3g} to {high:.3g}; of tanh "
                           "it is (x + 1) / 2.")  # fmt: skip
        return torch.cat(features), torch.cat(logits)


def _labels(n: int, classes: int, how: str, draw: torch.Generator) -> Tensor:
    device = draw.device
    if how == "uniform":
        return torch.randint(classes, (n,), generator=draw, device=device)
    if how != "balanced":
        raise LabError(f"labels are balanced or uniform; got {how!r}.")
    return (torch.arange(n, device=device) % classes)[torch.randperm(n, generator=draw, device=device)]
