"""The error every problem with a configuration is reported as."""


class ConfigError(ValueError):
    """One paragraph: where (file and key, or command line), what was found, what would be right."""
