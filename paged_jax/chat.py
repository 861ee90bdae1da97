"""Command line for chats in the terminal: ``python -m paged_jax.chat --model PATH``."""

import contextlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from paged_jax import distributed
from paged_jax.command_line import (
    Parser,
    add_engine_arguments,
    add_process_arguments,
    add_quiet_argument,
    engine_options,
    given_options,
    join_processes,
    one_line,
    status_of,
)
from paged_jax.formatting import format_bytes
from paged_jax.generate import (
    add_sampling_arguments,
    print_summary,
    recommended_params,
)
from paged_jax.llm import LLM
from paged_jax.monitoring import Status
from paged_jax.options import options_of
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.outputs import RequestOutput

_MAX_TOKENS = 1024
# Messages that are commands of this program and are not sent to the model.
_RESET, _STATS, _HELP = ("/reset", "/clear"), "/stats", "/help"
_COMMANDS = (
    "/reset starts a new conversation, /stats shows the speed of the last answer and the memory, "
    "Ctrl-C stops an answer, /exit or Ctrl-D ends the program."
)
_EXIT = ("/exit", "/quit", "/bye")
# Matches a message that is probably meant as a command. It does not match paths like /etc/hosts.
_COMMAND = re.compile(r"/[a-z]+")
# One quarter of the context is kept free for the answer. If the prompt is longer than the other
# three quarters, the oldest messages are dropped.
_FREE_PART = 4


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status. Expected errors print one line."""
    parser = make_parser()
    args = parser.parse_args(argv)
    status = status_of(args)
    return parser.run(lambda: _run(args, status), clear=status.leave_line)


def make_parser() -> Parser:
    """Return the parser of the command ``chat``."""
    parser = Parser(
        "chat",
        examples=(
            "--model HuggingFaceTB/SmolLM2-135M-Instruct --download",
            '--model ./model.gguf --system "Answer in one sentence."',
            "--model ./folder --dtype int8",
        ),
        description="Talk to a chat model. Each line of standard input is a message. The answers "
        f"are streamed to standard output. {_COMMANDS}",
    )
    add_engine_arguments(parser, defaults={"max_num_seqs": "1", "steps_per_dispatch": "1"})
    add_process_arguments(parser)
    sampling = parser.add_argument_group("sampling")
    add_sampling_arguments(sampling, default_max_tokens=_MAX_TOKENS, has_samples=False)
    conversation = parser.add_argument_group("conversation")
    conversation.add_argument(
        "--system", metavar="TEXT", help="system message; default: from the chat template"
    )
    add_quiet_argument(conversation)
    return parser


def _run(args: Any, status: Status) -> None:
    join_processes(args)
    options = {"max_num_seqs": 1, "steps_per_dispatch": 1, **engine_options(args)}
    sampling_values = given_options(args, options_of(SamplingParams))
    # Raises an error for invalid parameters before the model is loaded.
    SamplingParams(**sampling_values)
    status.say("loading the model")
    llm = LLM(**options, on_compile=status.say)
    if not distributed.is_leader():
        status.clear()
        llm.follow()
        return
    params = recommended_params(llm, sampling_values, default_max_tokens=_MAX_TOKENS)
    conversation = Conversation(llm, params, args.system)
    status.clear()
    for message in _read_messages():
        if message in _RESET:
            conversation.clear()
        elif message == _STATS:
            description = conversation.describe()  # may compile a program and show a status line
            status.clear()
            print(description, file=sys.stderr)
        elif message == _HELP:
            print(_COMMANDS, file=sys.stderr)
        elif message in _EXIT:
            break
        elif _COMMAND.fullmatch(message):
            print(f"There is no command {message}. {_COMMANDS}", file=sys.stderr)
        else:
            _print_answer(conversation, message, status)
    if llm.stats.num_prompt_tokens:
        print_summary(llm, args, status)


def _read_messages() -> Iterator[str]:
    """Yield the lines of standard input that are not empty. A terminal shows ``>`` first."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # Windows has no such module
            import readline  # noqa: F401  (the import gives `input` line editing and history)
    while True:
        try:
            message = input("> " if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                print()
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print("\n(Ctrl-D ends the program)", file=sys.stderr)
            continue
        if message:
            yield message


def _print_answer(conversation: "Conversation", message: str, status: Status) -> None:
    """Stream the answer to a message to standard output.

    On a terminal, Ctrl-C stops the answer, but not the program. If the message is invalid, an error
    is printed.
    """
    try:
        with (
            _interrupts_as_flag() as is_interrupted,
            contextlib.closing(conversation.answer(message)) as texts,
        ):
            for text in texts:
                status.clear()
                print(text, end="", flush=True)
                status.mute()  # a status line would overwrite the text on the current line
                if is_interrupted():
                    raise KeyboardInterrupt
        print(flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print(" [stopped]", flush=True)
    except ValueError as error:
        status.leave_line()
        print(f"error: {one_line(error)}", file=sys.stderr)
    finally:
        status.unmute()


@contextlib.contextmanager
def _interrupts_as_flag() -> Iterator[Callable[[], bool]]:
    """Record Ctrl-C on a terminal instead of raising `KeyboardInterrupt`.

    Yield a function that returns whether Ctrl-C was pressed. The caller can then stop the answer
    between two steps: an exception during a step would make the engine empty its cache. A second
    Ctrl-C raises `KeyboardInterrupt` at once.
    """
    interrupts: list[bool] = []
    if not sys.stdin.isatty() or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, frame: Any) -> None:
        if interrupts:
            signal.default_int_handler(number, frame)
        interrupts.append(True)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """A conversation with a chat model.

    The previous messages are normally in the engine's prefix cache. The engine then computes only
    the new message of each prompt.

    Args:
      llm: engine with a chat model.
      params: parameters of each answer.
      system: system message; None for the default of the chat template.

    Raises:
      ValueError: the model has no tokenizer or no chat template.

    Attributes:
      messages: the messages so far, in OpenAI's format.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None):
        self._llm = llm
        self._params = params
        # The newest output of the last answer, and the time at which it was yielded.
        self._newest: tuple[RequestOutput, float] | None = None
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.clear()
        llm.chat_prompt([*self._system, {"role": "user", "content": "Hi"}])  # checks the template

    def clear(self) -> None:
        """Remove all messages except the system message."""
        self.messages = [*self._system]

    def answer(self, message: str) -> Generator[str]:
        """Add a message of the user, generate the answer, and yield the new text of each step.

        The yielded texts may be empty. If the iterator is closed early, the conversation keeps the
        text so far as the answer. If less than a quarter of the context would be free for the
        answer, the oldest messages are dropped.

        Raises:
          ValueError: the message alone exceeds the context.
          FloatingPointError: the model returned NaN.
        """
        self.messages.append({"role": "user", "content": message})
        answer, self._newest = "", None
        try:
            outputs = self._llm.stream(self._next_prompt(), self._params)
            with contextlib.closing(outputs):
                for _, output in outputs:
                    completion = output.outputs[0]
                    self._newest = output, time.perf_counter()
                    if completion.finish_reason == "error":
                        raise FloatingPointError(completion.stop_reason)
                    text, answer = completion.text[len(answer) :], completion.text
                    yield text
        finally:
            self.messages.append({"role": "assistant", "content": answer})

    def describe(self) -> str:
        """Return lines about the speed of the last answer and about the memory."""
        llm = self._llm
        lines = [] if self._newest is None else [_describe_answer(*self._newest)]
        memory = f"{format_bytes(llm.cache.nbytes)} for {llm.num_blocks} blocks of the KV cache"
        with contextlib.suppress(RuntimeError):  # some weights are on devices of other processes
            weights = sum(weight.nbytes for weight in llm.weights)
            memory += f", {format_bytes(weights)} for the weights"
        return "\n".join(
            [*lines, f"conversation: {len(self.messages)} messages | memory: {memory}"]
        )

    def _next_prompt(self) -> Any:
        """Return the prompt for the next answer.

        While the prompt is longer than three quarters of the context, drop the oldest message and
        its answer.
        """
        first, limit = len(self._system), self._llm.max_length
        while True:
            prompt: Any = self._llm.chat_prompt(self.messages)
            has_room = len(prompt["prompt_token_ids"]) <= limit - limit // _FREE_PART
            if has_room or len(self.messages) <= first + 1:
                return prompt
            del self.messages[first : first + 2]  # a message and its answer


def _describe_answer(output: RequestOutput, receive_time: float) -> str:
    """Return a line with the length and the speed of an answer.

    Args:
      output: the newest output of the answer.
      receive_time: time at which `output` was yielded, in seconds of ``time.perf_counter()``. It
        is used instead of the finish time if the answer was stopped early.
    """
    metrics, num_tokens = output.metrics, len(output.outputs[0].token_ids)
    if metrics.first_token_time is None:
        return "last answer: no tokens"
    seconds = (metrics.finished_time or receive_time) - metrics.first_token_time
    speed = f"{(num_tokens - 1) / seconds:.1f}" if num_tokens > 1 else "-"
    return (
        f"last answer: {num_tokens} tokens, {speed} tokens/s | "
        f"first token: {metrics.first_token_time - metrics.arrival_time:.2f} s | "
        f"prompt: {len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} cached"
    )


if __name__ == "__main__":
    sys.exit(main())
