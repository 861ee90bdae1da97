"""Command line for text generation: ``python -m paged_jax.generate --prompt "It is"``."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paged_jax import distributed
from paged_jax.cache.blocks.table_drawing import draw_tables
from paged_jax.cache_map import changes, snapshot
from paged_jax.command_line import (
    Parser,
    add_engine_arguments,
    add_option_flags,
    add_process_arguments,
    add_quiet_argument,
    engine_options,
    given_options,
    join_processes,
    read_prompts,
    status_of,
)
from paged_jax.engine.request_factory import Prompt
from paged_jax.formatting import LINE_ENDS, format_bytes
from paged_jax.llm import LLM
from paged_jax.models.layer_groups import LayerGroup
from paged_jax.monitoring import Status, check_profile_folder, profiled
from paged_jax.options import options_of
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.outputs import RequestOutput

_MAX_NUM_SEQS = 16
_MAX_TOKENS = 128
# Maximum number of cache events that --show-blocks prints.
_MAX_EVENTS = 50


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status. Expected errors print one line."""
    parser = make_parser()
    args = parser.parse_args(argv)
    status = status_of(args)
    return parser.run(lambda: _run(args, status), clear=status.leave_line)


def make_parser() -> Parser:
    """Return the parser of the command ``generate``."""
    parser = Parser(
        "generate",
        examples=(
            '--prompt "It is a truth universally acknowledged"',
            '--model ./model.gguf --chat --prompt "Why is the sky blue?" --temperature 0',
            "--model ORG/NAME --download --prompts-file prompts.jsonl --json",
        ),
        description="Generate text from prompts, through a paged KV cache.",
    )
    add_engine_arguments(
        parser,
        defaults={
            "max_num_seqs": f"{_MAX_NUM_SEQS}, or the number of samples if that is smaller",
            "steps_per_dispatch": "8, or 1 for a single sample",
        },
    )
    add_process_arguments(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to continue; - reads it from standard input")
    source.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="file with a prompt in each line; a .jsonl or .ndjson file must have a JSON object "
        "with the field prompt or prompt_token_ids in each line",
    )
    sampling = parser.add_argument_group("sampling")
    add_sampling_arguments(sampling, default_max_tokens=_MAX_TOKENS, has_samples=True)
    output = parser.add_argument_group("input and output")
    output.add_argument(
        "--chat", action="store_true", help="wrap each prompt in the model's chat template"
    )
    output.add_argument(
        "--json", action="store_true", help="print a JSON object instead of text for each prompt"
    )
    add_quiet_argument(output)
    output.add_argument(
        "--show-blocks",
        action="store_true",
        help="print the block tables at the start, when samples first share blocks, in the step "
        "with the most used blocks, and at the end, and list the cache events; samples share "
        "blocks with --n and a prompt longer than a block",
    )
    output.add_argument(
        "--profile",
        metavar="DIR",
        help="write a profile of the generation to this folder, for TensorBoard, XProf or Perfetto",
    )
    return parser


def add_sampling_arguments(
    sampling: argparse._ArgumentGroup, *, default_max_tokens: int, has_samples: bool
) -> None:
    """Add the flags for sampling parameters. `given_options` reads their values.

    Args:
      sampling: an argument group of the parser.
      default_max_tokens: default of ``--max-tokens`` for models that recommend no value. It is used
        only in the help text.
      has_samples: whether to add ``--n``, the number of samples.
    """
    options = options_of(SamplingParams)
    defaults = {option.name: "the model's value" for option in options if option.is_recommended}
    defaults |= {"max_tokens": f"the model's value, or {default_max_tokens}", "seed": "0"}
    shown_options = [option for option in options if has_samples or option.name != "n"]
    add_option_flags(sampling, shown_options, defaults)


def _run(args: argparse.Namespace, status: Status) -> None:
    join_processes(args)
    options = engine_options(args)
    prompts = _read_prompts(args)
    sampling_values = given_options(args, options_of(SamplingParams))
    # Raises an error for invalid parameters before the model is loaded.
    num_samples = SamplingParams(**sampling_values).n * len(prompts)
    if args.profile is not None:
        check_profile_folder(args.profile)
    status.say("loading the model")
    is_stream = num_samples == 1
    options.setdefault("max_num_seqs", min(_MAX_NUM_SEQS, num_samples))
    if is_stream or args.show_blocks:
        options.setdefault("steps_per_dispatch", 1)
    llm = LLM(**options, on_compile=status.say)
    if not distributed.is_leader():
        status.clear()
        llm.follow()
        return
    if args.chat:
        prompts = [_as_chat(llm, prompt) for prompt in prompts]
    params = recommended_params(llm, sampling_values, default_max_tokens=_MAX_TOKENS)
    write = _write_json if args.json else _Streamer() if is_stream else _write_text
    pictures = _BlockPictures(llm, status) if args.show_blocks else None
    status.clear()
    with profiled(args.profile):
        _complete(llm, prompts, params, write, pictures, status)
    if pictures is not None:
        pictures.finish()
    print_summary(llm, args, status)


