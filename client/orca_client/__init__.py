"""Client for Orca's text generation models: `OrcaClient` (threads, gevent) and `AsyncOrcaClient` (asyncio).

Light by intent: it needs tritonclient and nothing of the server.
"""

from orca_client.aio import AsyncOrcaClient, AsyncTokenStream
from orca_client.client import OrcaClient, TokenStream
from orca_client.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    OrcaError,
    Unavailable,
    Unsupported,
)
from orca_client.types import ChannelOptions, Completion, Event, Finished, Message, SamplingOptions, TextDelta

__all__ = [
    "AsyncOrcaClient",
    "AsyncTokenStream",
    "Cancelled",
    "ChannelOptions",
    "Completion",
    "DeadlineExceeded",
    "Event",
    "Finished",
    "Internal",
    "InvalidArgument",
    "Message",
    "NotFound",
    "OrcaClient",
    "OrcaError",
    "SamplingOptions",
    "TextDelta",
    "TokenStream",
    "Unavailable",
    "Unsupported",
]
