"""Tests of hints for unknown arguments and flags."""

import inspect

import pytest

import paged_jax
from paged_jax import arguments, bench, generate, plan, serve

CALLS = [
    ("SamplingParams", {"max_new_tokens": 3}, "max_tokens"),
    ("SamplingParams", {"num_return_sequences": 3}, "n"),
    ("SamplingParams", {"stop_sequences": "a"}, "stop"),
    ("SamplingParams", {"guided_json": {}}, "structured_outputs"),
    ("SamplingParams", {"repeat_penalty": 1.1}, "repetition_penalty"),
    ("SamplingParams", {"temprature": 1.1}, "temperature"),
    ("StructuredOutputsParams", {"pattern": "a"}, "regex"),
    ("BeamSearchParams", {"num_beams": 3}, "beam_width"),
    ("LlamaConfig", {"n_layers": 3}, "num_hidden_layers"),
    ("paged_attention", {"window": 4}, "sliding_window"),
    ("paged_attention", {"softmax_scale": 4}, "scale"),
    ("paged_attention", {"page_table": 4}, "block_tables"),
    ("paged_prefill_attention", {"logits_soft_cap": 4}, "soft_cap"),
    ("ragged_paged_attention", {"scale": 4}, "sm_scale"),
    ("ragged_paged_attention", {"block_tables": 4}, "page_indices"),
    ("cascade_attention", {"seq_lens": 4}, "context_lens"),
    ("merge_attention", {"lse_aa": 4}, "lse_a"),
    ("paged_write", {"key_cache": 4}, "k_pool"),
    ("paged_rope_write", {"value_cache": 4}, "v_pool"),
    ("copy_blocks", {"k_pages": 4}, "k_pool"),
    ("rollout", {"max_new_tokens": 4}, "max_tokens"),
    ("rollout", {"num_return_sequences": 4}, "num_samples"),
    ("PagedCache.create", {"page_size": 4}, "block_size"),
    ("BlockPool.create", {"num_pages": 4}, "num_blocks"),
    ("BlockTables.create", {"max_pages_per_seq": 4}, "max_blocks_per_slot"),
    ("Decoder.from_pretrained", {"torch_dtype": "float32"}, "dtype"),
    ("Tokenizer.from_folder", {"path": "x"}, "folder"),
    ("LLM", {"tensor_parallel": 2}, "tensor_parallel_size"),
    ("Engine", {"max_batch_size": 2}, "max_num_seqs"),
    ("LLM.generate", {"prompt": "x"}, "prompts"),
    ("LLM.chat", {"conversation": []}, "messages"),
    ("LLM.generate", {"max_new_tokens": 4}, r"sampling_params=SamplingParams\(max_tokens=...\)"),
    ("LLM.stream", {"temp": 4}, r"sampling_params=SamplingParams\(temperature=...\)"),
    ("Engine.add_request", {"seed": 4}, r"params=SamplingParams\(seed=...\)"),
    ("AsyncEngine.generate", {"top_k": 4}, r"sampling_params=SamplingParams\(top_k=...\)"),
]


@pytest.mark.parametrize(("name", "given", "meant"), CALLS)
def test_names_arguments_suggests_the_right_name(name, given, meant) -> None:
    function = paged_jax
    for part in name.split("."):
        function = getattr(function, part)
    function = function.__func__ if inspect.ismethod(function) else function
    arguments = [None] if "." in name else []
    [wrong] = given
    with pytest.raises(TypeError, match=f": {wrong} is not an argument. Did you mean {meant}\\?$"):
        function(*arguments, **given)


@pytest.mark.parametrize(
    "name",
    [name for name in paged_jax.__all__ if not inspect.ismodule(getattr(paged_jax, name))],
)
def test_public_functions_and_classes_reject_unknown_arguments(name) -> None:
    """Classes that only the library instantiates are not tested."""
    made = getattr(paged_jax, name)
    returned = {"CompletionOutput", "Explanation", "Logprob", "PreemptionNote", "RequestMetrics"}
    returned |= {"RequestOutput", "Wait", "Rollout", "BeamSearchOutput", "BeamSearchSequence"}
    returned |= {"JoinedSequences", "TokenScores"}
    returned |= {"EngineStats", "Heads", "StructuredOutputError"}
    # Abstract classes, and classes that users create with class methods or not at all.
    returned |= {
        "PagedModel",
        "BlockPool",
        "BlockTables",
        "CacheGroup",
        "PagedCache",
        "Decoder",
        "Llama",
        "Tokenizer",
    }
    if name in returned:
        return
    with pytest.raises(TypeError, match="unheard_of is not an argument"):
        made(unheard_of=1)


