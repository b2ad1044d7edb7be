"""Normalization layers for PyTorch: any statistics with any affine map, on one engine.

>>> import torch, normlab
>>> layer = normlab.SwitchNorm2d(64)
>>> layer(torch.randn(2, 64, 8, 8)).shape
torch.Size([2, 64, 8, 8])
"""

from importlib.metadata import PackageNotFoundError, version

from . import _start, layers
from .engine.backends import backend
from .engine.contract import Coefficients, Moments, StyleMoments
from .engine.normalize import normalize
from .layers import *
from .layers.compiled import build_host, host_status
from .model.calibrate import calibrate
from .model.convert import convert, undo
from .model.draw import draw
from .model.fixup import fixup
from .model.fold import fold
from .model.fuse import fuse
from .model.lean import lean
from .model.mixtures import harden, importance, set_radius
from .model.norm_layer import norm_layer
from .model.official import OfficialKeys, load_official
from .model.parameter_groups import clip_gradients, parameter_groups
from .model.plain_layers import merge_sandwich
from .model.report import Report, report
from .model.routing import keep_route, route
from .model.scopes import accumulated, frozen, guarded, no_update, with_batch_statistics
from .model.sync import sync, unsync
from .model.targets import TARGETS
from .statistics.base import Statistics
from .statistics.filter_response import FilterResponse
from .statistics.global_response import GlobalResponse
from .statistics.kalman import Kalman, predict_statistics
from .statistics.mixture import Mixture
from .statistics.modes import Modes
from .statistics.pools import Pool
from .statistics.positional import Positional
from .statistics.registry import NORMALIZERS, register
from .statistics.renorm import Renorm
from .statistics.root_mean_square import RootMeanSquare
from .statistics.single import Single

try:
    __version__ = version("normlab")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0"

__all__ = [
    "NORMALIZERS",
    "TARGETS",
    "Coefficients",
    "FilterResponse",
    "GlobalResponse",
    "Kalman",
    "Mixture",
    "Modes",
    "Moments",
    "OfficialKeys",
    "Pool",
    "Positional",
    "Renorm",
    "Report",
    "RootMeanSquare",
    "Single",
    "Statistics",
    "StyleMoments",
    "accumulated",
    "backend",
    "build_host",
    "calibrate",
    "clip_gradients",
    "convert",
    "draw",
    "fixup",
    "fold",
    "frozen",
    "fuse",
    "guarded",
    "harden",
    "host_status",
    "importance",
    "keep_route",
    "lean",
    "load_official",
    "merge_sandwich",
    "no_update",
    "norm_layer",
    "normalize",
    "parameter_groups",
    "predict_statistics",
    "register",
    "report",
    "route",
    "set_radius",
    "sync",
    "undo",
    "unsync",
    "with_batch_statistics",
]
__all__ += layers.__all__