def _complete(
    llm: LLM,
    prompts: list[Prompt],
    params: SamplingParams,
    write: Callable[[RequestOutput, LLM], None],
    pictures: "_BlockPictures | None",
    status: Status,
) -> None:
    """Complete the prompts and write their outputs in the order of the prompts.

    Args:
      llm: the engine.
      prompts: the prompts.
      params: sampling parameters of all prompts.
      write: function that writes an output. A `_Streamer` is called at each step with the output
        so far. Other functions are called once per prompt, with the finished output.
      pictures: drawings of the block tables; None if they are not wanted.
      status: status line, which shows a progress bar if there are several prompts.
    """
    is_stream = isinstance(write, _Streamer)
    bar = status.bar("requests", unit="req", total=len(prompts))
    note = llm.speed_note()
    with (
        bar if len(prompts) > 1 else contextlib.nullcontext(),
        contextlib.closing(llm.stream(prompts, params)) as outputs,
    ):
        displayed_outputs = _with_progress(outputs, lambda num: status.advance(num, note), pictures)
        for output in _in_order(displayed_outputs, partial=is_stream):
            status.clear()
            _raise_error(output)
            write(output, llm)
            if is_stream:
                status.mute()  # a status line would overwrite the text on the current line
    status.unmute()


def recommended_params(
    llm: LLM, sampling_values: dict[str, Any], *, default_max_tokens: int
) -> SamplingParams:
    """Return sampling parameters: the user's values, and the model's defaults for the others.

    Args:
      llm: engine with the model.
      sampling_values: the user's values, see `given_options`.
      default_max_tokens: ``max_tokens`` if neither the user nor the model sets it.

    Raises:
      ValueError: a value of the model's generation_config.json is invalid.
    """
    if "max_tokens" not in llm.generation_config.sampling_defaults:
        sampling_values = {"max_tokens": default_max_tokens, **sampling_values}
    try:
        return llm.get_default_sampling_params(**sampling_values)
    except ValueError as error:  # not caused by the user's values, which were checked before
        raise ValueError(f"the model's generation_config.json: {error}") from None


def _read_prompts(args: argparse.Namespace) -> list[Prompt]:
    if args.prompt is not None:
        # Remove the newline that most programs write at the end of their output.
        text = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
        if not text:
            raise ValueError("--prompt must not be empty.")
        return [text]
    return read_prompts("--prompts-file", args.prompts_file)


def _as_chat(llm: LLM, prompt: Prompt) -> Prompt:
    fields = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
    text = fields.pop("prompt", None)
    if not isinstance(text, str) or "prompt_token_ids" in fields:
        raise ValueError(
            "--chat must be used only with text prompts, got a prompt without text or with "
            "prompt_token_ids."
        )
    chat: Any = llm.chat_prompt([{"role": "user", "content": text}])
    return {**chat, **fields}


def _raise_error(output: RequestOutput) -> None:
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise FloatingPointError(completion.stop_reason)


def _with_progress(
    outputs: Iterator[tuple[int, RequestOutput]],
    advance: Callable[[int], None],
    pictures: "_BlockPictures | None",
) -> Iterator[tuple[int, RequestOutput]]:
    """Yield the items of `outputs` unchanged. Before each, update the pictures and the bar.

    Args:
      outputs: pairs of a prompt's index and its output so far.
      advance: function that advances the bar. It is called with 1 for a finished output and with 0
        for others.
      pictures: drawings of the block tables; None if they are not wanted.
    """
    for index, output in outputs:
        if pictures is not None:
            pictures.update()
        advance(int(output.finished))
        yield index, output


def _in_order(
    outputs: Iterator[tuple[int, RequestOutput]], *, partial: bool
) -> Iterator[RequestOutput]:
    """Yield the finished outputs in the order of the prompts.

    If `partial`, there is only one prompt: yield each of its outputs, also unfinished ones.
    """
    finished_outputs: dict[int, RequestOutput] = {}
    next_index = 0
    for index, output in outputs:
        if partial:
            yield output
        elif output.finished:
            finished_outputs[index] = output
        while next_index in finished_outputs:
            yield finished_outputs.pop(next_index)
            next_index += 1


class _Streamer:
    """Function object that prints the new text of a request with a single sample.

    It is called with each output of the request, unfinished outputs included.
    """

    def __init__(self) -> None:
        self._num_written = 0

    def __call__(self, output: RequestOutput, llm: LLM) -> None:
        text = output.outputs[0].text
        print(text[self._num_written :], end="\n" if output.finished else "", flush=True)
        self._num_written = len(text)


