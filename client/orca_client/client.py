"""The client for threads (and gevent): one gRPC stream per request over one shared channel.

tritonclient's synchronous client allows one stream per object, and cancelling that stream cancels everything on it. So
it is used here for what it does well (the channel, TLS, the generated stubs), and each request opens its own stream.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import InferenceServerClient, service_pb2

from orca_client.errors import (
    Cancelled,
    DeadlineExceeded,
    NotFound,
    OrcaError,
    Unavailable,
    ended_early,
    error_from_rpc,
)
from orca_client.protocol import (
    ResponseReader,
    build_request,
    check_messages,
    check_url,
    collect,
    model_ready_request,
    set_timeout,
)
from orca_client.retry import DEADLINE_GRACE_S, MAX_TIMEOUT_S, SETTLE_S, Attempts
from orca_client.types import ChannelOptions, Completion, Event, Message, SamplingOptions

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

DEFAULT_URL = "localhost:8001"
DEFAULT_MODEL = "orca"
DEFAULT_RETRIES = 2


class TokenStream(Iterator[Event]):
    """The events of one generation, as they come: `TextDelta`s, then one `Finished`.

    Leave the loop, call `close`, or leave the `with` block to cancel; the server then frees what the request holds.
    Iterating raises OrcaError. For one thread, but `close` may come from any.
    """

    def __init__(
        self, open_call: Callable[..., Any], request: service_pb2.ModelInferRequest, attempts: Attempts
    ) -> None:
        """Send `request` now. `open_call(requests, timeout=)` opens a stream."""
        self._open_call = open_call
        self._request = request
        self._attempts = attempts
        self._events: deque[Event] = deque()
        self._over = False
        self._open()

    @property
    def request_id(self) -> str:
        """The id under which the server logs the request."""
        return str(self._request.id)

    def _open(self) -> None:
        self._reader = ResponseReader(self.request_id)
        remaining = self._attempts.remaining()
        if remaining is not None:
            set_timeout(self._request, remaining)
            remaining += DEADLINE_GRACE_S
        self._call = self._open_call(iter((self._request,)), timeout=remaining)
        if self._over:  # closed meanwhile, too early to cancel this call
            self._call.cancel()

    def __next__(self) -> Event:
        """Wait for the next event."""
        if self._over and not self._events:
            raise StopIteration
        while not self._events:
            try:
                self._receive()
            except OrcaError as error:
                self._call.cancel()  # for errors that leave it open
                delay = self._attempts.delay_after(error, self._reader.received)
                if self._over or delay is None:
                    self._over = True
                    raise
                time.sleep(delay)
                if not self._over:
                    self._open()
                if self._over:  # closed meanwhile
                    raise
        return self._events.popleft()

    def _receive(self) -> None:
        try:
            response = next(self._call)
        except (StopIteration, grpc.RpcError) as error:
            raise ended_early(error, self.request_id) from None
        try:
            self._events.extend(self._reader.read(response))
            self._over |= self._reader.ended
        finally:
            if self._reader.ended:
                self._settle()

    def _settle(self) -> None:
        """Let the server end the stream by itself after the last response.

        Triton 2.51 never again unloads a model one of whose streams is cancelled in that moment.
        """
        ended = threading.Event()
        if self._call.add_callback(ended.set) and not ended.wait(SETTLE_S):
            self._call.cancel()

    def close(self) -> None:
        """Cancel the request unless it has finished; iteration ends after what has already come."""
        self._over = True
        self._call.cancel()

    def __enter__(self) -> Self:
        """The stream itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel the request unless it has finished."""
        self.close()

    def __del__(self) -> None:
        """Leaving a loop early drops the stream: cancel."""
        if hasattr(self, "_call"):  # not if the constructor failed
            self._call.cancel()


class OrcaClient:
    """A client of one server. Thread-safe; share it, and with it the connection."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        retries: int = DEFAULT_RETRIES,
        headers: Mapping[str, str] | None = None,
        **channel_options: Unpack[ChannelOptions],
    ) -> None:
        """Connect on first use to `url` (host:port of the server's gRPC endpoint).

        A request that fails with Unavailable before its first token is tried `retries` times more; 0 is never.
        `headers` go with every request. `channel_options` are tritonclient's: ssl, root_certificates, creds, ...
        Raises InvalidArgument for a `url` that is none.
        """
        check_url(url)
        self._triton = InferenceServerClient(url, **channel_options)
        self._retries = retries
        self._metadata = tuple((headers or {}).items())
        self._closed = False

    def generate(
        self,
        prompt: str,
        *,
        model: str = DEFAULT_MODEL,
        timeout: float | None = None,
        request_id: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Continue `prompt` and return the whole answer. `timeout` is in seconds, for all of it. Raises OrcaError."""
        return self._complete(prompt, model, timeout, request_id, sampling)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str = DEFAULT_MODEL,
        timeout: float | None = None,
        request_id: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Like `generate`, for a chat: the server applies its model's chat template."""
        check_messages(messages)
        return self._complete(messages, model, timeout, request_id, sampling)

    def stream(
        self,
        prompt: str,
        *,
        model: str = DEFAULT_MODEL,
        timeout: float | None = None,
        request_id: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> TokenStream:
        """Continue `prompt`; the returned iterator gives the answer piece by piece. Raises OrcaError."""
        return self._start(prompt, model, timeout, request_id, sampling, stream=True)

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        model: str = DEFAULT_MODEL,
        timeout: float | None = None,
        request_id: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> TokenStream:
        """Like `stream`, for a chat: the server applies its model's chat template."""
        check_messages(messages)
        return self._start(messages, model, timeout, request_id, sampling, stream=True)

    def _complete(
        self,
        prompt: str | Sequence[Message],
        model: str,
        timeout: float | None,
        request_id: str | None,
        sampling: SamplingOptions,
    ) -> Completion:
        with self._start(prompt, model, timeout, request_id, sampling, stream=False) as events:
            return collect(list(events), events.request_id)

    def _start(
        self,
        prompt: str | Sequence[Message],
        model: str,
        timeout: float | None,
        request_id: str | None,
        sampling: SamplingOptions,
        *,
        stream: bool,
    ) -> TokenStream:
        request = build_request(prompt, model=model, stream=stream, sampling=sampling, request_id=request_id)
        return TokenStream(self._open_call, request, Attempts(self._retries, timeout))

    def _open_call(self, requests: Iterator[service_pb2.ModelInferRequest], timeout: float | None) -> Any:
        try:
            return self._triton._client_stub.ModelStreamInfer(requests, timeout=timeout, metadata=self._metadata)
        except ValueError as error:
            if not self._closed:
                raise
            raise Cancelled("the client is closed") from error

    def server_ready(self, timeout: float = 5.0) -> bool:
        """Whether the server answers and all its models are ready. False if not in `timeout` s, or if closed."""
        return self._ask("ServerReady", service_pb2.ServerReadyRequest(), timeout)

    def model_ready(self, model: str = DEFAULT_MODEL, timeout: float = 5.0) -> bool:
        """Whether `model` can be used. False also if there is no such model, or no server, or if closed."""
        return self._ask("ModelReady", model_ready_request(model), timeout)

    def _ask(self, method: str, request: Any, timeout: float) -> bool:
        timeout = min(timeout, MAX_TIMEOUT_S)
        try:
            answer = getattr(self._triton._client_stub, method)(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as rpc_error:
            error = error_from_rpc(rpc_error)
            if self._closed or isinstance(error, Unavailable | DeadlineExceeded | NotFound):
                return False
            raise error from None
        except ValueError:
            if not self._closed:
                raise
            return False
        return bool(answer.ready)

    def close(self) -> None:
        """Close the connection; open streams end with Cancelled, and so does whatever is asked afterwards."""
        self._closed = True
        self._triton.close()

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()
