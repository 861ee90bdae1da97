"""Ops over KV blocks: attention, writes, copies of blocks, and linear layers of experts.

A name is imported when it is first used; ``__init__.pyi`` lists the names and their modules.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
