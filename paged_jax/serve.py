"""Command line for the HTTP server: ``python -m paged_jax.serve``.

`ServerOptions` has the options of the server. Without an API key, it refuses an address that other
machines can reach.
"""

import argparse
import contextlib
import dataclasses
import gc
import ipaddress
import logging
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import jax

from paged_jax import distributed
from paged_jax.command_line import (
    Parser,
    add_engine_arguments,
    add_option_flags,
    add_process_arguments,
    engine_options,
    given_options,
    join_processes,
    take_gpu_memory,
)
from paged_jax.engine.engine import Engine
from paged_jax.formatting import format_bytes
from paged_jax.models.gguf_file import is_gguf
from paged_jax.models.hub import is_model_name
from paged_jax.models.text.reasoning import FORMATS as REASONING_FORMATS
from paged_jax.monitoring import check_profile_folder
from paged_jax.options import SECONDS, SWITCH, check_options, integer, one_of, option, options_of

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None
try:
    from paged_jax.server import Limits, Service, Settings
    from paged_jax.server.app import Startup
    from paged_jax.server.http_server import Server, url_of
    from paged_jax.server.log_output import LogFormat, logs_on_stderr
except ModuleNotFoundError as error:
    raise SystemExit(
        f"paged_jax.serve: error: {error.name} is not installed. "
        "Run: pip install 'paged-jax[serve]'"
    ) from None

_logger = logging.getLogger("paged_jax.serve")

