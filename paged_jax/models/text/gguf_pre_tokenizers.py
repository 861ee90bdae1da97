"""Rules that split a text into words before byte pairs are merged, by their names in GGUF files.

The regular expressions are the same as in the original tokenizers of the models.
"""

import dataclasses
from collections.abc import Mapping

from tokenizers import Regex, pre_tokenizers

_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _cl100k(digits: str) -> str:
    """Return the regular expression of GPT-4's tokenizer.

    `digits` is the regular expression for sequences of digits.
    """
    return (
        rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        rf"|\s*[\r\n]+|{_SPACES}"
    )


def _o200k(digits: str, suffixes: str) -> str:
    """Return the regular expression of GPT-4o's tokenizer, which also splits before capitals.

    Args:
      digits: regular expression for sequences of digits.
      suffixes: regular expression for suffixes of words, such as "'s".
    """
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+{suffixes}|{lead}{upper}+{lower}*{suffixes}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
    )


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """Rules of a byte-level tokenizer for splitting texts into words.

    Attributes:
      expressions: regular expressions that match words. They are applied one after the other.
      ignores_merges: whether a word that is in the vocabulary becomes one token, even if the merges
        would split it.
      adds_bos: whether to add BOS before texts if the file does not say whether to add it.
    """

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Return these rules as a pre-tokenizer of the `tokenizers` library."""
        splits = [
            pre_tokenizers.Split(Regex(expression), "isolated") for expression in self.expressions
        ]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, byte_level])


_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_QWEN35 = (
    rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_THREE_DIGITS = r"\p{N}{1,3}"
_LLAMA3 = PreTokenizer((_cl100k(_THREE_DIGITS),), ignores_merges=True, adds_bos=True)

# Each rule with the names of the tokenizers that have it.
_RULES: tuple[tuple[PreTokenizer, str], ...] = (
    (
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
        "default",
    ),
    (
        PreTokenizer((_GPT2,)),
        "gpt-2 phi-2 olmo mpt jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum",
    ),
    (
        PreTokenizer((r"\p{N}", _GPT2)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    ),
    (
        _LLAMA3,
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (PreTokenizer((_cl100k(_THREE_DIGITS),)), "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer((_cl100k(_THREE_DIGITS),), ignores_merges=True), "glm4"),
    (
        PreTokenizer((_cl100k(r"\p{N}"),)),
        "qwen2 deepseek-r1-qwen stablelm2 megrez kormo hunyuan grok-2 solar-open",
    ),
    (PreTokenizer((_QWEN35,)), "qwen35"),
    (
        PreTokenizer((_o200k(_THREE_DIGITS, _SUFFIXES + "?"),)),
        "gpt-4o llama4 kanana2 minimax-m2",
    ),
    (PreTokenizer((_o200k(r"\p{N}", ""),), ignores_merges=True, adds_bos=True), "tekken"),
    (
        PreTokenizer((_THREE_DIGITS, "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_WORDS)),
        "deepseek-v3 hunyuan-dense joyai-llm",
    ),
    (
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
        "deepseek-coder",
    ),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: rule for rule, names in _RULES for name in names.split()
}
"""Supported rules by name."""
