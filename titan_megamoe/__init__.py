"""titan_megamoe: fused, overlapped expert parallelism for TorchTitan's mixture-of-experts models."""

import importlib

__version__ = "0.1.0"
_MODULES = {
    "check_step": "ops",
    "mega_moe": "ops",
    "set_deadline": "symmetric",
    "WeightCache": "weight_cache",
    "weights_changed": "weight_cache",
}
__all__ = list(_MODULES)


def __getattr__(name: str):
    # Lazy: `python -m titan_megamoe.data` and `--help` should not wait for torch.
    if name in __all__:
        return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
