"""Augmentations by name, batched on any device: bytes and labels in, pixels and labels out.

>>> augmentation = parse_augmentation("randaugment(n=3, m=5)")
>>> augmentation.label
'randaugment(n=3, m=5)'

``augmentation(x, y, data, generator)`` returns an :class:`Augmented`. Options are those of the classes that
:data:`AUGMENTATIONS` lists.
"""

from __future__ import annotations

from ...engine.messages import nearest
from ..errors import LabError
from ..texts import split
from .base import Augmentation, Augmented
from .basic import Crop, Cutout, Flip, Gaussian, Identity, Standard
from .mixing import CutMix, MixUp
from .policies import AugMix, AutoAugment, RandAugment

__all__ = [
    "AUGMENTATIONS", "AugMix", "Augmentation", "Augmented", "AutoAugment", "Crop", "CutMix", "Cutout", "Flip",
    "Gaussian", "Identity", "MixUp", "RandAugment", "Standard", "parse_augmentation",
]  # fmt: skip

AUGMENTATIONS: dict[str, type[Augmentation]] = {
    kind.name: kind
    for kind in (
        Identity, Flip, Crop, Standard, Cutout, RandAugment, AutoAugment, AugMix, MixUp, CutMix, Gaussian,
    )
}  # fmt: skip


def parse_augmentation(text: str | Augmentation) -> Augmentation:
    """An augmentation from its text: ``cutout``, ``randaugment(n=3, m=4)``, ``gaussian(0.1)``.

    Options are given by name, or in their order. An augmentation is returned unchanged.
    """
    if isinstance(text, Augmentation):
        return text
    name, bracket, rest = text.strip().partition("(")
    name = name.strip().lower()
    if name not in AUGMENTATIONS:
        raise LabError(f"there is no augmentation {name!r}; {nearest(name, AUGMENTATIONS)}")
    if bracket and not rest.rstrip().endswith(")"):
        raise LabError(f"{text!r} lacks its closing bracket; expected {name}(option=value, ...)")
    readers = AUGMENTATIONS[name].reader()
    given: dict[str, object] = {}
    for i, part in enumerate(split(rest.rstrip()[:-1]) if bracket else []):
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals:
            if i >= len(readers):
                raise LabError(
                    f"{text!r}: {part!r} has no name; expected option=value, of: {', '.join(readers) or 'none'}"
                )
            key, value = list(readers)[i], key
        if key not in readers:
            raise LabError(f"{name} takes no option {key!r}; {nearest(key, readers) if readers else 'it takes none'}")
        if key in given:
            raise LabError(f"{text!r} gives {key} twice")
        try:
            given[key] = readers[key](value)
        except LabError as error:
            raise LabError(f"{name}: {key}={value}: {error}") from None
    return AUGMENTATIONS[name](**given)
