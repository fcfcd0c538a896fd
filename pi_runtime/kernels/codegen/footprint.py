"""The counts of `artifact.footprint` for kernels to call: compiled into them, not typed again."""

from numba.extending import register_jitable

from pi_runtime.artifact import footprint

chunk_places = register_jitable(footprint.chunk_places)
list_places = register_jitable(footprint.list_places)
chunk_layout = register_jitable(footprint.chunk_layout)
padded_width = register_jitable(footprint.padded_width)
input_nbytes = register_jitable(footprint.input_nbytes)
