"""Importing mlx-lm without its side effect on the process.

On import mlx_lm sets the limit of open files, and lowers the *hard* limit with it, which a
process cannot take back. It is imported here with that one call turned away.
"""

from __future__ import annotations

import resource
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_UTILS = "mlx_lm.utils"


def mlx_lm_utils() -> ModuleType:
    """The module mlx_lm.utils; limits of the process stay as they are."""
    if _UTILS in sys.modules:
        return sys.modules[_UTILS]
    own = resource.setrlimit

    def keep_file_limit(which: int, limits: Any) -> None:
        if which != resource.RLIMIT_NOFILE:
            own(which, limits)

    resource.setrlimit = keep_file_limit
    try:
        return import_module(_UTILS)
    finally:
        resource.setrlimit = own
