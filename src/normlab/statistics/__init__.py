"""What is pooled, and what becomes of it: one file for each kind of statistics.

Every file of this folder is imported here, because it may register normalizers.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
