"""The three summaries of errors under corruption that papers print, and the reader of the published files.

``errors`` maps a corruption's name to its test errors in per cent at severities 1 to 5. Three numbers are in use, and
two of them are called mCE:

* :func:`uce`: mean error over the **15** corruptions of the benchmark, not normalised.
* :func:`mce_19`: mean error over **all 19**, not normalised: "mCE" in "Batch Normalization is a Cause of Adversarial
  Vulnerability".
* :func:`mce_alexnet`: mean over the 15 of :func:`ce_alexnet`, errors relative to AlexNet's: "mCE" of ImageNet-C.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...engine.messages import nearest
from ..errors import LabError
from .constants import COMMON, EXTRA

if TYPE_CHECKING:
    from ..data import Images

__all__ = ["ALEXNET", "Errors", "ce_alexnet", "mce_19", "mce_alexnet", "read_cifar10c", "uce"]

Errors = Mapping[str, Sequence[float]]  # corruption -> errors in per cent at severities 1 to 5

# AlexNet's error on ImageNet-C in per cent, mean over the five severities.
ALEXNET = dict(
    zip(
        COMMON,
        (88.6428, 89.4468, 92.2640, 81.9880, 82.6268, 78.5948, 79.8360, 86.6816, 82.6572, 81.9324, 56.4592, 85.3204,
         64.6056, 71.7840, 60.6500),
        strict=True,
    )
)  # fmt: skip


def uce(errors: Errors) -> float:
    """uCE, unnormalised: mean over the 15 corruptions of the mean error over 5 severities, without the 4 extra ones."""
    return _mean(_mean(row) for row in _rows(errors, COMMON))


def mce_19(errors: Errors) -> float:
    """The vulnerability paper's "mCE": mean over all 19 corruptions of the mean error over 5 severities."""
    return _mean(_mean(row) for row in _rows(errors, COMMON + EXTRA))


def ce_alexnet(errors: Errors) -> dict[str, float]:
    """CE of each of the 15: 100 times the **sum** of errors over severities, divided by the sum of AlexNet's.

    The mean over severities of the ratios is another number.
    """
    rows = _rows(errors, COMMON)
    return {name: 100 * sum(row) / (5 * ALEXNET[name]) for name, row in zip(COMMON, rows, strict=True)}


def mce_alexnet(errors: Errors) -> float:
    """ImageNet-C's mCE: mean over the 15 corruptions of :func:`ce_alexnet`; AlexNet's is 100."""
    return _mean(ce_alexnet(errors).values())


def _rows(errors: Errors, names: Sequence[str]) -> list[Sequence[float]]:
    if missing := [n for n in names if n not in errors]:
        raise LabError(f"The mean over {len(names)} corruptions needs all of them; missing: {', '.join(missing)}.")
    rows = [errors[n] for n in names]
    for name, row in zip(names, rows, strict=True):
        if len(row) != 5:
            raise LabError(f"Five errors are needed, one a severity, but {name} has {len(row)}.")
    return rows


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


# ---------------------------------------------------------------------------------------------------- published files


def read_cifar10c(root: Path | str, name: str) -> list[Images]:
    """The published CIFAR-10-C (or CIFAR-100-C) file of a corruption: images and labels at severities 1 to 5.

    Args:
        root: folder of the published archive, or one with a folder ``CIFAR-10-C`` in it. It has ``labels.npy`` and one
            file a corruption, uint8 [5 n, 32, 32, 3], the severities one after another.
        name: the corruption, a name of ``CORRUPTIONS``.
    """
    import numpy as np

    from ..data import Images

    if name not in COMMON + EXTRA:
        raise LabError(f"Unknown corruption {name!r}: {nearest(name, COMMON + EXTRA)}")
    base = Path(root).expanduser()
    base = next((f for f in (base / "CIFAR-10-C", base / "CIFAR-100-C") if f.is_dir()), base)
    paths = [base / f"{name}.npy", base / "labels.npy"]
    if missing := [p.name for p in paths if not p.is_file()]:
        raise LabError(
            f"The folder {base} lacks {' and '.join(missing)}. Unpack CIFAR-10-C.tar there, from "
            "https://zenodo.org/records/2535967, or corrupt the test set with normlab.lab.corruptions.corrupt."
        )
    try:
        x, y = (np.load(p) for p in paths)
    except (ValueError, EOFError, OSError) as broken:
        raise LabError(
            f"A file of {base} is cut off or not a NumPy array ({broken}). Unpack the archive again."
        ) from None
    if x.ndim != 4 or x.dtype != np.uint8 or x.shape[-1] not in (1, 3) or len(x) % 5 or len(y) != len(x):
        raise LabError(
            f"{paths[0]} holds {x.dtype} {list(x.shape)} beside {len(y)} labels. Expected are uint8 images "
            "[5 n, H, W, C], five severities of the same n, and 5 n labels."
        )
    images = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous()
    labels = torch.from_numpy(y.astype(np.int64))
    n = len(x) // 5
    return [Images(images[i : i + n], labels[i : i + n]) for i in range(0, 5 * n, n)]
