"""One command for all command lines: ``paged-jax COMMAND`` or ``python -m paged_jax COMMAND``."""

import importlib
import sys

from paged_jax import __version__

COMMANDS = {
    "generate": "generate text from prompts",
    "chat": "talk to a chat model in the terminal",
    "serve": "serve a model over HTTP, for clients of OpenAI and Anthropic",
    "bench": "measure a running server: rates and latencies",
    "plan": "show the memory that a model needs, and how many sequences fit",
}
_USAGE = """usage: paged-jax COMMAND ...

{commands}

`paged-jax COMMAND --help` lists the options of a command. Without --model, a small bundled model
runs. Examples:

  paged-jax chat --model HuggingFaceTB/SmolLM2-135M-Instruct --download
  paged-jax serve --model ./model.gguf --port 8000
  paged-jax plan --model ./llama-3-8b --device h100
"""


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
    if command not in COMMANDS:
        names = ", ".join(COMMANDS)
        print(f"paged-jax: error: COMMAND must be one of {names}, got {command}", file=sys.stderr)
        return 2
    # Some commands need extras, and all need seconds to import.
    return importlib.import_module(f"paged_jax.{command}").main(arguments)


if __name__ == "__main__":
    sys.exit(main())
