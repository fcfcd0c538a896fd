"""How a text is cut before its bytes are merged, by the name that a GGUF file gives, `tokenizer.ggml.pre`.

The names, and what else follows from them, are those of llama.cpp's `llama-vocab.cpp`. A split is that of the
tokenizer.json that the name stands for, as far as that is known: llama.cpp's own has no capitals or marks outside
Latin (`gpt-4o`, `tekken`), and leaves out steps that merges learnt with them never show (`falcon`, `deepseek-llm`).
Normalizers are left out, as by llama.cpp: a file has none, and a name does not say which.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """What a name stands for."""

    splits: tuple[str, ...]
    """Regexes, one after the other: each match is a piece, and so is what lies between two."""
    letter_splits: tuple[str, ...] = ()
    """Regexes on the letters that stand for the bytes of these pieces, of which ²³¹¼½¾ are numbers."""
    whole: bool = False
    """Whether a piece that is a token is that token, whatever the merges make of it."""
    bos: bool = False
    """Whether a text begins with the begin token where the file does not say."""


_DIGIT = r"\p{N}"
_THREE_DIGITS = r"\p{N}{1,3}"
_LINES = r"[^\n]+|[\n]+"
_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASELESS = r"\p{Lm}\p{Lo}\p{M}"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str, *, endings: str = _ENDINGS + "|", letters: str = r"\p{L}", blanks: str = _BLANKS) -> str:
    """GPT-4's rule and its kin: endings, words with one sign before them, digits, signs, lines, blanks."""
    marks = r"\p{M}" if "M" in letters else ""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{letters}+"
    return rf"{endings}{word}|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{blanks}"


def _cased(digits: str, *, endings: str = _ENDINGS + "?", but: str = "", after: str = r"[\r\n/]*") -> str:
    """GPT-4o's rule and its kin: a word ends before a capital that follows a small letter."""
    sign, upper, lower = r"[^\r\n\p{L}\p{N}]?", rf"[\p{{Lu}}\p{{Lt}}{_CASELESS}{but}]", rf"[\p{{Ll}}{_CASELESS}{but}]"
    words = f"{sign}{upper}*{lower}+{endings}|{sign}{upper}+{lower}*{endings}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{after}|{_BLANKS}"


_LLAMA3, _QWEN2 = _words(_THREE_DIGITS), _words(_DIGIT)
_CHINESE_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_WORDS_OF_DEEPSEEK3 = rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_MAIN_OF_DEEPSEEK3 = rf"{_WORDS_OF_DEEPSEEK3}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
_LATIN_GREEK_CYRILLIC = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-"
    "ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
_HALVES_OF_BLANKS = "|".join(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1))

_RULES: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (_LLAMA3,), whole=True, bos=True
    ),
    "glm4 glm5": PreTokenizer((_LLAMA3,), whole=True),
    "chatglm-bpe dbrx smaug-bpe": PreTokenizer((_LLAMA3,)),
    "minicpm5": PreTokenizer((_THREE_DIGITS, _words(r"\p{N}+")), whole=True),
    "jais-2": PreTokenizer((_words(_THREE_DIGITS, blanks=rf"\s*[\r\n]+|{_HALVES_OF_BLANKS}|\s{{1,2}}(?!\S)|\s{{1}}"),)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_words(_DIGIT, letters=r"[\p{L}\p{M}]"),)),
    "ufakzeka": PreTokenizer((_words(_DIGIT, endings=""),)),
    "laguna": PreTokenizer((_LINES, _QWEN2)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        (_words(_DIGIT, endings="'(?i:[sdmt]|ll|ve|re)|", blanks=r"\s*[\r\n]|\s+(?!\S)|\s+"),)
    ),
    "seed-coder": PreTokenizer(
        (rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)
    ),
    "exaone-moe": PreTokenizer(
        (
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_DIGIT}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "tekken": PreTokenizer((_cased(_DIGIT, endings=""),), whole=True, bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_cased(_THREE_DIGITS),)),
    "granite-embed-multi-97m": PreTokenizer((_cased(_THREE_DIGITS),), whole=True),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _cased(_THREE_DIGITS))),
    "youtu": PreTokenizer(
        ("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CHINESE_AND_KANA, _cased(_DIGIT)),
        whole=True,
    ),
    "kimi-k2": PreTokenizer((r"[\p{Han}]+|" + _cased(_THREE_DIGITS, but=r"&&[^\p{Han}]", after=r"[\r\n]*"),)),
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
    "modern-bert exaone4 mpt olmo jais trillion granite-docling": PreTokenizer((_GPT2,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": PreTokenizer((_DIGIT, _GPT2)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2), letter_splits=(r"\p{N}+", "[0-9][0-9][0-9]")),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "bloom gpt3-finnish poro-chat": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, _DIGIT)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_LATIN_GREEK_CYRILLIC}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-퟿]+",
            _DIGIT,
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer((_THREE_DIGITS, _CHINESE_AND_KANA, _MAIN_OF_DEEPSEEK3)),
    "spark2_5": PreTokenizer(
        (
            _THREE_DIGITS,
            _CHINESE_AND_KANA,
            _WORDS_OF_DEEPSEEK3 + r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
            _DIGIT,
        )
    ),
    "afmoe": PreTokenizer(
        (
            r"\p{N}+",
            r"(?=(\p{N}{3})+(?!\p{N}))",
            "[一-鿿㐀-䶿\uf900-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
            _MAIN_OF_DEEPSEEK3,
        )
    ),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            _DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        bos=True,
    ),
}

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: rule for names, rule in _RULES.items() for name in names.split()}
"""Name → what it stands for."""
REFUSED = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace"})
"""Names that stand for tokens made of letters, not of bytes."""
DEFAULT = "default"
"""The name where the file has none."""
