"""One adapter a family of models, and the registry of them.

A package adds a family with an entry point in the group `pi_compile.families`; what its adapter needs stands here.
"""

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families.adapter import Adapter, Piece, Rows, both, of
from pi_compile.checkpoint.families.registry import adapters, decoder_of, family_names, find_adapter

__all__ = ["Adapter", "Config", "Piece", "Rows", "adapters", "both", "decoder_of", "family_names", "find_adapter", "of"]
