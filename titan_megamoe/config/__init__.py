"""The TOML front end: TorchTitan 0.2's TOML files, 0.3.0's configuration fields, and our own sections, in one file."""
