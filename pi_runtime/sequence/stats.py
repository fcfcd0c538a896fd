"""The figures of one answer."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DraftFigures:
    """What became of drafts."""

    guessed_tokens: int = 0
    """Drafted tokens that ran."""
    accepted_tokens: int = 0
    """Those of them that were right, and became part of an answer."""
    checked_drafts: int = 0
    """Drafts of which any token ran."""
    drafts_won_s: float = 0.0
    """What they saved: the time that their steps' tokens take one by one, less the time of these steps; below 0 where
    they cost more. Counted as far as steps without drafts were timed."""
    head_guessed_tokens: int = 0
    """Those of the drafted tokens that ran that a guess head drafted."""
    head_accepted_tokens: int = 0
    """Those of them that were right."""

    def __add__(self, more: "DraftFigures") -> "DraftFigures":
        return DraftFigures(**{name: value + vars(more)[name] for name, value in vars(self).items()})

    @property
    def accepted_length(self) -> float | None:
        """Mean number of tokens that a draft's step gave its answer: those drafted right, and one behind them."""
        return 1 + self.accepted_tokens / self.checked_drafts if self.checked_drafts else None

    @property
    def acceptance(self) -> float | None:
        """The share of drafted tokens that were right; None where none ran."""
        return self.accepted_tokens / self.guessed_tokens if self.guessed_tokens else None


@dataclass(frozen=True, kw_only=True)
class Stats(DraftFigures):
    """Seconds and tokens of one generation; rates are None where nothing was timed."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that the cache already held."""
    generated_tokens: int
    prefill_s: float
    decode_s: float
    first_token_s: float
    """Time from the call to the first token."""
    rows_read_share: float | None
    """Rows of `first` read ÷ neurons, over the decoded tokens that ran alone; None where there was none."""
    active_share: float | None
    """Neurons for which `rest` was read ÷ neurons."""

    @property
    def prefill_tokens_per_s(self) -> float | None:
        ran = self.prompt_tokens - self.cached_tokens
        return ran / self.prefill_s if self.prefill_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Rate of the tokens after the first, which comes from prefill."""
        return (self.generated_tokens - 1) / self.decode_s if self.generated_tokens > 1 and self.decode_s else None
