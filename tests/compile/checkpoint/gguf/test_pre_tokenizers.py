"""Text is cut as by the published tokenizer.json that a name of llama.cpp's stands for.

The twin is another library of regular expressions, and the rules are written down once more, as they are published.
"""

import random
from collections.abc import Iterable

import pytest

pytest.importorskip("regex")
pytest.importorskip("transformers")

import regex
from support.gguf_vocabularies import LETTERS as BYTE_LETTERS
from support.gguf_vocabularies import byte_level

from pi_compile.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS, REFUSED
from pi_compile.checkpoint.gguf.tokenizer import gguf_tokenizer

# What tokenizers names ByteLevel, Digits(individual_digits), Digits, Punctuation(contiguous), Punctuation(isolated).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT, DIGITS = r"[\p{Nd}\p{Nl}\p{No}]", r"[\p{Nd}\p{Nl}\p{No}]+"
MARKS, MARK = r"[!-/:-@\[-`{-~\p{P}]+", r"[!-/:-@\[-`{-~\p{P}]"
LETTERS = "letters of bytes"
"""From here on a rule looks at the letters that stand for bytes."""

ENDING, BLANKS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + BLANKS
QWEN2 = ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + BLANKS
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPARK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|"""
    r"[\r\n]|\s+(?!\S)|\s+"
)
JAIS2 = LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + (
    r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|"
    r"\s{1,2}(?!\S)|\s{1}"
)
HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
CHINESE_KOREAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

PUBLISHED: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}$+<=>^~|]+", GPT2, DIGITS, "[0-9][0-9][0-9]"),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe chatglm-bpe glm4 "
    "glm5": (LLAMA3,),
    "jais-2": (JAIS2,),
    "minicpm5": (
        r"\p{N}{1,3}",
        ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*" + BLANKS,
    ),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": (QWEN2,),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+",
    ),
    "ufakzeka": (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "laguna": (r"[^\n]+|[\n]+", QWEN2),
    "bailingmoe bailingmoe2 llada-moe": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "seed-coder": (ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + BLANKS,),
    "exaone-moe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "tekken": (TEKKEN,),
    "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m": (GPT4O,),
    "tiny_aya cohere2moe": (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O),
    "youtu": (
        "[\uac00-\ud7a3\u3131-\u318e]+|"
        "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|"
        "[\u3105-\u312f]+|" + HAN_KANA,
        GPT4O.replace("{1,3}", ""),
    ),
    "kimi-k2": (KIMI,),
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
    "modern-bert exaone4 mpt olmo jais trillion granite-docling": (GPT2,),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": (DIGIT, GPT2),
    "falcon": (MARKS, GPT2, LETTERS, DIGITS, "[0-9][0-9][0-9]"),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "bloom gpt3-finnish poro-chat": (BLOOM,),
    "viking": (BLOOM, DIGIT),
    "deepseek-llm": (
        r"[\r\n]",
        # Letters with a case; small ones of Armenian and Georgian are newer than the list.
        r"\s?[[\p{Lu}\p{Ll}\p{Lt}]--[\u0560-\u0588\u10d0-\u10ff]]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        CHINESE_KOREAN,
        DIGIT,
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE_KOREAN, DIGIT),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (r"\p{N}{1,3}", HAN_KANA, DEEPSEEK3),
    "spark2_5": (r"\p{N}{1,3}", HAN_KANA, SPARK, r"\p{N}"),
    "afmoe": (
        r"\p{N}+",
        r"(?=(\p{N}{3})+(?!\p{N}))",
        "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
        "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        DEEPSEEK3,
    ),
    "chameleon": ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", DIGIT, MARK, GPT2),
}
RULE_OF = {name: rule for names, rule in PUBLISHED.items() for name in names.split()}

BITS = (  # noqa: SIM905 (texts with blanks)
    "1¶12¶123¶1234¶1234567¶12345678¶007¶ 7¶  42¶3.14¶1,234,567¶a1¶1a¶v2.0¶Ⅻ¶½¶ ½¶x²¶٣٤٥¶१२३४¶１２３４¶it's¶IT'S¶we'll"
    "¶WE'LL¶I'm¶they've¶'tis¶l'été¶'s¶'S¶’s¶'re'¶'d¶'LL¶'\u017f¶hello¶Hello¶HELLO¶helloWorld¶HTTPServer¶iPhone¶ǅ¶ßẞ"
    "¶\u1f7d\u1fbe¶\u2126\u212a¶Ελλάς¶Привет¶мир¶Եր¶დე¶שלום¶مرحبا¶नमस्ते¶ไทย¶ខ្មែរ¶ကမ¶ລາວ¶한국어¶ㄱㄴ¶ㄅㄆ¶日本語¶カタカナ"
    "¶ひらがな¶中文¶𠀀¶\uf900¶ｶﾅ¶\xe1¶a\u0301¶Vi\u1ec7t¶Vie\u0323\u0302t¶\u0227\u0308¶\u0928\u093f¶\u0301¶\u20dd¶\u200d"
    "¶\ufe0f¶🙂¶👍🏽¶👩\u200d👩\u200d👧¶🇩🇪¶✅¶∑¶€¶$¶+¶<=>¶^¶~¶|¶`¶``¶©¶™¶°¶º¶ª¶ ¶  ¶   ¶    ¶         ¶\t¶\t\t¶\n¶\n\n"
    "¶\n\n\n¶\r\n¶\r¶\n \n¶ \n¶\n ¶\t\n¶\xa0¶\u2003¶\u3000¶\u200b¶\ufeff¶\x85¶\u2028¶\x0b¶\x0c¶\x00¶\x7f¶\xad¶\ue000"
    "¶!¶!!¶...¶?!¶--¶===¶//¶/*¶!/\n¶#¶_¶__¶a_b¶(x)¶[0]¶{}¶\"q\"¶'q'¶\\¶“q”¶—¶–¶、¶。¶！¶，¶：¶～¶『¶…¶۔¶।¶<sentinel:12>"
    "¶IMGIMGABZ¶<|im_end|>¶</s>"
).split("¶")
_random = random.Random(55)
TEXTS = [*BITS, *("".join(_random.choices(BITS, k=_random.randint(2, 12))) for _ in range(300)), " " * 700 + "x    "]


def spelled(piece: str) -> str:
    return "".join(BYTE_LETTERS[byte] for byte in piece.encode())


def cut(pieces: Iterable[str], pattern: str) -> list[str]:
    """Isolate the matches of a pattern in each piece; one without width is a cut."""
    found = []
    for piece in pieces:
        ends = {0, len(piece), *(end for match in regex.finditer(pattern, piece, regex.V1) for end in match.span())}
        found += [piece[a:b] for a, b in zip(sorted(ends), sorted(ends)[1:], strict=False)]
    return found


def cuts(text: str, rule: tuple[str, ...]) -> list[str]:
    pieces, in_letters = [text], False
    for pattern in rule:
        if pattern == LETTERS:
            pieces, in_letters = [spelled(piece) for piece in pieces], True
        else:
            pieces = cut(pieces, pattern)
    return pieces if in_letters else [spelled(piece) for piece in pieces]


EXPECTED = {rule: [cuts(text, rule) for text in TEXTS] for rule in PUBLISHED.values()}


@pytest.mark.parametrize("name", sorted(RULE_OF))
def test_a_text_is_cut_as_published(name: str) -> None:
    file = byte_level(pre=name)
    divider = gguf_tokenizer(file).backend_tokenizer.pre_tokenizer
    wrong = []
    for text, expected in zip(TEXTS, EXPECTED[RULE_OF[name]], strict=True):
        found = [piece for piece, _ in divider.pre_tokenize_str(text)]
        if found != expected:
            wrong.append((text, found, expected))
    assert wrong == []


def test_every_name_is_in_the_table() -> None:
    assert PRE_TOKENIZERS.keys() == RULE_OF.keys()
    assert {"gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace"} == REFUSED


def test_the_texts_tell_the_rules_apart() -> None:
    alike: dict[str, set[str]] = {}
    for names, rule in PUBLISHED.items():
        alike.setdefault(str(EXPECTED[rule]), set()).add(names.split()[0])
    # bailingmoe's is Qwen2's in another form.
    assert [names for names in alike.values() if len(names) > 1] == [{"qwen2", "bailingmoe"}]
