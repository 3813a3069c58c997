"""What a measurement was made on."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform

import torch


def describe_environment() -> dict:
    """Versions, date and device, as recorded beside every result."""
    versions = {}
    for package in ("torchtitan", "triton", "torchao"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"none ({platform.processor() or platform.machine()})",
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **versions,
    }
