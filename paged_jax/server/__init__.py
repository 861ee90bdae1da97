"""The HTTP server, on Starlette and uvicorn. It needs the extra ``serve``.

`paged_jax.serve` is its command line. To mount it in another application::

    service = Service(engine, Settings(model_name="mine"))
    app = Starlette(routes=[Mount("/llm", create_app(service))], lifespan=service.lifespan)

The lifespan of the service runs the engine, so the outer application must include it.
"""

from paged_jax.server.app import create_app
from paged_jax.server.limits import Limits
from paged_jax.server.service import Service, Settings

__all__ = ["Limits", "Service", "Settings", "create_app"]
