"""The HTTP server, on Starlette and uvicorn: needs the extra ``serve``.

`paged_jax.serve` is its command line. To mount it in an application of your own::

    service = Service(engine, Settings(model_name="mine"))
    app = Starlette(routes=[Mount("/llm", create_app(service))], lifespan=service.lifespan)

The service's lifespan runs the engine, so the outer application must include it.
"""

from paged_jax.server.app import create_app
from paged_jax.server.limits import Limits
from paged_jax.server.service import Service, Settings

__all__ = ["Limits", "Service", "Settings", "create_app"]
