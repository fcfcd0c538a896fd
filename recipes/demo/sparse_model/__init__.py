"""Synthetic checkpoints that fire like sparse models: any Llama shape, any density, and a predictor by construction.

How a bias comes out of a model without biases: in every 32nd coordinate the residual stream holds a constant. The
embedding puts it there, attention does not see it, and neither attention nor FFN writes there. A neuron's gate row has
a negative number in those coordinates, and that is its threshold; in the others it is random, and so is the stream,
which changes with every token. With x the normed state, u the constant direction and a_i random,

    gate_i · x  =  a_i · x − b_i (u · x),        b_i from the frequency wanted of neuron i (a power law)

The gate matrix has rank R: gate = up · down, and these two are the predictor. It is exact but for the rounding of the
gate to its own format.
"""

from sparse_model.activity import Activity
from sparse_model.matrices import Spec
from sparse_model.reading import Decoding, bytes_per_token, decode
from sparse_model.writing import build

__all__ = ["Activity", "Decoding", "Spec", "build", "bytes_per_token", "decode"]
