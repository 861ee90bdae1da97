"""Command line for the HTTP server: ``python -m paged_jax.serve``."""

import argparse
import contextlib
import dataclasses
import gc
import ipaddress
import logging
import math
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import jax

from paged_jax import distributed
from paged_jax.command_line import (
    Parser,
    add_engine_arguments,
    add_process_arguments,
    engine_options,
    join_processes,
    take_gpu_memory,
)
from paged_jax.engine.engine import Engine
from paged_jax.formatting import format_bytes
from paged_jax.models.gguf_file import is_gguf
from paged_jax.models.hub import is_model_name
from paged_jax.models.text.reasoning import FORMATS as REASONING_FORMATS
from paged_jax.monitoring import check_profile_folder

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


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal or a failure of the engine, and return the exit status.

    Expected errors are printed in one line.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    return parser.run(lambda: _serve(args))


def _serve(args: argparse.Namespace) -> None:
    _check(args)
    take_gpu_memory()
    join_processes(args)
    if not distributed.is_leader():
        Engine(**engine_options(args)).follow()
        return
    settings = _settings(args)
    # Bind the address first: an address in use is then reported before the model is loaded, which
    # can take minutes.
    listener = _listener(args.host, args.port) if args.uds is None else _unix_listener(args.uds)
    hint = _hint(url_of(listener), settings)
    startup = Startup(lambda note: _make_service(args, settings, hint, note))
    with logs_on_stderr(args.log_level, args.log_format):
        server = Server(
            startup,
            _fit_open_files(settings.limits),
            drain_timeout=args.drain_timeout,
            grace=args.grace,
            timeout_keep_alive=args.keep_alive,
            root_path=args.root_path,
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
    args: argparse.Namespace, settings: Settings, hint: str, note: Callable[[str], None]
) -> Service:
    """Load the model, compile its programs, and return the service.

    Args:
      args: the parsed arguments of the command line.
      settings: settings of the service.
      hint: line that is logged when the engine is ready, see `_hint`.
      note: function that is called with each line about the progress. The lines are also logged.
    """

    def report(line: str) -> None:
        note(line)
        _logger.info(line)

    start = time.perf_counter()
    report("loading the model")
    options = engine_options(args)
    if args.log_format == "json":
        options.setdefault("show_progress", False)  # stderr has only JSON
    engine = Engine(**options)
    if not args.no_warmup:
        engine.warmup(lambda done, total, name: report(f"compiling {done} of {total}: {name}"))
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
    server = parser.add_argument_group("server")
    _add_access_arguments(server)
    _add_client_arguments(server)
    _add_process_arguments(server)
    limits = parser.add_argument_group(
        "limits",
        "maximum values for requests and connections; error messages name the limit that was "
        "exceeded",
    )
    for field in dataclasses.fields(Limits):
        default = "" if field.default is None else f"; default: {field.default}"
        limits.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=float if isinstance(field.default, float) else int,
            default=field.default,
            metavar="N",
            help=field.metadata["help"] + default,
        )
    return parser


def _add_access_arguments(server: argparse._ArgumentGroup) -> None:
    address = "127.0.0.1"
    server.add_argument("--host", default=address, help=f"address to listen on; default: {address}")
    server.add_argument(
        "--port",
        type=int,
        default=5000,
        metavar="N",
        help="port to listen on; 0 picks a free port; default: 5000",
    )
    server.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="model name in requests and responses; default: the name of the model's folder or "
        "file",
    )
    server.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="key that clients must send for all routes except the probes and the chat page; may "
        "be repeated, for example for several tenants",
    )
    server.add_argument(
        "--admin-key",
        metavar="KEY",
        help="key for the cache page and for the routes that change the engine; without it, these "
        "routes are disabled; the page is disabled too if there are API keys",
    )
    server.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="accepted name in the Host header; may be repeated; default: all names, or only "
        "localhost, 127.0.0.1 and ::1 if --host is a loopback address",
    )
    server.add_argument(
        "--keep-alive",
        type=int,
        default=75,
        metavar="SECONDS",
        help="seconds after which an idle connection is closed; must be more than the timeout of a "
        "load balancer in front of the server, which is often 60; default: 75",
    )
    server.add_argument(
        "--root-path",
        default="",
        metavar="PATH",
        help="path under which a proxy serves this server, such as /llm",
    )


