"""The contrastive domain discrepancy: how far images of one class lie apart across domains, less how far classes do."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["contrastive_discrepancy"]

_KERNELS, _FACTOR = 5, 2.0
_LEAST = 1e-5  # of a bandwidth: samples may be equal


def contrastive_discrepancy(
    source: Tensor, target: Tensor, of_source: Tensor, of_target: Tensor, classes: int
) -> Tensor:
    """Kang et al., "Contrastive Adaptation Network", as a scalar. The smaller, the better the classes fit.

    The squared maximum mean discrepancy of a class of the source and a class of the target is ``ss + tt - 2 st``, each
    a mean of kernel values. The result is its mean over equal classes less its mean over different ones. The kernel is
    the sum of five Gaussians around a bandwidth of the two classes' own: the mean squared distance of their samples.

    Args:
        source, target: features, ``[N, D]`` and ``[M, D]``.
        of_source, of_target: the class of each, ``[N]`` and ``[M]``; a negative one leaves the sample out. Classes
            that are not in both domains do not count.

    >>> x, y = torch.randn(12, 4), torch.arange(12) % 3
    >>> moved = contrastive_discrepancy(x, x + 2, y, y, 3)
    >>> bool(contrastive_discrepancy(x, x, y, y, 3) < moved)
    True
    """
    with torch.autocast(source.device.type, enabled=False):
        middle = torch.cat([source, target]).detach().float().mean(0)
        source, target = source.float() - middle, target.float() - middle
        numbers = torch.arange(classes, device=source.device)
        s, t = ((y[:, None] == numbers).float() for y in (of_source, of_target))  # [N, K], [M, K]
        n, m = s.sum(0), t.sum(0)
        apart = _squared(source, source), _squared(target, target), _squared(source, target)
        width = _bandwidths(apart, s, t)  # [K, K], of a class of the source and one of the target
        of_s, of_t = s @ width, t @ width.T  # [N, K], [M, K]: of a sample's class and each class of the other domain
        share_s, share_t = s / n.clamp_min(1), t / m.clamp_min(1)
        ss = torch.einsum("ijc,ia,ja->ac", _kernel(apart[0][:, :, None], of_s[:, None]), share_s, share_s)
        tt = torch.einsum("ijc,ia,ja->ca", _kernel(apart[1][:, :, None], of_t[:, None]), share_t, share_t)
        st = share_s.T @ _kernel(apart[2], of_s @ t.T) @ share_t
        found = ss + tt - 2 * st  # [K, K]
        both = ((n > 0) & (m > 0)).float()
        present = both.sum()
        different = torch.outer(both, both) - torch.diag(both)
        within = (found.diagonal() * both).sum() / present.clamp_min(1)
        return within - (found * different).sum() / (present * (present - 1)).clamp_min(1)


def _squared(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances ``[N, M]``."""
    found = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
    return found.clamp_min(0)


@torch.no_grad()
def _bandwidths(apart: tuple[Tensor, Tensor, Tensor], s: Tensor, t: Tensor) -> Tensor:
    """The mean squared distance of different samples of a class of the source and a class of the target, together."""
    ss, tt, st = apart
    n, m = s.sum(0)[:, None], t.sum(0)
    sums = torch.einsum("ia,ij,ja->a", s, ss, s)[:, None] + torch.einsum("ia,ij,ja->a", t, tt, t) + 2 * s.T @ st @ t
    pairs = (n + m).square() - n - m
    return (sums / pairs.clamp_min(1)).clamp_min(_LEAST)


def _kernel(apart: Tensor, width: Tensor) -> Tensor:
    width = width.clamp_min(_LEAST)
    scales = [_FACTOR ** (k - _KERNELS // 2) for k in range(_KERNELS)]
    return torch.stack([(-apart / (width * scale)).exp() for scale in scales]).sum(0)
