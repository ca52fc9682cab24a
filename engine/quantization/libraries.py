"""Loads the libraries that quantise; they come with the extra `loraplex[quantization]`."""

import importlib
import logging
from typing import Any

from engine.errors import ConfigError

EXTRA = "loraplex[quantization]"
_CHATTY = ("bitsandbytes.backends.cpu.ops", "torchao", "torch.utils._pytree")
"""Loggers that report, while these libraries load, accelerators and kernels that are not used."""


def load_library(module: str, quantization: str) -> Any:
    """Import `torchao.…` or `bitsandbytes.…`; raises ConfigError that names the extra."""
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"quantization {quantization!r} needs {module.partition('.')[0]}, which cannot be "
            f"loaded ({error}): pip install '{EXTRA}'"
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
