"""The contract of a codec: a file format of quantised weights, in a file of this folder.

A codec answers three questions, in this order:

- `Codec.matches`: does the quantisation config of a checkpoint belong to this format, and which
  modules have which `ModuleFormat`?
- `ModuleFormat.open`: which matrix do the tensors of a module stand for?
- `ModuleMatrix.decode`: which values, scales, minima and zero points do rows of the matrix have?

`ModuleFormat.encode` is the inverse, for the formats in which this library saves models.

To add a format, write a file with a codec, and add the codec to `CODECS` in `quantisation.py`. A
format with values that no code of `paged_jax.kernels.weight_formats` represents needs a code, too.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from paged_jax.models.codecs.config_entries import Entries
from paged_jax.models.codecs.module_matrix import ModuleFormat
from paged_jax.models.codecs.module_names import Quantisation


class Codec:
    """A file format of quantised weights.

    Attributes:
      methods: values of ``quant_method`` in configs of this format.
      formats: formats of modules in checkpoints of this format.
      key: key of ``config.json`` that only this format uses, or None. If the config under this key
        has no ``quant_method``, it is the first of `methods`.
      file: name of a file besides ``config.json`` that may hold the config, or None. The first of
        `methods` is the default, as for `key`.
    """

    methods: ClassVar[tuple[str, ...]]
    formats: ClassVar[tuple[type[ModuleFormat], ...]]
    key: ClassVar[str | None] = None
    file: ClassVar[str | None] = None

    def matches(self, config: Entries) -> Quantisation | None:
        """Read a quantisation config, or return None if it belongs to another format.

        Raises:
          UnsupportedConfigError: an entry changes the weights in an unsupported way, or is not
            known. The message names it.
        """
        raise NotImplementedError

    def content_of_file(self, content: Mapping[str, Any]) -> Any:
        """Return the quantisation config in the content of `file`."""
        return content