_API_KEY = "PAGED_JAX_API_KEY"
_ADMIN_KEY = "PAGED_JAX_ADMIN_KEY"
# Python's garbage collector runs after this many new objects. Python's default is so small that the
# collector would run every few requests and take 0.5% of the server's time.
_GC_THRESHOLD = 20_000
# Maximum number of open files that are no connections: devices, libraries, model, log.
_OTHER_FILES = 124
_HOST_NAME = re.compile(r"[\w-]+(\.[\w-]+)*", re.ASCII)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Options of the server, in addition to those of the engine and to `Limits`.

    Each field is a flag of ``paged_jax.serve``.

    Raises:
      ValueError: an option is out of bounds, or does not go with another one.
    """

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(
        5000,
        "port to listen on; 0 picks a free port",
        bounds=integer("in 0..65535", ge=0, lt=2**16),
    )
    served_model_name: str | None = option(
        None,
        "model name in requests and responses",
        default_help="the name of the model's folder or file",
        metavar="NAME",
    )
    api_key: Sequence[str] = option(
        (),
        "key that clients must send for all routes except the probes and the chat page, for "
        "example one for each tenant",
        default_help="none",
        metavar="KEY",
        repr=False,
    )
    admin_key: str | None = option(
        None,
        "key for the cache page and for the routes that change the engine; without it, these "
        "routes are disabled; the page is disabled too if there are API keys",
        default_help="none",
        metavar="KEY",
        repr=False,
    )
    allowed_host: Sequence[str] = option(
        (),
        "accepted name in the Host header",
        default_help="all names, or only localhost, 127.0.0.1 and ::1 if --host is a loopback "
        "address",
        metavar="NAME",
    )
    keep_alive: int = option(
        75,
        "seconds after which an idle connection is closed; must be more than the timeout of a load "
        "balancer in front of the server, which is often 60",
        bounds=SECONDS,
        metavar="SECONDS",
    )
    root_path: str = option(
        "",
        "path under which a proxy serves this server, such as /llm",
        default_help="none",
        metavar="PATH",
    )
    allowed_origin: Sequence[str] = option(
        (),
        "web site that may use the server from a browser (CORS), such as https://example.com; * "
        "allows all",
        default_help="none",
        metavar="ORIGIN",
    )
    ping_seconds: float = option(
        15.0,
        "seconds without events after which a stream sends a ping, so that proxies and clients "
        "keep the connection open; 0 for no pings",
        bounds=SECONDS,
        metavar="SECONDS",
    )
    uds: str | None = option(
        None,
        "listen on a Unix socket at this path instead of a host and port",
        default_help="none",
        metavar="PATH",
    )
    reasoning_format: str = option(
        "auto",
        "format of the reasoning in the generated text; answers of chats have the reasoning in a "
        "separate field; auto detects the format from the chat template, none leaves the "
        "reasoning in the content",
        bounds=one_of("auto", "none", *REASONING_FORMATS),
    )
    warmup: bool = option(
        True,
        "compile all programs before the server is ready; each program is then compiled when a "
        "request first needs it",
        bounds=SWITCH,
        flag="--no-warmup",
    )
    drain_timeout: float = option(
        30.0,
        "maximum seconds for running requests to finish after SIGTERM or Ctrl-C",
        bounds=SECONDS,
        metavar="SECONDS",
    )
    grace: float = option(
        5.0,
        "minimum seconds after SIGTERM during which new requests are answered with the status 503, "
        "so that a load balancer notices the shutdown",
        bounds=SECONDS,
        metavar="SECONDS",
    )
    stall_seconds: float = option(
        60.0,
        "/health reports a stalled engine if it has work but finishes no step for this many "
        "seconds",
        bounds=SECONDS,
        metavar="SECONDS",
    )
    profile: str | None = option(
        None,
        "folder for profiles, which are recorded between POST /start_profile and POST "
        "/stop_profile; both routes require the admin key",
        default_help="none",
        metavar="DIR",
    )
    log_level: str = option(
        "info",
        "minimum level of log lines; info logs each request, debug also logs probes",
        bounds=one_of("debug", "info", "warning", "error"),
    )
    log_format: LogFormat = option(
        "text",
        "format of log lines: plain text, or a JSON object per line",
        bounds=one_of(*get_args(LogFormat)),
    )

    def __post_init__(self) -> None:
        check_options("Server", vars(self), ServerOptions)
        if self.uds is None and not _is_loopback(self.host) and not self.api_key:
            raise ValueError(
                f"--host must be a loopback address if there is no --api-key, got {self.host}: any "
                "client that reaches the port could use the model. Add --api-key."
            )
        self._check_keys()
        if self.profile is not None:
            if self.admin_key is None:
                raise ValueError(
                    "--profile must be given together with --admin-key, because the routes that "
                    "record profiles require the admin key."
                )
            check_profile_folder(self.profile)
        if self.served_model_name == "":
            raise ValueError(
                "--served-model-name must not be empty. Omit it to use the name of the model's "
                "folder or file."
            )
        path = self.root_path
        if path and not (path.startswith("/") and path.isascii() and not path.endswith("/")):
            raise ValueError(
                f"--root-path must be a path in ASCII that begins with / and does not end with /, "
                f"got {path}."
            )
        for name in self.allowed_host:
            _check_host_name(name)

    def _check_keys(self) -> None:
        keys = [*self.api_key, *([] if self.admin_key is None else [self.admin_key])]
        if not all(keys):
            raise ValueError("--api-key and --admin-key must not be empty.")
        if not all(key == key.strip() and key.isprintable() for key in keys):
            # Clients cannot send such keys in an HTTP header.
            raise ValueError(
                "--api-key and --admin-key must be printable, without spaces at the start or the "
                "end."
            )
        if self.admin_key in self.api_key:
            raise ValueError("--admin-key must differ from each --api-key.")

    def settings(self, limits: Limits, model: str | None) -> Settings:
        """Return the settings of the service.

        Args:
          limits: limits on requests and connections.
          model: value of ``--model``, which gives the default name of the model.
        """
        hosts: Sequence[str] = self.allowed_host
        if not hosts and _is_loopback(self.host):
            hosts = *_LOOPBACK, self.host
        return Settings(
            model_name=self.served_model_name or _name_of(model),
            limits=limits,
            api_keys=tuple(self.api_key),
            admin_key=self.admin_key,
            allowed_hosts=tuple(sorted({host.lower() for host in hosts})) or None,
            stall_seconds=self.stall_seconds,
            profile_folder=self.profile,
            reasoning_format=self.reasoning_format,
            ping_seconds=self.ping_seconds,
            allowed_origins=tuple(self.allowed_origin),
        )


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Return the options that the flags set, with keys from the environment if no flag has them."""
    given = given_options(args, options_of(ServerOptions))
    given.setdefault("api_key", os.environ.get(_API_KEY, "").split())
    # Strip the value, because files with secrets often end with a newline.
    given.setdefault("admin_key", os.environ.get(_ADMIN_KEY, "").strip() or None)
    return ServerOptions(**given)


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal or a failure of the engine, and return the exit status.

    Expected errors are printed in one line.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    return parser.run(lambda: _serve(args))


