"""Text as three disjoint token streams: to fit on, to tune on, and to report on.

Text comes from files, from data sets through `datasets`, or from the documentation of the Python that runs.
"""

from pi_compile.corpus.held_out import HeldOut
from pi_compile.corpus.python_docs import HELD_OUT, TRAIN
from pi_compile.corpus.sources import (
    HUB,
    PASSAGE,
    PYTHON,
    check_disjoint,
    documents,
    source_files,
)
from pi_compile.corpus.streams import CorpusSpec, Streams, read_streams
