"""Errors of configs that need an unsupported feature, and of files without usable weights."""


class UnsupportedConfigError(ValueError):
    """The config is valid but needs a feature that this library does not support."""


class WeightsError(ValueError):
    """Error for files that do not contain the weights of the model, or are damaged."""
