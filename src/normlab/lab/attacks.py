"""Gradient attacks: FGSM, BIM and PGD in l-inf and l-2 are one loop (gradient, normalise, step, project, clip).

An attack is given pixels in [0, 1] and returns pixels in [0, 1]. Its size ``eps`` is in one of two units:

* ``"pixels"``: of the range [0, 1], so 8/255 is eight grey levels;
* ``"standardised"``: multiples of each channel's standard deviation, as the network sees its input after
  standardisation. It is a different number of pixels in each channel.

An attack does not change the model: neither mode, buffers, ``requires_grad``, ``grad`` nor routing. It goes through the
branch that is routed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.scopes import no_update
from .errors import LabError
from .seeds import draw

__all__ = [
    "KINDS", "Attack", "Units", "as_found", "bim", "fgsm", "grey_levels", "pgd", "shown", "standard_deviation",
]  # fmt: skip

Units = Literal["pixels", "standardised"]
Ball = Literal["linf", "l2"]
Move = Callable[[Tensor, Tensor], Tensor]  # from x and the gradient there to the next x

# Default step sizes as a share of eps / steps. BIM's steps add up to eps exactly, as in "Batch Normalization is a Cause
# of Adversarial Vulnerability"; PGD's can cross the ball, as in "Towards Deep Learning Models Resistant to Adversarial
# Attacks".
_REACH = {"fgsm": 1.0, "bim": 1.0, "pgd": 2.5}


@dataclass(frozen=True)
class Attack:
    """A gradient attack on the cross entropy; :func:`fgsm`, :func:`bim` and :func:`pgd` make the usual ones.

    >>> attack = pgd(8 / 255, units="pixels", steps=20)
    >>> attack.name
    'pgd-linf eps=8/255 pixels steps=20'

    ``attack(model, x, y)`` returns the adversarial images.

    Args:
        kind: its name: ``"fgsm"``, ``"bim"`` or ``"pgd"``. The loop is the same.
        norm: the ball, ``"linf"`` or ``"l2"``.
        eps: its radius, and ``step`` the length of a step, both in ``units``.
        steps: how many steps.
        units: ``"pixels"`` or ``"standardised"``.
        random_start: start uniformly inside the ball. In l-2 this is uniform in volume, as in foolbox. In many
            dimensions nearly every start then lies close to the surface.
        restarts: the number of runs from different starts. For each sample the best run is kept: one that fools the
            model if any does, then the one of greatest loss.
        targeted: ``y`` is the class to reach, not the one to leave.
        clip: None keeps every pixel in [0, 1]. A number c clips to +-c standardised units instead, and always in those
            units. The published code of "Batch Normalization is a Cause of Adversarial Vulnerability" clips to 2, which
            moves pixels beyond +-2 (CIFAR-10 spans -2.4 to 2.8) by more than ``eps``; this is for comparison with it.
        clip_start: False leaves the random start outside [0, 1] for the first gradient, as the published code of
            "Sandwich Batch Normalization" does. The result is in [0, 1] either way.
    """

    kind: str
    norm: Ball
    eps: float
    step: float
    steps: int
    units: Units
    random_start: bool = False
    restarts: int = 1
    targeted: bool = False
    clip: float | None = None
    clip_start: bool = True

    def __post_init__(self) -> None:
        _choice("norm", self.norm, ("linf", "l2"))
        _choice("units", self.units, ("pixels", "standardised"))
        for name in ("eps", "step"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
                raise LabError(f"{name}={value!r} is out of range; expected a finite number, 0 or more")
        for name in ("steps", "restarts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LabError(f"{name}={value!r} is out of range; expected a whole number, 1 or more")
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise LabError(f"clip={self.clip!r} is out of range; expected a positive number of standard deviations")
        if self.restarts > 1 and not self.random_start:
            raise LabError(
                f"restarts={self.restarts} without random_start=True would repeat the same run; set it, or restarts=1"
            )
        if self.step > 10 * self.eps > 0:
            hint = grey_levels(self.step, "step=")
            raise LabError(f"step={shown(self.step)} is more than ten times eps={shown(self.eps)}, so that every step "
                           f"would end at the edge of the ball; both are in units={self.units}{hint}")  # fmt: skip
        if self.norm == "linf" and self.units == "pixels":
            self.check_radius((1.0,), 1)

    @property
    def name(self) -> str:
        """The attack in words, with its units. Different attacks have different names."""
        words = [f"{self.kind}-{self.norm} eps={shown(self.eps)} {self.units}"]
        if self.steps > 1 or self.kind != "fgsm":
            words.append(f"steps={self.steps}")
        if not math.isclose(self.step, _step(self.kind, self.eps, self.steps)):
            words.append(f"step={shown(self.step)}")
        if self.random_start != (self.kind == "pgd"):
            words.append("random start" if self.random_start else "no random start")
        if self.restarts > 1:
            words.append(f"restarts={self.restarts}")
        if self.targeted:
            words.append("targeted")
        if self.clip is not None:
            words.append(f"clip={shown(self.clip)} standardised")
        if not self.clip_start:
            words.append("start not clipped")
        return " ".join(words)

    def check_radius(self, deviations: Sequence[float], dimension: int) -> None:
        """Refuse a ball that holds every image: pixels run from 0 to 1."""
        limit = 1.0 if self.norm == "linf" else math.sqrt(dimension)
        if self.eps * min(deviations) > limit * (1 + 1e-6):
            largest = limit / min(deviations)
            hint = grey_levels(self.eps, after=", units=pixels" if self.units == "standardised" else "")
            raise LabError(
                f"eps={shown(self.eps)} {self.units} in {self.norm} is out of range: pixels run from 0 to 1, so "
                f"{shown(round(largest, 4))} already reaches every image{hint}"
            )

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,  # [N, C, H, W], pixels in [0, 1]
        y: Tensor,  # [N], classes to leave, or to reach where targeted
        *,
        mean: Tensor | Sequence[float] | None = None,
        std: Tensor | Sequence[float] | None = None,
        generator: torch.Generator | None = None,
        training: bool = False,
        update: bool = False,
    ) -> Tensor:
        """Adversarial images for ``x``.

        ``mean`` and ``std`` are those that the model standardises by. They are needed if it has no ``standardize``:
        ``std`` for standardised units, both for ``clip``. ``generator`` draws the random starts. The attack sees the
        model in evaluation mode, or in training mode with ``training=True``. Then running statistics change only with
        ``update=True``.
        """
        self._check(x, y)
        space = self._space(model, x, mean, std)
        # The loop needs gradients, also inside an outer no_grad or inference_mode.
        with as_found(model, training=training, update=update), torch.inference_mode(False), torch.enable_grad():
            start, y = x.detach().clone(), y.detach().clone()
            if self.restarts == 1:
                return self._run(model, start, y, space, generator)
            best = self._judged(model, self._run(model, start, y, space, generator), y)
            for _ in range(self.restarts - 1):
                again = self._judged(model, self._run(model, start, y, space, generator), y)
                best = _better(again, best)
            return best.x

    def _run(
        self, model: nn.Module, origin: Tensor, y: Tensor, space: _Space, generator: torch.Generator | None
    ) -> Tensor:
        """One run. Nothing in it waits for the device."""
        move = _linf(self, origin, space) if self.norm == "linf" else _l2(self, origin, space)
        x = origin
        if self.random_start:
            x = origin + space.unit * _inside(self.norm, self.eps, origin, generator)
            if self.clip_start:
                x = x.clamp(space.low, space.high)
        sign = -1.0 if self.targeted else 1.0
        for _ in range(self.steps):
            x = x.detach().requires_grad_()
            # A sum, so that the gradient of a sample does not depend on N.
            loss = F.cross_entropy(model(x).float(), y, reduction="sum")
            (gradient,) = torch.autograd.grad(sign * loss, x)
            x = move(x.detach(), gradient)
        return x.clamp(space.low, space.high)

    @torch.no_grad()
    def _judged(self, model: nn.Module, x: Tensor, y: Tensor) -> _Judged:
        logits = model(x).float()
        loss = F.cross_entropy(logits, y, reduction="none")
        hit = logits.argmax(1) == y
        return _Judged(x, hit, -loss) if self.targeted else _Judged(x, ~hit, loss)

    def _check(self, x: Tensor, y: Tensor) -> None:
        if not x.is_floating_point():
            raise LabError(f"an attack takes pixels in [0, 1] as floats; got {x.dtype}; pass data.pixels(x)")
        if x.dim() != 4 or y.shape != x.shape[:1]:
            raise LabError(
                f"an attack takes images [N, C, H, W] and labels [N]; got {list(x.shape)} and {list(y.shape)}"
            )
        if x.device.type == "cpu" and x.numel():  # a GPU would have to be waited for
            low, high = (float(v) for v in x.detach().aminmax())
            if not (low >= 0 and high <= 1):
                raise LabError(
                    f"an attack takes pixels in [0, 1]; these run from {low:.3g} to {high:.3g}; "
                    "standardise inside the model (normlab.lab.models.Standardize), not before it"
                )

    def _space(
        self, model: nn.Module, x: Tensor, mean: Tensor | Sequence[float] | None, std: Tensor | Sequence[float] | None
    ) -> _Space:
        if self.units == "pixels" and self.clip is None:
            self.check_radius((1.0,), x[0].numel() if len(x) else 1)
            one = torch.ones((), dtype=x.dtype, device=x.device)
            return _Space(one, torch.zeros_like(one), one)
        deviation = standard_deviation(model, x, std)
        if self.units == "standardised" and deviation.device.type == "cpu" and len(x):
            self.check_radius(deviation.flatten().tolist(), x[0].numel())
        unit = deviation if self.units == "standardised" else torch.ones_like(deviation)
        if self.clip is None:
            return _Space(unit, torch.zeros_like(unit), torch.ones_like(unit))
        centre = _statistic("mean", model, x, mean)
        return _Space(unit, centre - self.clip * deviation, centre + self.clip * deviation)


def fgsm(eps: float, *, units: Units, norm: Ball = "linf", **options: Any) -> Attack:
    """The fast gradient (sign) method: one step of length ``eps``."""
    return _attack("fgsm", eps, units, norm, {"steps": 1, **options})


def bim(eps: float, *, units: Units, norm: Ball = "linf", steps: int = 20, **options: Any) -> Attack:
    """The basic iterative method: from the image itself, by default in steps of ``eps / steps``."""
    return _attack("bim", eps, units, norm, {"steps": steps, **options})


def pgd(eps: float, *, units: Units, norm: Ball = "linf", steps: int = 20, **options: Any) -> Attack:
    """Projected gradient descent: from a random point of the ball, by default in steps of ``2.5 * eps / steps``."""
    return _attack("pgd", eps, units, norm, {"steps": steps, "random_start": True, **options})


KINDS = {"fgsm": fgsm, "bim": bim, "pgd": pgd}


def _attack(kind: str, eps: float, units: Units, norm: Ball, options: dict[str, Any]) -> Attack:
    step = options.pop("step", None)
    if step is None:  # Attack checks eps and steps
        step = _step(kind, eps, max(1, options["steps"]))
    return Attack(kind=kind, norm=norm, eps=eps, step=step, units=units, **options)


def _step(kind: str, eps: float, steps: int) -> float:
    return _REACH.get(kind, 1.0) * eps / steps


# Parts of the loop -----------------------------------------------------------------------------------------


class _Space(NamedTuple):
    """Where an attack moves: x = origin + unit * delta, clipped to [low, high]."""

    unit: Tensor  # [] or [C, 1, 1]
    low: Tensor  # likewise
    high: Tensor


class _Judged(NamedTuple):
    x: Tensor  # [N, C, H, W]
    fools: Tensor  # [N], bool
    loss: Tensor  # [N], the greater the better for the attack


def _better(a: _Judged, b: _Judged) -> _Judged:
    first = (a.fools & ~b.fools) | ((a.fools == b.fools) & (a.loss > b.loss))
    return _Judged(
        torch.where(first[:, None, None, None], a.x, b.x),
        torch.where(first, a.fools, b.fools),
        torch.where(first, a.loss, b.loss),
    )


def _linf(attack: Attack, origin: Tensor, space: _Space) -> Move:
    # A clamp to the ball and then to the range equals one clamp to the ball's bounds clamped to the range.
    low = (origin - attack.eps * space.unit).clamp(space.low, space.high)
    high = (origin + attack.eps * space.unit).clamp(space.low, space.high)
    length = attack.step * space.unit

    def move(x: Tensor, gradient: Tensor) -> Tensor:
        return (x + length * gradient.sign()).clamp(low, high)

    return move


def _l2(attack: Attack, origin: Tensor, space: _Space) -> Move:
    unit = space.unit

    def project(x: Tensor) -> Tensor:
        delta = (x - origin) / unit
        return origin + unit * delta * (attack.eps / _length(delta).clamp_min(1e-12)).clamp_max(1)

    def move(x: Tensor, gradient: Tensor) -> Tensor:
        # d loss / d delta. A confident model's gradients are below 1e-23, whose squares are zero in float32.
        slope = gradient * unit
        slope = slope / slope.abs().amax((1, 2, 3), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        x = x + attack.step * unit * slope / _length(slope).clamp_min(1e-12)
        # If the range is [0, 1], the origin is inside it, and clipping last keeps both bounds. The published code with
        # the range of +-2 projects last.
        if attack.clip is not None:
            return project(x.clamp(space.low, space.high))
        return project(x).clamp(space.low, space.high)

    return move


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(1, 2, 3), keepdim=True)


def _inside(norm: Ball, eps: float, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform in the ball. In l-2: a random direction at a radius of ``eps * U ** (1 / d)``."""
    device = like.device if generator is None else generator.device
    made: dict[str, Any] = {"dtype": like.dtype, "device": device, "generator": generator}
    if norm == "linf":
        return ((2 * draw(torch.rand, like.shape, **made) - 1) * eps).to(like.device)
    direction = draw(torch.randn, like.shape, **made)
    radius = draw(torch.rand, (len(like), 1, 1, 1), **made) ** (1 / max(1, like[:1].numel()))
    return (eps * radius * direction / _length(direction).clamp_min(1e-12)).to(like.device)


