"""Text as three disjoint token streams: to fit on, to tune on, and to report on.

Text comes from files, from data sets through `datasets`, or from the documentation of the Python that runs.
"""

from pi_compile.corpus.streams import HUB, PYTHON, CorpusSpec, Streams, read_streams, source_files

__all__ = ["HUB", "PYTHON", "CorpusSpec", "Streams", "read_streams", "source_files"]
