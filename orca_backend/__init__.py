"""Orca-on-Triton: iteration-level scheduling and selective batching as a Triton Python backend."""

__version__ = "0.1.0"
