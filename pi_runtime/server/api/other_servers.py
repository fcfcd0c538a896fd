"""Fields of llama.cpp's server, of vLLM and of others that would change an answer and are not supported.

They are known so that they are refused by name and not passed over: each allows only the values that ask for nothing.
Fields that change no answer, such as `cache_prompt`, are accepted.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from pi_runtime.server.api.body import AtMost, Body, Unsupported

One = Annotated[float, Field(ge=1, le=1)]
Zero = Annotated[float, Field(ge=0, le=0)]
MinusOne = Annotated[float, Field(ge=-1, le=-1)]
NoneAbove0 = Annotated[float, Field(ge=-1, le=0)]
Empty = Annotated[list[Any], AtMost(0)]
Off = Annotated[Literal[False] | None, Unsupported("only false, which is off")]
Accepted = Annotated[Any, Field(description="Accepted; no answer depends on it.")]
BY_FORM = Unsupported("use response_format of /v1/chat/completions")
ALL_TOKENS = Unsupported("use logit_bias")


class OtherServersFields(Body):
    """What other servers' requests for answers have; a field that would change the answer takes only its off value."""

    mirostat: Annotated[Zero | None, Unsupported("only 0, which is off")] = None
    mirostat_tau: Accepted = None
    mirostat_eta: Accepted = None
    typical_p: Annotated[One | None, Unsupported("only 1, which changes nothing")] = None
    tfs_z: Annotated[One | None, Unsupported("only 1, which changes nothing")] = None
    dynatemp_range: Annotated[Zero | None, Unsupported("only 0, which is off")] = None
    dynatemp_exponent: Accepted = None
    xtc_probability: Annotated[Zero | None, Unsupported("only 0, which is off")] = None
    xtc_threshold: Accepted = None
    dry_multiplier: Annotated[Zero | None, Unsupported("only 0, which is off")] = None
    dry_base: Accepted = None
    dry_allowed_length: Accepted = None
    dry_penalty_last_n: Accepted = None
    dry_sequence_breakers: Accepted = None
    top_n_sigma: Annotated[NoneAbove0 | None, Unsupported("only -1 or 0, which are off")] = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = Field(
        default=None, description="With a penalty only −1: penalties look at the whole text."
    )
    samplers: Annotated[Literal["", "edkypmxt"] | Empty | None, Unsupported("the order of the filters is fixed")] = None
    min_keep: Annotated[Zero | None, Unsupported("only 0, which changes nothing")] = None
    n_probs: Annotated[Zero | None, Unsupported("use logprobs")] = None
    n_indent: Annotated[Zero | None, Unsupported("only 0, which is off")] = None
    ignore_eos: Annotated[Literal[False] | None, Unsupported("use min_tokens")] = None
    t_max_predict_ms: Annotated[Zero | MinusOne | None, Unsupported("use max_tokens")] = None
    lora: Annotated[Empty | None, Unsupported("there are no adapters")] = None
    grammar: Annotated[Literal[""] | None, BY_FORM] = None
    json_schema: Annotated[None, BY_FORM] = None
    cache_prompt: Accepted = None
    id_slot: Accepted = None
    use_beam_search: Off = None
    length_penalty: Annotated[One | None, Unsupported("only 1, which changes nothing")] = None
    early_stopping: Off = None
    stop_token_ids: Annotated[Empty | None, Unsupported("use stop")] = None
    include_stop_str_in_output: Off = None
    skip_special_tokens: Annotated[Literal[True] | None, Unsupported("special tokens have no text")] = None
    allowed_token_ids: Annotated[Empty | None, ALL_TOKENS] = None
    bad_words: Annotated[Empty | None, ALL_TOKENS] = None
    logits_processors: Annotated[Empty | None, ALL_TOKENS] = None
    truncate_prompt_tokens: Annotated[None, Unsupported("a prompt that is too long is a 400")] = None
    prompt_logprobs: Annotated[None, Unsupported("use echo and logprobs of /v1/completions")] = None
    structured_outputs: Annotated[None, BY_FORM] = None
    guided_json: Annotated[None, BY_FORM] = None
    guided_regex: Annotated[None, BY_FORM] = None
    guided_choice: Annotated[None, BY_FORM] = None
    guided_grammar: Annotated[None, BY_FORM] = None


class OneAnswerFields(Body):
    """Fields that ask for several answers or an echo, in forms that give one answer; each takes only its off value."""

    n: Annotated[Literal[1] | None, Unsupported("there is one answer")] = None
    best_of: Annotated[Literal[1] | None, Unsupported("answers are not compared")] = None
    echo: Off = None


class OtherServersChatFields(Body):
    """What other servers' requests for chats have besides; each field takes only values that change nothing."""

    best_of: Annotated[Literal[1] | None, Unsupported("answers are not compared")] = None
    echo: Off = None
    add_special_tokens: Annotated[Literal[False] | None, Unsupported("the template writes them")] = None
    chat_template: Annotated[None, Unsupported("the model's own template is used")] = None
    documents: Annotated[Empty | None, Unsupported("put them into a message")] = None
    enable_thinking: Annotated[None, Unsupported("use chat_template_kwargs")] = None
    reasoning: Annotated[None, Unsupported("use reasoning_effort")] = None
    include_reasoning: Annotated[Literal[True] | None, Unsupported("thoughts come as they are")] = None
    reasoning_format: Annotated[
        Literal["auto", "deepseek"] | None, Unsupported("thoughts come as reasoning_content")
    ] = None
