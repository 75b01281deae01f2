"""`Pipeline`: the stub's part of a request's way, wired together.

    execute → tokenizer thread → engine → reader thread → detokenizer thread → responder thread

One direction; only cancels go against it. Every queue is unbounded, since the number of requests is not.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial

from orca_backend.channel import EngineInfo, Heartbeat, IterationReport
from orca_backend.config import EngineConfig
from orca_backend.request import Request, SamplerSettings, TokenEvent
from orca_backend.serving.detokenizer import Detokenizer
from orca_backend.serving.endpoint import BadRequest, Generation, RawRequest, StopRequest, parse
from orca_backend.serving.engine_client import EngineClient, EngineUnavailable
from orca_backend.serving.metrics import Metrics
from orca_backend.serving.responder import Responder
from orca_backend.serving.session import Failure, Reply, Session
from orca_backend.serving.tokenizer import ChatTemplateError, Tokenizer

_SEED_MASK = (1 << 63) - 1  # seeds are counters of 63 bits in the engine


class Pipeline:
    """Serves the requests of one model. Raises EngineStartError, OSError or ValueError if it cannot start."""

    def __init__(
        self,
        config: EngineConfig,
        metrics: Metrics,
        log: Callable[[str], None],
        *,
        command: list[str] | None = None,
    ) -> None:
        """Load the tokenizers and start the engine and the threads. `command` is as in EngineClient."""
        self._config = config
        self._metrics = metrics
        self._encoder = Tokenizer(config.model)
        self._decoder = Tokenizer(config.model)  # tokenizers' objects are not safe to share between threads
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._sessions: dict[int, Session] = {}  # until their final response is sent
        self._prompts: queue.SimpleQueue[Session | None] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[IterationReport | Heartbeat | None] = queue.SimpleQueue()
        self._engine = EngineClient(config, self, log, command=command)
        self.info = self._engine.start()
        metrics.engine_started(self.info)
        self._responder = Responder(self._abandon, self._closed, log)
        self._threads = [
            threading.Thread(target=self._tokenize, name="tokenizer", daemon=True),
            threading.Thread(target=self._detokenize, name="detokenizer", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------ called by Triton's thread; never blocks

    def accept(self, raw: RawRequest, reply: Reply) -> None:
        """Take a request; whatever happens to it is answered through `reply`."""
        try:
            parsed = parse(raw, self._config.sampling_defaults)
        except BadRequest as error:
            self.refuse(reply, Failure(error.code, error.message))
            return
        if isinstance(parsed, StopRequest):
            for session in self._snapshot():
                if session.generation.request_id == parsed.request_id:
                    self._end(session, "CANCELLED", "stopped by a request with the same id")
            self._responder.acknowledge(reply)
            return
        self._open(parsed, reply)

    def refuse(self, reply: Reply, failure: Failure) -> None:
        """Answer with an error, once, and count it."""
        self._metrics.failed(failure.code)
        self._responder.refuse(reply, failure)

    def _open(self, generation: Generation, reply: Reply) -> None:
        limits = self._config.limits
        timeout = generation.timeout_us / 1e6 if generation.timeout_us else limits.request_timeout
        session = Session(next(self._ids), generation, reply, timeout)
        with self._lock:
            full = len(self._sessions) >= limits.max_queue_size
            if not full:
                self._sessions[session.id] = session
        if full:
            text = f"Exceeds maximum queue size: {limits.max_queue_size} requests are in the server"
            self.refuse(reply, Failure("UNAVAILABLE", text))
            return
        self._responder.open(session)
        self._prompts.put(session)

    # ------------------------------------------------------------------ the tokenizer thread

    def _tokenize(self) -> None:
        while (session := self._prompts.get()) is not None:
            if session.has_ended():
                continue
            try:
                request = self._prepare(session)
                self._engine.submit(request)
            except BadRequest as error:
                self._end(session, error.code, error.message)
            except EngineUnavailable as error:
                self._end(session, "UNAVAILABLE", str(error))
            except Exception as error:  # a tokenizer's own trouble is this request's only
                self._end(session, "INTERNAL", f"the prompt cannot be tokenized: {type(error).__name__}: {error}")
            else:
                if session.has_ended():  # while it was on its way: its cancel may have overtaken it
                    self._engine.cancel(session.id)

    def _prepare(self, session: Session) -> Request:
        generation, sampling = session.generation, session.generation.sampling
        if generation.messages is None:
            session.prompt = generation.text
        else:
            try:
                session.prompt = self._encoder.render_chat(generation.messages)
            except ChatTemplateError as error:
                raise BadRequest("INVALID_ARG", f"apply_chat_template: {error}") from error
        limit, vocab_size = self.info.max_model_len, self.info.vocab_size
        too_long = f"tokens, but the limit is {limit} for prompt and generated tokens together"
        if (fewest := self._encoder.fewest_tokens(session.prompt)) >= limit:
            raise BadRequest("INVALID_ARG", f"text_input: the prompt has at least {fewest} {too_long}")
        # A template writes the special tokens itself.
        prompt_ids = self._encoder.encode(session.prompt, add_special_tokens=generation.messages is None)
        session.num_input_tokens = len(prompt_ids)
        if not prompt_ids:
            raise BadRequest("INVALID_ARG", "text_input: the prompt has no tokens")
        if len(prompt_ids) >= limit:
            raise BadRequest("INVALID_ARG", f"text_input: the prompt has {len(prompt_ids)} {too_long}")
        for token_id in sampling.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise BadRequest("INVALID_ARG", f"stop_token_ids: {token_id} is not in the vocabulary of {vocab_size}")
        max_new_tokens = min(generation.max_tokens, limit - len(prompt_ids))
        session.detokenizer = Detokenizer(
            partial(self._decoder.decode, skip_special_tokens=sampling.skip_special_tokens),
            prompt_ids,
            sampling.stop_strings,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        if not generation.exclude_input:
            session.put(session.prompt, 0)
        stop_token_ids = sampling.stop_token_ids if sampling.ignore_eos else self._stop_ids(sampling.stop_token_ids)
        greedy = sampling.temperature == 0 or sampling.top_p == 0
        return Request(
            request_id=session.id,
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
            sampling=SamplerSettings(
                temperature=0.0 if greedy else sampling.temperature,
                top_p=1.0 if greedy else sampling.top_p,
                top_k=sampling.top_k if 0 < sampling.top_k < vocab_size else 0,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                seed=(secrets.randbits(63) if sampling.seed is None else sampling.seed) & _SEED_MASK,
                min_tokens=min(sampling.min_tokens, max_new_tokens),
            ),
            priority=sampling.priority,
            tenant=sampling.tenant,
            cache_salt=sampling.cache_salt,
            deadline=session.deadline if generation.timeout_us else None,  # the default one is no wish of the client
            expected_tokens=sampling.expected_tokens and min(sampling.expected_tokens, max_new_tokens),
        )

    def _stop_ids(self, given: list[int]) -> list[int]:
        return list(dict.fromkeys([*self._encoder.eos_token_ids, *given]))

    # ------------------------------------------------------------------ the reader thread (EngineClient's listener)

    def on_report(self, report: IterationReport | Heartbeat) -> None:
        """Hand over to the detokenizer thread: the engine must never wait for text."""
        self._reports.put(report)

    def on_engine_died(self, message: str) -> None:
        """Fail everything in flight; a request that comes from now on is refused by `submit`."""
        for session in self._snapshot():
            self._end(session, "UNAVAILABLE", message)

    def on_engine_restarted(self, info: EngineInfo) -> None:
        """Take requests again."""
        self.info = info
        self._metrics.engine_restarted(info)

    # ------------------------------------------------------------------ the detokenizer thread

    def _detokenize(self) -> None:
        while (report := self._reports.get()) is not None:
            self._metrics.engine_reported(report)
            if isinstance(report, IterationReport):
                for request_id in report.joined:
                    session = self._sessions.get(request_id)
                    if session is not None and not session.started:  # it also joins when it was preempted
                        session.started = True
                        self._metrics.started(report.started - session.arrived)
                sessions = []
                for event in report.events:
                    if (session := self._sessions.get(event.request_id)) is not None and not session.has_ended():
                        sessions.append(session)
                        try:
                            self._deliver(session, event)
                        except Exception as error:  # one request's trouble must not be the others'
                            text = f"the output cannot be decoded: {type(error).__name__}: {error}"
                            self._end(session, "INTERNAL", text)
                if sessions:
                    self._responder.wake(*sessions)

    def _deliver(self, session: Session, event: TokenEvent) -> None:
        if event.finish_reason == "error":
            if event.code == "UNAVAILABLE":  # to the scheduler that is a request for which it is too late
                self._metrics.expired()
            self._end(session, event.code or "INTERNAL", event.message)
            return
        if event.finish_reason == "cancelled":
            self._end(session, "CANCELLED", event.message or "the engine has cancelled the request")
            return
        detokenizer, sampling = session.detokenizer, session.generation.sampling
        assert detokenizer is not None
        now = time.monotonic()
        before = detokenizer.num_tokens
        texts = []
        for index, token_id in enumerate(event.token_ids):
            is_stop_token = event.finish_reason == "stop" and index == len(event.token_ids) - 1
            if is_stop_token and not sampling.include_stop_str_in_output:
                detokenizer.count()
            else:
                texts.append(detokenizer.append(token_id))
            if detokenizer.stopped:
                break
        reason: str | None = event.finish_reason
        if reason is not None:
            texts.append(detokenizer.finish())
        if detokenizer.stopped:
            if reason is None:
                self._engine.cancel(session.id, "stop")
            reason = "stop"
        num_tokens = detokenizer.num_tokens - before
        self._metrics.tokens_came(num_tokens, now, session.last_token_at, session.arrived)
        if num_tokens:
            session.last_token_at = now
        if session.put("".join(texts), num_tokens, reason) and reason is not None:
            self._metrics.finished(session.arrived, session.num_input_tokens, detokenizer.num_tokens, reason)

    # ------------------------------------------------------------------ ends, from any thread

    def _end(self, session: Session, code: str, message: str) -> None:
        """End a request with an error, whatever state it is in."""
        if session.fail(code, message):
            self._abandon(session)
            self._responder.wake(session)

    def _abandon(self, session: Session) -> None:
        """A session was failed: count it, and free what it holds in the engine; whoever sees that sees the count."""
        self._metrics.failed(session.failure_code)
        self._engine.cancel(session.id)

    def _closed(self, session: Session) -> None:
        """The final response is sent."""
        with self._lock:
            self._sessions.pop(session.id, None)

    def _snapshot(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())

    @property
    def in_flight(self) -> int:
        """Requests whose final response is not yet sent."""
        return len(self._sessions)

    def fail_all(self, message: str) -> None:
        """End every request in flight with UNAVAILABLE."""
        for session in self._snapshot():
            self._end(session, "UNAVAILABLE", message)

    def close(self) -> None:
        """End the engine and the threads. What is still in flight gets its error first."""
        self.fail_all("the server is stopping")
        self._prompts.put(None)
        self._reports.put(None)
        for thread in self._threads:
            thread.join()
        self._engine.stop()
        self._responder.close()
