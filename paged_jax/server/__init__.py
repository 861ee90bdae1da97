"""The HTTP server, built with Starlette and uvicorn. It needs the extra ``serve``.

`paged_jax.serve` is its command line. The server can also be mounted in another application::

    service = Service(engine, Settings(model_name="mine"))
    app = Starlette(routes=[Mount("/llm", create_app(service))], lifespan=service.lifespan)

The outer application must use ``service.lifespan``, because it starts and stops the engine.
"""

from paged_jax.server.app import create_app
from paged_jax.server.limits import Limits
from paged_jax.server.service import Service, Settings

__all__ = ["Limits", "Service", "Settings", "create_app"]