def _add_client_arguments(server: argparse._ArgumentGroup) -> None:
    server.add_argument(
        "--allowed-origin",
        action="append",
        metavar="ORIGIN",
        help="web site that may use the server from a browser (CORS), such as "
        "https://example.com; may be repeated; * allows all; default: none",
    )
    server.add_argument(
        "--ping-seconds",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="seconds without events after which a stream sends a ping, so that proxies and "
        "clients keep the connection open; 0 for no pings; default: 15",
    )
    server.add_argument(
        "--uds",
        metavar="PATH",
        help="listen on a Unix socket at this path instead of a host and port",
    )
    server.add_argument(
        "--reasoning-format",
        default="auto",
        choices=("auto", "none", *REASONING_FORMATS),
        help="format of the reasoning in the generated text; answers of chats have the reasoning "
        "in a separate field; auto detects the format from the chat template, none leaves the "
        "reasoning in the content; default: auto",
    )


def _add_process_arguments(server: argparse._ArgumentGroup) -> None:
    server.add_argument(
        "--no-warmup",
        action="store_true",
        help="compile each program when a request first needs it, instead of compiling all "
        "programs before the server is ready",
    )
    server.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="maximum seconds for running requests to finish after SIGTERM or Ctrl-C; default: 30",
    )
    server.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="minimum seconds after SIGTERM during which new requests are answered with the status "
        "503, so that a load balancer notices the shutdown; default: 5",
    )
    server.add_argument(
        "--stall-seconds",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="/health reports a stalled engine if it has work but finishes no step for this many "
        "seconds; default: 60",
    )
    server.add_argument(
        "--profile",
        metavar="DIR",
        help="folder for profiles, which are recorded between POST /start_profile and POST "
        "/stop_profile; both routes require the admin key",
    )
    server.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="minimum level of log lines; info logs each request, debug also logs probes; "
        "default: info",
    )
    server.add_argument(
        "--log-format",
        default="text",
        choices=get_args(LogFormat),
        help="format of log lines: plain text, or a JSON object per line; default: text",
    )


def _check(args: argparse.Namespace) -> None:
    keys = _keys(args)
    if args.uds is None and not _is_loopback(args.host) and not keys:
        raise ValueError(
            f"--host must be a loopback address if there is no --api-key, got {args.host}: any "
            "client that reaches the port could use the model. Add --api-key."
        )
    admin_key = _admin_key(args)
    given = [*keys, *([] if admin_key is None else [admin_key])]
    if not all(given):
        raise ValueError("--api-key and --admin-key must not be empty.")
    if not all(key == key.strip() and key.isprintable() for key in given):
        # Clients cannot send such keys in an HTTP header.
        raise ValueError(
            "--api-key and --admin-key must be printable, without spaces at the start or the end."
        )
    if admin_key in keys:
        raise ValueError("--admin-key must differ from each --api-key.")
    if args.profile is not None:
        if admin_key is None:
            raise ValueError(
                "--profile must be given together with --admin-key, because the routes that record "
                "profiles require the admin key."
            )
        check_profile_folder(args.profile)
    if args.served_model_name == "":
        raise ValueError(
            "--served-model-name must not be empty. Omit it to use the name of the model's folder "
            "or file."
        )
    path = args.root_path
    if path and not (path.startswith("/") and path.isascii() and not path.endswith("/")):
        raise ValueError(
            f"--root-path must be a path in ASCII that begins with / and does not end with /, got "
            f"{path}."
        )
    for name in args.allowed_host or ():
        _check_host_name(name)
    if not 0 <= args.port < 2**16:
        raise ValueError(f"--port must be in 0..65535, got {args.port}.")
    for name in ("drain_timeout", "grace", "keep_alive", "stall_seconds"):
        seconds = getattr(args, name)
        if not 0 <= seconds < math.inf:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be a finite number of seconds >= 0, got {seconds}.")


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


def _keys(args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(args.api_key or os.environ.get(_API_KEY, "").split())


def _admin_key(args: argparse.Namespace) -> str | None:
    if args.admin_key is not None:
        return args.admin_key
    # Strip the value, because files with secrets often end with a newline.
    return os.environ.get(_ADMIN_KEY, "").strip() or None


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


def _settings(args: argparse.Namespace) -> Settings:
    hosts = args.allowed_host or ((*_LOOPBACK, args.host) if _is_loopback(args.host) else None)
    return Settings(
        model_name=args.served_model_name or _name_of(args.model),
        limits=Limits(
            **{field.name: getattr(args, field.name) for field in dataclasses.fields(Limits)}
        ),
        api_keys=_keys(args),
        admin_key=_admin_key(args),
        allowed_hosts=None if hosts is None else tuple(sorted({h.lower() for h in hosts})),
        stall_seconds=args.stall_seconds,
        profile_folder=args.profile,
        reasoning_format=args.reasoning_format,
        ping_seconds=args.ping_seconds,
        allowed_origins=tuple(args.allowed_origin or ()),
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main())
