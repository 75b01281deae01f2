"""A real tritonserver, found or assembled, started, watched and stopped."""

from orca_backend.server.activity import activity
from orca_backend.server.installation import Installation, ServerError
from orca_backend.server.triton_server import TritonServer

__all__ = ["Installation", "ServerError", "TritonServer", "activity"]