def _serve(args: argparse.Namespace) -> None:
    options = server_options(args)
    settings = options.settings(Limits(**given_options(args, options_of(Limits))), args.model)
    take_gpu_memory()
    join_processes(args)
    if not distributed.is_leader():
        Engine(**engine_options(args)).follow()
        return
    # Bind the address first: an address in use is then reported before the model is loaded, which
    # can take minutes.
    listener = (
        _listener(options.host, options.port)
        if options.uds is None
        else _unix_listener(options.uds)
    )
    hint = _hint(url_of(listener), settings)

    def make_engine(report: Callable[[str], None]) -> Engine:
        given = engine_options(args)
        if options.log_format == "json":
            given.setdefault("show_progress", False)  # stderr has only JSON
        engine = Engine(**given)
        if options.warmup:
            engine.warmup(lambda done, total, name: report(f"compiling {done} of {total}: {name}"))
        return engine

    startup = Startup(lambda note: _make_service(make_engine, settings, hint, note))
    with logs_on_stderr(options.log_level, options.log_format):
        server = Server(
            startup,
            _fit_open_files(settings.limits),
            drain_timeout=options.drain_timeout,
            grace=options.grace,
            timeout_keep_alive=options.keep_alive,
            root_path=options.root_path,
            log_config=None,
            access_log=False,  # `RequestLogMiddleware` logs requests
        )
        server.run([listener])
    if startup.is_making:
        # A signal arrived while the model was loading, so no request has been accepted. Exit with
        # `os._exit`, because a normal exit would wait until the running compilation has finished.
        sys.stderr.flush()
        os._exit(0)
    startup.check()
    if startup.has_failed_engine:
        # Tell systemd, Docker and Kubernetes to start a new process. The log has the exception. A
        # normal exit might wait forever for a device that is lost.
        os._exit(1)