def test_names_arguments_keeps_the_signature() -> None:
    parameters = inspect.signature(paged_jax.SamplingParams).parameters
    assert "max_tokens" in parameters and "args" not in parameters
    assert paged_jax.paged_attention.__name__ == "paged_attention"


def test_names_arguments_accepts_options_of_another_function() -> None:
    stream = paged_jax.AsyncEngine.generate(None, "x", request_id="1", timeout=2.0, client="a")
    assert inspect.isasyncgen(stream)
    with pytest.raises(AssertionError, match="must say who gets its"):
        arguments.names_arguments(lambda **options: None)


@pytest.mark.parametrize(
    ("command", "flag", "meant"),
    [
        (generate, "--temp", "--temperature"),
        (generate, "--max-new-tokens", "--max-tokens"),
        (generate, "--n-predict", "--max-tokens"),
        (generate, "-n", "--max-tokens"),
        (generate, "-p", "--prompt"),
        (generate, "--max_tokens", "--max-tokens"),
        (generate, "--num-return-sequences", "--n"),
        (generate, "--stop-sequences", "--stop"),
        (generate, "--gpu-memory-utilization", "--memory-fraction"),
        (generate, "--tp", "--tensor-parallel-size"),
        (generate, "--explain", "--show-blocks"),
        (serve, "--max-seq-len", "--max-model-len"),
        (serve, "--max-batch-size", "--max-num-seqs"),
        (plan, "--kv-cache-dtype", "--kv-dtype"),
    ],
)
def test_command_lines_suggest_the_right_flag(command, flag, meant, capsys) -> None:
    required = ["--prompt", "x"] if command is generate else []
    with pytest.raises(SystemExit):
        command.main([*required, flag, "0"])
    assert capsys.readouterr().err.rstrip().endswith(f"Did you mean {meant}?")


@pytest.mark.parametrize(
    ("command", "words", "hint"),
    [
        (generate, ["hello there"], "required. Did you mean --prompt 'hello there'?"),
        (generate, ["--prompt", "x", "folder"], "folder. Did you mean --model folder?"),
        (serve, ["org/model"], "org/model. Did you mean --model org/model?"),
        (serve, ["--model", "folder", "other"], "unrecognized arguments: other"),
        (serve, ["--enforce-eager"], "Leave it out: the engine always runs compiled programs"),
        (serve, ["--trust-remote-code"], "Leave it out: code of a checkpoint never runs"),
        (bench, ["serve"], "unrecognized arguments: serve. Leave out serve"),
    ],
)
def test_command_lines_explain_words_of_other_programs(command, words, hint, capsys) -> None:
    with pytest.raises(SystemExit):
        command.main(words)
    assert capsys.readouterr().err.endswith(f"{hint}\n")


@pytest.mark.parametrize(
    ("name", "given", "advice"),
    [
        ("LLM", "enable_lora", "Merge the adapter into the weights first"),
        ("LLM", "device_map", "JAX's default device"),
        ("LLM", "data_parallel_size", "docs/replicas.md"),
        ("Engine", "tokenizer_mode", "Leave it out"),
        ("paged_attention", "is_causal", "Attention is always causal"),
        ("SamplingParams", "logits_processors", "Use logit_bias"),
    ],
)
def test_names_without_a_counterpart_are_explained(name, given, advice) -> None:
    with pytest.raises(TypeError, match=f": {given} is not an argument. .*{advice}"):
        getattr(paged_jax, name)(**{given: None})


def test_advice_names_no_argument_of_this_library() -> None:
    known = {*inspect.signature(paged_jax.Engine).parameters}
    known |= inspect.signature(paged_jax.SamplingParams).parameters.keys()
    assert not known & arguments._ADVICE_BY_NAME.keys()


def test_suggest_returns_the_first_name_of_a_line() -> None:
    for first, *others in arguments._LINES:
        assert arguments.suggest(first, [first]) == first
        assert all(arguments.suggest(name, [first]) == first for name in others)
