"""The client for asyncio: one gRPC stream per request over one shared channel. The same methods as `OrcaClient`."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2
from tritonclient.grpc.aio import InferenceServerClient

from orca_client.client import DEFAULT_MODEL, DEFAULT_RETRIES, DEFAULT_URL
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


class AsyncTokenStream(AsyncIterator[Event]):
    """The events of one generation, as they come: `TextDelta`s, then one `Finished`.

    Leave the loop, call `aclose`, or leave the `async with` block to cancel; the server then frees what the request
    holds. Iterating raises OrcaError.
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
        self._cut = False  # cancelled by other than aclose: to be told, lest a part be taken for the whole
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

    async def __anext__(self) -> Event:
        """Wait for the next event. If the wait is cancelled so is the request, and the next wait raises Cancelled."""
        try:
            return await self._next()
        except asyncio.CancelledError:
            self._cut_off()
            raise

    async def _next(self) -> Event:
        while not self._events:
            if self._over:
                raise StopAsyncIteration
            if self._cut:
                self._over = True
                raise self._cancelled()
            try:
                await self._receive()
            except OrcaError as error:
                self._call.cancel()  # for errors that leave it open
                delay = self._attempts.delay_after(error, self._reader.received)
                if self._over or delay is None:
                    self._over = True
                    raise
                await asyncio.sleep(delay)
                if self._over or self._cut:  # closed meanwhile
                    raise
                self._open()
        return self._events.popleft()

    async def _receive(self) -> None:
        try:
            response = await self._call.read()
            if response is grpc.aio.EOF:
                raise StopAsyncIteration
        except (StopAsyncIteration, grpc.RpcError) as error:
            raise ended_early(error, self.request_id) from None
        except asyncio.CancelledError:
            if not (self._over or self._cut):  # the reading task is cancelled
                raise
            raise self._cancelled() from None
        try:
            self._events.extend(self._reader.read(response))
            self._over |= self._reader.ended
        finally:
            if self._reader.ended:
                await self._settle()

    async def _settle(self) -> None:
        """Let the server end the stream by itself after the last response: see `TokenStream`."""
        with contextlib.suppress(asyncio.TimeoutError, grpc.RpcError):
            await asyncio.wait_for(self._call.read(), SETTLE_S)

    def _cut_off(self) -> None:
        if not self._over:
            self._cut = True
            self._call.cancel()

    def _cancelled(self) -> Cancelled:
        return Cancelled("the request was cancelled before its answer had ended", request_id=self.request_id)

    async def aclose(self) -> None:
        """Cancel the request unless it has finished; iteration ends after what has already come."""
        self._over = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        """The stream itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the request unless it has finished."""
        await self.aclose()

    def __del__(self) -> None:
        """Leaving a loop early drops the stream: cancel."""
        if hasattr(self, "_call") and not self._call.done():  # not if the constructor failed
            self._call.cancel()


class AsyncOrcaClient:
    """A client of one server. Belongs to one event loop; share it there, and with it the connection."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        retries: int = DEFAULT_RETRIES,
        headers: Mapping[str, str] | None = None,
        **channel_options: Unpack[ChannelOptions],
    ) -> None:
        """Connect on first use to `url` (host:port of the server's gRPC endpoint). Call it in a running event loop.

        A request that fails with Unavailable before its first token is tried `retries` times more; 0 is never.
        `headers` go with every request. `channel_options` are tritonclient's: ssl, root_certificates, creds, ...
        Raises InvalidArgument for a `url` that is none.
        """
        check_url(url)
        self._triton = InferenceServerClient(url, **channel_options)
        self._retries = retries
        self._metadata = tuple((headers or {}).items())
        self._closed = False
        self._streams: weakref.WeakSet[AsyncTokenStream] = weakref.WeakSet()

    async def generate(
        self,
        prompt: str,
        *,
        model: str = DEFAULT_MODEL,
        timeout: float | None = None,
        request_id: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Continue `prompt` and return the whole answer. `timeout` is in seconds, for all of it. Raises OrcaError."""
        return await self._complete(prompt, model, timeout, request_id, sampling)

    async def chat(
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
        return await self._complete(messages, model, timeout, request_id, sampling)

    def stream(
        self,
        prompt: str,
        *,
        model: str = DEFAULT_MODEL,
        timeout: float | None = None,
        request_id: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncTokenStream:
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
    ) -> AsyncTokenStream:
        """Like `stream`, for a chat: the server applies its model's chat template."""
        check_messages(messages)
        return self._start(messages, model, timeout, request_id, sampling, stream=True)

    async def _complete(
        self,
        prompt: str | Sequence[Message],
        model: str,
        timeout: float | None,
        request_id: str | None,
        sampling: SamplingOptions,
    ) -> Completion:
        async with self._start(prompt, model, timeout, request_id, sampling, stream=False) as events:
            return collect([event async for event in events], events.request_id)

    def _start(
        self,
        prompt: str | Sequence[Message],
        model: str,
        timeout: float | None,
        request_id: str | None,
        sampling: SamplingOptions,
        *,
        stream: bool,
    ) -> AsyncTokenStream:
        request = build_request(prompt, model=model, stream=stream, sampling=sampling, request_id=request_id)
        events = AsyncTokenStream(self._open_call, request, Attempts(self._retries, timeout))
        self._streams.add(events)
        return events

    def _open_call(self, requests: Iterator[service_pb2.ModelInferRequest], timeout: float | None) -> Any:
        if self._closed:
            raise Cancelled("the client is closed")
        return self._triton._client_stub.ModelStreamInfer(requests, timeout=timeout, metadata=self._metadata)

    async def server_ready(self, timeout: float = 5.0) -> bool:
        """Whether the server answers and all its models are ready. False if not in `timeout` s, or if closed."""
        return await self._ask("ServerReady", service_pb2.ServerReadyRequest(), timeout)

    async def model_ready(self, model: str = DEFAULT_MODEL, timeout: float = 5.0) -> bool:
        """Whether `model` can be used. False also if there is no such model, or no server, or if closed."""
        return await self._ask("ModelReady", model_ready_request(model), timeout)

    async def _ask(self, method: str, request: Any, timeout: float) -> bool:
        timeout = min(timeout, MAX_TIMEOUT_S)
        try:
            answer = await getattr(self._triton._client_stub, method)(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as rpc_error:
            error = error_from_rpc(rpc_error)
            if self._closed or isinstance(error, Unavailable | DeadlineExceeded | NotFound):
                return False
            raise error from None
        except (grpc.aio.UsageError, asyncio.CancelledError):  # asked after closing, and before
            if not self._closed:  # the asking task is cancelled
                raise
            return False
        return bool(answer.ready)

    async def aclose(self) -> None:
        """Close the connection; open streams end with Cancelled, and so does whatever is asked afterwards."""
        self._closed = True
        for events in list(self._streams):  # first: grpc reports a closed channel as a cancelled task
            events._cut_off()
        await self._triton.close()

    async def __aenter__(self) -> Self:
        """The client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the connection."""
        await self.aclose()
