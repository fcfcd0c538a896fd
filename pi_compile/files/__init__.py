"""Files that are read and written whole, and the data that comes with the project."""

from pi_compile.files.bundled import bundled_folder
from pi_compile.files.digests import file_digest, json_digest
from pi_compile.files.npz import check_arrays, read_arrays, write_array_stream, write_arrays
from pi_compile.files.output import PAGE_MARK, artifact_path, check_output, check_page, library_writes, write_text

__all__ = [
    "PAGE_MARK",
    "artifact_path",
    "bundled_folder",
    "check_arrays",
    "check_output",
    "check_page",
    "file_digest",
    "json_digest",
    "library_writes",
    "read_arrays",
    "write_array_stream",
    "write_arrays",
    "write_text",
]
