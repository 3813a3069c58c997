"""``mega_moe`` in TorchTitan: overrides, strategies, configuration, and the shims that 0.3.0 needs."""