# The model's standardisation and its state -------------------------------------------------------------


def standard_deviation(model: nn.Module, x: Tensor, std: Tensor | Sequence[float] | None = None) -> Tensor:
    """A standardised unit in pixels, ``[C, 1, 1]``: the one given, or the model's own."""
    return _statistic("std", model, x, std)


def _statistic(name: str, model: nn.Module, x: Tensor, given: Tensor | Sequence[float] | None) -> Tensor:
    if given is None:
        given = getattr(getattr(model, "standardize", None), name, None)
    if given is None:
        raise LabError(
            f"standardised units need the {name} that {type(model).__name__} standardises by; it has no `standardize` "
            f'that says so; pass {name}=..., or units="pixels"'
        )
    value = torch.as_tensor(given, dtype=x.dtype, device=x.device).detach().reshape(-1, 1, 1)
    if len(value) not in (1, x.shape[1]):
        raise LabError(f"{name} has {len(value)} values for images of {x.shape[1]} channels; expected one a channel")
    return value


@contextmanager
def as_found(model: nn.Module, *, training: bool = False, update: bool = False) -> Iterator[None]:
    """Inside, the model is in one mode, and its parameters need no gradients. Afterwards everything is restored.

    So a backward pass to the input computes no gradients for parameters. In training mode running statistics do not
    change unless ``update``. Other buffers that a forward pass writes to, such as the vectors of spectral
    normalisation, are restored.
    """
    modes = [(module, module.training) for module in model.modules()]
    wanted = [p for p in model.parameters() if p.requires_grad]
    # Only buffers that changed are restored: an autograd graph outside may have saved the others.
    found = [b for b in model.buffers() if not b.is_inference()]
    buffers = [(b, b._version, old) for b, old in zip(found, _copies(found), strict=True)]
    was = model.training
    changed = any(flag != training for _, flag in modes)
    try:
        if changed:
            model.train(training)
        for p in wanted:
            p.requires_grad_(False)
        with nullcontext() if update or not training else no_update(model):
            yield
    finally:
        for p in wanted:
            p.requires_grad_(True)
        if changed:
            model.train(was)
            for module, flag in modes:  # parts of the model may have been in another mode
                module.training = flag
        if not (update and training):
            with torch.no_grad():
                for buffer, version, value in buffers:
                    if buffer._version != version:
                        buffer.copy_(value)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each, by one kernel for all of a type."""
    made = [torch.empty_like(t) for t in tensors]
    foreach: Any = torch
    for kind in {(t.device, t.dtype) for t in tensors}:
        some = [k for k, t in enumerate(tensors) if (t.device, t.dtype) == kind]
        with torch.no_grad():
            foreach._foreach_copy_([made[k] for k in some], [tensors[k] for k in some])
    return made


def grey_levels(value: float, name: str = "", after: str = "") -> str:
    """A hint for a size in pixels that was probably meant in grey levels; else an empty text."""
    return f"; for {value:g} grey levels of 255 write {name}{value:g}/255{after}" if value >= 1 else ""


def shown(value: float) -> str:
    """A number as text: a fraction of 255 if it is one, otherwise a decimal. It reads back as the same number.

    >>> shown(8 / 255), shown(0.03), shown(2.0)
    ('8/255', '0.03', '2')
    """
    levels = value * 255
    if 0 < value < 1 and abs(levels - round(levels)) < 1e-9 and round(levels) / 255 == value and len(repr(value)) > 6:
        return f"{round(levels)}/255"
    return repr(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


def _choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise LabError(f"{name}={value!r} is not known; expected {' or '.join(map(repr, known))}")
