"""Public ops over pools of KV blocks, and grouped matmuls for mixtures of experts.

Each name is imported when it is first used. ``__init__.pyi`` lists the names and their modules.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
