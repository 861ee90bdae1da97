"""Error for configs that need an unsupported feature."""


class UnsupportedConfigError(ValueError):
    """The config is valid but needs a feature that this library does not support."""
