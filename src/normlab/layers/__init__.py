"""Normalization layers: :class:`Norm` and the papers' names."""

from . import batch, conditional, mixtures, norm, recurrent, sample, style
from .batch import *
from .conditional import *
from .mixtures import *
from .norm import *
from .recurrent import *
from .sample import *
from .style import *

__all__: list[str] = []
__all__ += batch.__all__
__all__ += conditional.__all__
__all__ += mixtures.__all__
__all__ += norm.__all__
__all__ += recurrent.__all__
__all__ += sample.__all__
__all__ += style.__all__
