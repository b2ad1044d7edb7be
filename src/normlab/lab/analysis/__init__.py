"""What goes on inside a model: importance weights, CAPV, effective affine maps, exploding gradients, components.

Pure functions that return plain data. :func:`describe` puts what applies to a model into text, for ``normlab
inspect``.
"""

from .affine import Capv, Layer, Scale, capv, effective_affine, norm_layers
from .components import Pca, activations, pca, representations
from .explosion import Explosion, depth_limit, explosion_rate, gradient_explosion
from .text import describe, table
from .weights import Weights, average_importance, importance, importance_by_part

__all__ = [
    "Capv", "Explosion", "Layer", "Pca", "Scale", "Weights", "activations", "average_importance", "capv",
    "depth_limit", "describe", "effective_affine", "explosion_rate", "gradient_explosion", "importance",
    "importance_by_part", "norm_layers", "pca", "representations", "table",
]  # fmt: skip
