"""Errors of configs, of files without usable weights, and of models that cannot be saved."""


class UnsupportedConfigError(ValueError):
    """The config is valid but needs a feature that this library does not support."""


class WeightsError(ValueError):
    """Error for files that do not contain the weights of the model, or are damaged."""


class SaveError(ValueError):
    """Error for a quantised matrix that the formats of saved models cannot represent."""
