"""Normalization layers for PyTorch: any statistics with any affine map, on one engine.

>>> import torch, normlab
>>> layer = normlab.SwitchNorm2d(64)
>>> layer(torch.randn(2, 64, 8, 8)).shape
torch.Size([2, 64, 8, 8])
"""

from .layers import *  # noqa: F403
from .layers import __all__ as _layers
from .calibrate import calibrate
from .engine import Coefficients, Moments, StyleMoments, normalize
from .fixup import fixup, fixup_parameters
from .fold import fold, merge_sandwich
from .kalman import predict
from .pools import Pool
from .routing import keep_route, route
from .rules import Kalman, Mixture, Modes, Renorm, Single, Statistics
from .state import frozen, guarded, no_update, with_batch_statistics
from .surgery import TARGETS, convert, report, undo
from .sync import sync, unsync
