"""Classification of labelled images, the lab's first task. Its variants are the recipes."""

from ..recipes.classify import RECIPE as TASK

__all__ = ["TASK"]
