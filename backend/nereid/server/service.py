"""Service: one loaded model as the server sees it: requests in, responses out. Joins parser, engine and stream.

Invariant: every accepted channel gets exactly one final response, whatever goes wrong on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from nereid.build import build_engine
from nereid.config import EngineConfig
from nereid.errors import EngineStoppedError, QueueTimeoutError, RequestCancelledError
from nereid.request import RequestFailure
from nereid.server.encoder_pool import EncoderPool
from nereid.server.mailbox import ReplyChannel
from nereid.server.metric_values import LoadedEngine
from nereid.server.outcomes import Outcomes
from nereid.server.parameters import Limits
from nereid.server.request_parser import CheckedRequest, Deployment, RequestParser
from nereid.server.response_stream import ResponseStream
from nereid.server.sources import RawRequest
from nereid.server.texts import Texts
from nereid.server.tracing import Tracer

_CLOSE_S = 5.0

ToFailure = Callable[[BaseException], RequestFailure]


class Service:
    """Loads the model when made, serves until closed."""

    def __init__(
        self,
        config: EngineConfig,
        base: Path,
        deployment: Deployment,
        to_failure: ToFailure,
        tracer: Tracer | None = None,
    ) -> None:
        """base: what a relative model directory is relative to.  to_failure: any error as what a client is told.
        tracer: where requests are traced.

        Raises ConfigError or ModelLoadError.
        """
        self._config = config
        self._to_failure = to_failure
        self._draining = False
        self.outcomes = Outcomes()
        trace = tracer.ended if tracer else None
        self._stream = ResponseStream(lambda request_id: self.engine.cancel(request_id), self.outcomes, trace)
        built = build_engine(config, base, self._stream.emit)
        self.engine = built.engine
        self.loaded = LoadedEngine(
            config.block_size,
            self.engine.stats.num_blocks,
            config.max_num_seqs,
            self.engine.max_model_len,
            time.time(),
        )
        try:
            texts = Texts.of_model(built.tokenizer, built.directory)
        except BaseException:
            self.engine.shutdown(0.0)
            raise
        self._parser = RequestParser(
            Limits.of(config, built.model_config.vocab_size),
            texts,
            deployment,
            max_model_len=self.engine.max_model_len,
            block_size=config.block_size,
            check_guide=built.compiler.compile,
        )
        self._encoders = EncoderPool(config.tokenizer_threads, config.max_queue_size)
        self._stream.start()

    def accept(self, read: Callable[[], RawRequest], channel: ReplyChannel) -> None:
        """Take one request; what becomes of it, a refusal too, comes through `channel`. Raises nothing.

        read: gives the request's values; what it raises is a refusal.
        """
        try:
            checked = self._parser.check(read())
            self._encoders.run(checked.size, lambda: self._submit(checked, channel))
        except Exception as error:  # this request's alone
            self._stream.refuse(channel, self._to_failure(error))

    def _submit(self, checked: CheckedRequest, channel: ReplyChannel) -> None:
        try:
            self._refuse_late(checked, channel)
            request, builder = self._parser.encode(checked)
            self._stream.register(request.request_id, channel, builder)
            self.engine.submit(request)
        except Exception as error:
            self._stream.refuse(channel, self._to_failure(error))

    def _refuse_late(self, checked: CheckedRequest, channel: ReplyChannel) -> None:
        """Not to spend time on a prompt that nobody waits for any more: it may have waited for a thread."""
        if self._draining:
            raise EngineStoppedError()
        if time.monotonic() >= checked.deadline:
            raise QueueTimeoutError("timeout_ms was over before the prompt could be encoded")
        if self._encoders.is_long(checked.size) and channel.cancelled():
            raise RequestCancelledError("the request was cancelled")

    def drain(self) -> None:
        """Take no more requests; end what runs within `drain_timeout_s`, then free the model. Returns at once."""
        self._draining = True
        self.engine.drain(self._config.drain_timeout_s)

    def close(self) -> None:
        """Drain, end all threads, free the model."""
        self._draining = True
        self._encoders.close()
        self.engine.shutdown(self._config.drain_timeout_s)
        self._stream.close(_CLOSE_S)
