"""titan_megamoe: fused, overlapped expert parallelism for TorchTitan's mixture-of-experts models."""

__version__ = "0.1.0"
__all__ = ["check_step", "mega_moe"]


def __getattr__(name: str):
    # Lazy: `python -m titan_megamoe.data` and `--help` should not wait for torch.
    if name in __all__:
        from . import ops

        return getattr(ops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
