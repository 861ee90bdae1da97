"""The command ``paged-jax COMMAND``, which runs the module ``paged_jax.COMMAND``."""

import argparse
import importlib
import sys

from paged_jax import __version__

COMMANDS = {
    "generate": "generate text from prompts",
    "chat": "talk to a chat model in the terminal",
    "serve": "serve a model over HTTP, with the APIs of OpenAI and Anthropic",
    "bench": "measure the latencies and rates of a running server",
    "plan": "show the memory that a model needs, and how many sequences fit",
}
_USAGE = """usage: paged-jax COMMAND ...

{commands}

`paged-jax COMMAND --help` lists the options of a command. Without --model, a small bundled model
runs. `paged-jax --print-completion SHELL` prints the completion for bash, zsh, tcsh or fish.
Examples:

  paged-jax chat --model HuggingFaceTB/SmolLM2-135M-Instruct --download
  paged-jax serve --model ./model.gguf --port 8000
  paged-jax plan --model ./llama-3-8b --device h100
"""
_COMPLETION = "--print-completion"
# Maps metavars to `shtab`'s names of completions. A metavar is the word for the value of an option,
# such as FILE in "--prompts-file FILE".
_PATHS = {"FILE": "FILE", "PATH": "FILE", "MODEL": "FILE", "DIR": "DIRECTORY"}


def main(argv: list[str] | None = None) -> int:
    """Run the command that the first argument names, and return its exit status."""
    command, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        lines = (f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
        print(_USAGE.format(commands="\n".join(lines)), end="")
        return 0
    if command == "--version":
        print(f"paged_jax {__version__}")
        return 0
    if command == _COMPLETION:
        return _print_completion(*arguments[:1])
    if command not in COMMANDS:
        names = ", ".join(COMMANDS)
        return _fail(f"COMMAND must be one of {names}, got {command}")
    # Import only this command: other commands may need extras that are not installed, and each
    # import takes seconds.
    try:
        module = importlib.import_module(f"paged_jax.{command}")
    except ImportError as error:
        if not str(error).startswith("paged_jax: "):  # see `paged_jax.flax_versions`
            raise
        return _fail(str(error).removeprefix("paged_jax: "))
    return module.main(arguments)


def _fail(message: str) -> int:
    print(f"paged-jax: error: {message}", file=sys.stderr)
    return 2


def _print_completion(shell: str = "") -> int:
    """Print the completion script of a shell, for all commands and options.

    Return the exit status.
    """
    try:
        import shtab
    except ModuleNotFoundError:
        return _fail("shtab is not installed. Run: pip install 'paged-jax[completion]'")
    if shell not in shtab.SUPPORTED_SHELLS:
        names = ", ".join(shtab.SUPPORTED_SHELLS)
        return _fail(f"{_COMPLETION} must be one of {names}, got {shell or 'nothing'}")
    parser = argparse.ArgumentParser(prog="paged-jax")
    parser.add_argument("--version", action="store_true", help="show the version")
    parser.add_argument(
        _COMPLETION, choices=shtab.SUPPORTED_SHELLS, help="print the completion script of a shell"
    )
    commands = parser.add_subparsers()
    for name, text in COMMANDS.items():
        try:
            parents = [importlib.import_module(f"paged_jax.{name}").make_parser()]
        except SystemExit:  # an extra of this command is not installed
            parents = []
        subparser = commands.add_parser(name, parents=parents, add_help=not parents, help=text)
        for action in subparser._actions:
            if action.metavar in _PATHS:
                vars(action)["complete"] = getattr(shtab, _PATHS[action.metavar])
    print(shtab.complete(parser, shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
