"""Files that are read and written whole, and the data that comes with the project."""

from pi_compile.files.bundled import bundled_folder
from pi_compile.files.digests import file_digest, json_digest
from pi_compile.files.npz import check_arrays, contents, read_arrays, write_array_stream, write_arrays
from pi_compile.files.output import artifact_path, check_output, check_replaced, library_writes, write_text
from pi_compile.files.toml import parse_toml