def _fit_open_files(limits: Limits) -> Limits:
    """Raise the number of files that this process may open, so that all connections fit.

    If the system does not allow so many files, return limits with fewer connections: otherwise the
    system would reset new connections, also those of probes.
    """
    if resource is None:  # Windows has no such limit
        return limits
    wanted = limits.max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _is_below(soft, wanted):
        raised = hard if _is_below(hard, wanted) else wanted
        # macOS refuses some values that are below the hard limit.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if not _is_below(soft, wanted):
        return limits
    # If hardly any files are allowed, leave half of them to connections.
    most = max(soft - _OTHER_FILES, soft // 2)
    _logger.warning(
        "--max-connections must be at most %d, because this process may open %d files, got %d. "
        "Continuing with %d. Raise the limit, for example with ulimit -n %d.",
        most,
        soft,
        limits.max_connections,
        most,
        wanted,
    )
    return dataclasses.replace(limits, max_connections=most)


def _is_below(limit: int, number: int) -> bool:
    assert resource is not None
    return limit != resource.RLIM_INFINITY and limit < number


def _make_service(
    make_engine: Callable[[Callable[[str], None]], Engine],
    settings: Settings,
    hint: str,
    note: Callable[[str], None],
) -> Service:
    """Load the model, compile its programs, and return the service.

    Args:
      make_engine: function that loads the model, compiles its programs, and calls its argument with
        each line about the progress.
      settings: settings of the service.
      hint: line that is logged when the engine is ready, see `_hint`.
      note: function that is called with each line about the progress. The lines are also logged.
    """

    def report(line: str) -> None:
        note(line)
        _logger.info(line)

    start = time.perf_counter()
    report("loading the model")
    engine = make_engine(report)
    # `freeze` excludes all current objects from garbage collection: the model and its programs live
    # as long as the process. Otherwise each full collection would traverse them, and delay all
    # streams by a third of a second.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    report(_summary(engine, settings.model_name, time.perf_counter() - start))
    _logger.info(hint)
    return Service(engine, settings)


def _hint(url: str, settings: Settings) -> str:
    """Return a line for the log with the URL of the cache page and a curl command to try."""
    key = f'-H "Authorization: Bearer ${_API_KEY}" ' if settings.api_keys else ""
    has_page = not settings.api_keys or settings.admin_key is not None
    page = f"{url}/cache shows the cache; t" if has_page else "T"
    content = "-H 'content-type: application/json'"
    body = """-d '{"prompt": "It is", "max_tokens": 32}'"""
    return f"{page}ry: curl {url}/generate {key}{content} {body}"


def _summary(engine: Engine, name: str, seconds: float) -> str:
    """Return a line for the log with the sizes of the model and pool, and the startup time."""
    cache = engine.cache
    pool = cache.groups[0].pools.k
    [device, *others] = sorted(pool.devices(), key=lambda device: device.id)
    kind = f"{1 + len(others)} x {device.device_kind}" if others else device.device_kind
    weights, blocks = (
        format_bytes(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays)))
        for arrays in (engine.layout, cache.group_pools)
    )
    return (
        f"ready: {name} in {engine.weight_dtype}, {weights}, on {kind} | "
        f"{engine.num_blocks} blocks of {engine.block_size} tokens in {pool.dtype}, {blocks} "
        f"({engine.pool_limit}) | "
        f"{engine.max_num_seqs} slots of {engine.max_model_len} tokens | {seconds:.1f} s, "
        f"{engine.stats.compile_seconds:.1f} s of them compiling"
    )


def make_parser() -> Parser:
    """Return the parser of the command ``serve``."""
    parser = Parser(
        "serve",
        examples=(
            "--model ./model.gguf --port 8000",
            "--model ORG/NAME --download --max-num-seqs 64",
            "--model ./folder --tensor-parallel-size 4 --host 0.0.0.0",
        ),
        description="Serve a model over HTTP, with the APIs of OpenAI and Anthropic. Keys can also "
        f"be given in the environment variables {_API_KEY} (separated by spaces) and {_ADMIN_KEY}, "
        "so that they are not visible in the list of processes.",
    )
    add_engine_arguments(parser)
    add_process_arguments(parser)
    add_option_flags(parser.add_argument_group("server"), options_of(ServerOptions), {})
    limits = parser.add_argument_group(
        "limits",
        "maximum values for requests and connections; error messages name the limit that was "
        "exceeded",
    )
    add_option_flags(limits, options_of(Limits), {})
    return parser


def _check_host_name(name: str) -> None:
    """Check that a value of --allowed-host is a host name or IP address.

    Other values could never match, because Host headers are compared without port and brackets.
    """
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if not _HOST_NAME.fullmatch(name):
            raise ValueError(
                "--allowed-host must be a name or an address without scheme, port, brackets or *, "
                f"got {name}. Repeat the option for several names."
            ) from None


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address but does not listen yet."""
    listener = None
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        listener = socket.socket(family, kind, number)
        # Allow binding while connections of a previous server process are still closing.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ValueError(
            f"--host and --port must be a free address, got {host} and {port}: {error.strerror}."
        ) from None
    return listener


def _unix_listener(path: str) -> socket.socket:
    """Return a Unix socket that is bound to a path. An old socket at the path is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise ValueError(f"--uds must be a path for a new socket, got {path}: {reason}.") from None
    return listener


def _name_of(model: str | None) -> str:
    """Return the default of --served-model-name for a value of --model.

    A Hub name is returned unchanged. For a folder, this is its name, for a GGUF file its name
    without the suffix, and for None "bundled".
    """
    if model is None:
        return "bundled"
    if is_model_name(model):
        return model
    return Path(model).stem if is_gguf(model) else Path(model).resolve().name


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main())