def _write_text(output: RequestOutput, llm: LLM) -> None:
    for completion in output.outputs:
        print(f"=== prompt {output.request_id}, sample {completion.index}\n{completion.text}")
    sys.stdout.flush()


def _write_json(output: RequestOutput, llm: LLM) -> None:
    metrics, stats = output.metrics, llm.stats
    assert metrics.first_token_time is not None and metrics.finished_time is not None
    num_generated = sum(len(completion.token_ids) for completion in output.outputs)
    record = {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "cumulative_logprob": completion.cumulative_logprob,
            }
            for completion in output.outputs
        ],
        "stats": {
            "num_prompt_tokens": len(output.prompt_token_ids),
            "num_generated_tokens": num_generated,
            "time_to_first_token_s": metrics.first_token_time - metrics.arrival_time,
            "total_s": metrics.finished_time - metrics.arrival_time,
            "compile_s": stats.compile_seconds,
            "peak_blocks": stats.peak_num_blocks,
            "num_blocks": llm.num_blocks,
        },
    }
    print(json.dumps(record, ensure_ascii=False).translate(str.maketrans(LINE_ENDS)), flush=True)


class _BlockPictures:
    """Drawings of the block tables for ``--show-blocks``, printed to stderr.

    There are up to four: before the first step, after the first step in which sequences share
    blocks, after the step with the most used blocks, and at the end.
    """

    def __init__(self, llm: LLM, status: Status):
        self._llm = llm
        self._status = status
        self._last = snapshot(llm)
        self._max_used, self._fullest = 0, ""
        self._first_shared = ""
        self._events: list[str] = []
        self._print(self._draw("before"))

    def update(self) -> None:
        """Record the cache events since the last call. Draw this step if `finish` may print it."""
        now = snapshot(self._llm)
        self._events += [event.text for event in changes(self._last, now)]
        self._last = now
        if now.num_shared and not self._first_shared:
            self._first_shared = self._draw("when blocks are first shared")
        if now.num_used >= self._max_used:
            self._max_used, self._fullest = now.num_used, self._draw("at its fullest")

    def finish(self) -> None:
        """Print the stored drawings, the list of events, and a drawing of the final state."""
        self.update()
        num_omitted = len(self._events) - _MAX_EVENTS
        omitted = [f"and {num_omitted} more"] if num_omitted > 0 else []
        events = [f"  {event}" for event in (*self._events[:_MAX_EVENTS], *omitted)]
        if self._first_shared:
            self._print(self._first_shared)
        self._print(self._fullest)
        self._print("\n".join(["events:", *events]))
        self._print(self._draw("after"))

    def _draw(self, title: str) -> str:
        groups, layers = self._llm.cache.block_groups, self._llm.config.layer_groups
        if len(groups) == 1:
            return draw_tables(groups[0].tables, title)
        return "\n".join(
            draw_tables(group.tables, f"{title}, {_layers(group_layers)}")
            for group, group_layers in zip(groups, layers, strict=True)
        )

    def _print(self, text: str) -> None:
        self._status.clear()
        print(f"\n{text}", file=sys.stderr)


def print_summary(llm: LLM, args: argparse.Namespace, status: Status) -> None:
    """Print the line of `summarise` to stderr, unless ``--quiet`` is given."""
    if args.quiet:
        return
    summary = summarise(llm)  # may compile a program, which the status line shows
    status.clear()
    print(summary, file=sys.stderr)


def summarise(llm: LLM) -> str:
    """Return a line with statistics of all requests that the engine has run.

    It has the numbers of tokens, the speeds, the time to the first token of the first request, the
    time spent compiling, and the peak use of the cache.
    """
    stats = llm.stats
    num_bytes = llm.cache.nbytes * stats.peak_num_blocks // llm.num_blocks
    first = stats.first_token_seconds
    return (
        f"prompt: {stats.num_prompt_tokens} tokens, "
        f"{_rate(stats.num_prompt_tokens, stats.prefill_seconds)} | "
        f"generated: {stats.num_generated_tokens} tokens, "
        f"{_rate(stats.num_decode_tokens, stats.decode_seconds)} | "
        f"first token: {first:.2f} s | compiling: {stats.compile_seconds:.1f} s | "
        f"blocks: {stats.peak_num_blocks} of {llm.num_blocks} | "
        f"cache: {format_bytes(num_bytes)} of {format_bytes(llm.cache.nbytes)} used at the peak"
    )


def _layers(group: LayerGroup) -> str:
    text = f"{len(group.layers)} layers"
    return f"{text} {group.retention.text} tokens" if group.retention.frees else text


def _rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens / seconds:.1f} tokens/s" if seconds else "- tokens/s"


if __name__ == "__main__":
    sys.exit(main())
