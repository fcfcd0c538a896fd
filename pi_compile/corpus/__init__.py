"""Corpora: text as three disjoint token streams, to fit, to tune and to report on."""
