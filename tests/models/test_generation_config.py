"""``generation_config.json``: each option is used, or rejected by name."""

import json
import math

import pytest

from paged_jax import Tokenizer
from paged_jax.models.text.generation_config import GenerationConfig
from paged_jax.sampling.token_bias import TokenBias
from tests.support.tiny_model import save_tiny_model

INF = math.inf


@pytest.fixture
def read(tmp_path):
    """Write a file and read it."""

    def read(**options) -> GenerationConfig:
        (tmp_path / "generation_config.json").write_text(json.dumps(options), encoding="utf-8")
        return GenerationConfig.from_folder(tmp_path)

    return read


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "max_length": 4096, "typical_p": 1.0, "num_beams": 1}, {}),
        ({"top_k": 50.0}, {"top_k": 50}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "top_p": 0.9, "temperature": None}, {"top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 4}, {"temperature": 0.0}),
        (
            {"do_sample": False, "repetition_penalty": 1.1, "typical_p": 0.5},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        (
            {"max_new_tokens": 64.0, "min_new_tokens": 3, "stop_strings": "END"},
            {"max_tokens": 64, "min_tokens": 3, "stop": ("END",)},
        ),
    ],
)
def test_sampling_defaults_come_from_the_file(read, options, expected) -> None:
    defaults = read(**options).sampling_defaults
    assert defaults == expected
    assert all(type(defaults[name]) is type(expected[name]) for name in expected)


def test_token_bias_matches_the_processors_of_transformers(read) -> None:
    config = read(
        eos_token_id=1,
        suppress_tokens=[7, 5.0, 99],
        begin_suppress_tokens=[7, 3],
        bad_words_ids=[[4], [1], [4]],
        sequence_bias=[[[6], -2.5], [[8], 1], [[9], -INF]],
    )
    # Token 1 ends texts, so it stays allowed. Token 99 is outside the vocabulary.
    assert config.token_bias({1}, vocab_size=10) == TokenBias(
        ids=(6, 8, 9, 7, 5, 4), values=(-2.5, 1.0, -INF, -INF, -INF, -INF), start_ids=(3,)
    )
    assert read().token_bias({1}, vocab_size=10) == TokenBias()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 0.0, "do_sample": False}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_k": 50.5}, "top_k must be an integer"),
        ({"top_k": True}, "top_k must be an integer"),
        ({"temperature": "0.7"}, "temperature must be finite and >= 0, got '0.7'"),
        ({"temperature": INF}, "temperature must be finite and >= 0, got inf"),
        ({"repetition_penalty": 0}, "repetition_penalty must be finite and > 0, got 0"),
        ({"min_p": 2}, r"min_p must be in \[0, 1\], got 2"),
        ({"do_sample": "false"}, "do_sample must be true or false, got 'false'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be token ids, got"),
        ({"eos_token_id": True}, "eos_token_id must be token ids, got"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
        ({"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens must be at most max_new"),
        ({"stop_strings": [""]}, "stop_strings must be a text or a list of texts"),
        ({"suppress_tokens": 5}, "suppress_tokens must be token ids, got 5"),
        ({"suppress_tokens": [-1]}, r"suppress_tokens must be token ids, got \[-1\]"),
        ({"begin_suppress_tokens": ["a"]}, "begin_suppress_tokens must be token ids"),
        ({"bad_words_ids": [5]}, "bad_words_ids must be a list of lists of token ids"),
        ({"bad_words_ids": [[5, 6]]}, r"bad_words_ids is not implemented for .* \[5, 6\]"),
        ({"sequence_bias": [[[5], "x"]]}, "sequence_bias must have numbers"),
        ({"sequence_bias": {"5": 1.0}}, "sequence_bias must be a list"),
        ({"sequence_bias": [[[5, 6], 1.0]]}, "sequence_bias is not implemented for"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size is not implemented, got 3"),
        ({"num_beams": 4}, "num_beams is not implemented, got 4"),
        ({"guidance_scale": 1.5}, "guidance_scale is not implemented"),
        ({"forced_eos_token_id": 2}, "forced_eos_token_id is not implemented"),
        ({"do_sample": True, "typical_p": 0.9}, "typical_p is not implemented, got 0.9"),
        ({"temperature": 0.5, "eta_cutoff": 0.1}, "eta_cutoff is not implemented"),
    ],
)
def test_from_folder_names_the_file_and_the_bad_option(read, tmp_path, options, problem) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        read(**options)
    assert str(caught.value).startswith(f"{tmp_path / 'generation_config.json'}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.peers
def test_every_option_of_transformers_is_known() -> None:
    """An option that changes the tokens of transformers must be in one of the lists here."""
    generation = pytest.importorskip("transformers.generation")
    from paged_jax.models.text import generation_config as ours

    used = {*ours.DRAWING_OPTIONS, "do_sample", "repetition_penalty", "eos_token_id"}
    used |= {"max_new_tokens", "min_new_tokens", "stop_strings", "suppress_tokens"}
    used |= {"begin_suppress_tokens", "bad_words_ids", "sequence_bias"}
    harmless = {
        # Caches, outputs and speed.
        *(
            "use_cache",
            "cache_implementation",
            "cache_config",
            "max_cache_len",
            "output_attentions",
        ),
        *("output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        *("compile_config", "disable_compile", "continuous_batching_config", "low_memory"),
        *("prefill_chunk_size", "transformers_version", "pad_token_id", "bos_token_id", "use_mtp"),
        # Beam search, encoders and assistants, which do not change sampled tokens.
        *("early_stopping", "length_penalty", "encoder_repetition_penalty"),
        *("encoder_no_repeat_ngram_size", "decoder_start_token_id", "is_assistant"),
        *(
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "assistant_confidence_threshold",
        ),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit"),
        *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
        *("speculation_type",),
        # The engine limits lengths, checks logits and normalises their softmax.
        *("max_length", "remove_invalid_values", "renormalize_logits"),
    }
    known = used | harmless | ours._UNSUPPORTED.keys() | ours._UNSUPPORTED_IF_DRAWN.keys()
    options = {name for name in vars(generation.GenerationConfig()) if not name.startswith("_")}
    assert options - known == set()


def test_fill_in_keeps_given_fields(read) -> None:
    config = read(repetition_penalty=1.2, max_new_tokens=8, min_new_tokens=6)
    filled = config.fill_in({"max_tokens": 4, "top_p": 0.5}, {"temperature": 0.0})
    assert filled == {
        "temperature": 0.0,
        "repetition_penalty": 1.2,
        "max_tokens": 4,
        "min_tokens": 4,
        "top_p": 0.5,
    }
    assert "temperature" not in read(top_p=0.5).fill_in({}, {"temperature": 0.0})


def test_tokenizer_from_folder_rejects_an_invalid_file(tmp_path) -> None:
    folder = save_tiny_model(tmp_path)
    (folder / "generation_config.json").write_text('{"top_p": 0.0}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"generation_config.json: top_p must be in"):
        Tokenizer.from_folder(folder)
