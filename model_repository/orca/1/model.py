"""The entry point for Triton's Python backend; everything else is in orca_backend.serving."""

from orca_backend.serving.model import TritonPythonModel as TritonPythonModel
