"""The figures of an engine."""

from dataclasses import dataclass

from pi_runtime.execution.executor import DiskStats
from pi_runtime.sequence.stats import DraftFigures


@dataclass(frozen=True, kw_only=True)
class EngineStats(DraftFigures):
    """What an engine does at present, and what it has done."""

    running: int
    waiting: int
    reading_ahead: int
    """Prompts that are read ahead and answers that are read again, or wait for it: while nothing else runs."""
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
    """Bytes of the pages used."""
    prompt_tokens: int
    """Tokens of prompts of the requests that have begun."""
    cached_tokens: int
    """Those of them that were stored already and did not run."""
    generated_tokens: int
    ahead_tokens: int
    """Tokens that ran before anybody asked for what follows them: of prompts read ahead, and of answers read again."""
    preemptions: int
    """How often a request had to wait again because others needed its pages."""
    kv_disk_pages: int
    """Pages of this run in `kv_disk`, of whatever class of layers."""
    kv_disk_pages_written: int
    kv_disk_tokens: int
    """Tokens of prompts, among those that were stored already, whose keys and values came from there."""
    steps: int
    busy_s: float
    disk: DiskStats | None
    """What decoding took from disk since the model was loaded; None where all weights are in memory."""

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second of work, of all requests together."""
        return self.generated_tokens / self.busy_s if self.busy_s else None
