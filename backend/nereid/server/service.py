"""Service: one loaded model as the server sees it: requests in, responses out. Joins parser, engine and stream.

Invariant: every accepted channel gets exactly one final response, whatever goes wrong on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from nereid.build import build_engine
from nereid.config import EngineConfig
from nereid.request import RequestFailure
from nereid.server.encoder_pool import EncoderPool
from nereid.server.parameters import Limits
from nereid.server.request_parser import Prompt, RawRequest, RequestParser
from nereid.server.response_stream import ReplyChannel, ResponseStream

_LOG = logging.getLogger(__name__)
_CLOSE_S = 5.0

ToFailure = Callable[[BaseException], RequestFailure]


class Service:
    """Loads the model when made, serves until closed."""

    def __init__(self, config: EngineConfig, base: Path, *, decoupled: bool, to_failure: ToFailure) -> None:
        """base: what a relative model directory is relative to.  to_failure: any error as what a client is told.

        Raises ConfigError or ModelLoadError.
        """
        self._config = config
        self._to_failure = to_failure
        self._stream = ResponseStream(lambda request_id: self.engine.cancel(request_id))
        built = build_engine(config, base, self._stream.emit)
        self.engine = built.engine
        limits = Limits(built.model_config.vocab_size, config.default_max_tokens, config.default_timeout_ms)
        self._parser = RequestParser(built.tokenizer, limits, self.engine.max_model_len, decoupled=decoupled)
        self._encoders = EncoderPool(config.tokenizer_threads, config.max_queue_size)
        self._stream.start()

    def accept(self, raw: RawRequest, channel: ReplyChannel) -> None:
        """Take one request; what becomes of it comes through `channel`. Raises what makes it refused at once."""
        prompt = self._parser.prompt(raw)
        self._encoders.run(len(prompt.text or ""), lambda: self._submit(raw, prompt, channel))

    def _submit(self, raw: RawRequest, prompt: Prompt, channel: ReplyChannel) -> None:
        try:
            request, options = self._parser.parse(raw, prompt)
            self._stream.register(request.request_id, channel, options)
            self.engine.submit(request)
        except Exception as error:
            channel.fail(self._to_failure(error))

    def drain(self) -> None:
        """Take no more requests; end what runs within `drain_timeout_s`, then free the model. Returns at once."""
        self.engine.drain(self._config.drain_timeout_s)

    def close(self) -> None:
        """Drain, end all threads, free the model."""
        self._encoders.close()
        self.engine.shutdown(self._config.drain_timeout_s)
        self._stream.close(_CLOSE_S)
