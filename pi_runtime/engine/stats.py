"""The figures of an engine."""

from dataclasses import dataclass

from pi_runtime.execution.executor import DiskStats
from pi_runtime.sequence.stats import accepted_length


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What an engine does at present, and what it has done."""

    running: int
    waiting: int
    finished: int
    """Requests that have ended, in whatever way."""
    pages_used: int
    """Pages of running requests, and pages kept for later ones."""
    pages_kept: int
    """Those of them that are kept because a later prompt may begin with them, whether they are in use or not."""
    pages_free: int
    page_bytes: int
    """Bytes of 32 positions in all layers: of a page, or with several classes of layers of one of each."""
    bytes_used: int
    """Of the pages used."""
    prompt_tokens: int
    """Tokens of prompts of the requests that have begun."""
    cached_tokens: int
    """Those of them that were stored already and did not run."""
    generated_tokens: int
    guessed_tokens: int
    """Drafted tokens that ran."""
    accepted_tokens: int
    """Those of them that were right."""
    checked_drafts: int
    """Drafts of which any token ran."""
    drafts_won_s: float
    """What they saved, as far as steps without drafts were timed; below 0 where they cost more."""
    head_guessed_tokens: int
    """Those of the drafted tokens that ran that a guess head drafted."""
    head_accepted_tokens: int
    preemptions: int
    """How often a request had to wait again because others needed its pages."""
    paused_sessions: int
    written_sessions: int
    """How often a paused session was written to disk because others needed its pages."""
    dropped_sessions: int
    """How often one was dropped, to be computed again."""
    busy_s: float
    disk: DiskStats | None
    """What decoding took from disk since the model was loaded; None where all weights are in memory."""

    @property
    def accepted_length(self) -> float | None:
        """Mean number of tokens that a draft's step gave its answer; None where none ran."""
        return accepted_length(self.accepted_tokens, self.checked_drafts)

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second of work, of all requests together."""
        return self.generated_tokens / self.busy_s if self.busy_s else None
