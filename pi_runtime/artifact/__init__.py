"""The artifact format: the contract between compiler and runtime. NumPy and the standard library only."""

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Manifest
from pi_runtime.artifact.sizes import ArraySpec, array_specs
from pi_runtime.artifact.verification import VerifyReport, verify
from pi_runtime.artifact.writer import ArtifactWriter

__all__ = ["ArraySpec", "Artifact", "ArtifactWriter", "Decoder", "Manifest", "VerifyReport", "array_specs", "verify"]
