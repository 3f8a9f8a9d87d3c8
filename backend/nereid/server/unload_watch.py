"""UnloadWatch: notices that the server unloads this model or stops, while requests are still running.

The server tells a model so (`finalize`) only after its last request has ended, and at the exit timeout it cuts what
still runs. So this asks the server itself, over HTTP, whether the model is ready; an answer of "no", or a closed
port, after it once was, means that draining has to begin. `pb_utils.is_model_ready` would ask without HTTP, but in
server 2.51 it can crash the stub during a shutdown.
"""

from __future__ import annotations

import http.client
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from nereid.server.parent_arguments import options_in, parent_arguments

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 1.0
_CERTAIN_AFTER = 2  # answers in a row


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Where the server's HTTP endpoint listens."""

    host: str
    port: int


def parent_address() -> HttpAddress:
    """The endpoint of the server that started this process, from its command line."""
    return address_in(parent_arguments())


def address_in(arguments: Sequence[str]) -> HttpAddress:
    """The endpoint that a tritonserver's arguments name; its defaults where they name none."""
    found = {"--http-address": "127.0.0.1", "--http-port": "8000"}
    found |= {name: value for name, value in options_in(arguments) if name in found}
    host = found["--http-address"]
    return HttpAddress("127.0.0.1" if host == "0.0.0.0" else host, int(found["--http-port"]))


class UnloadWatch:
    """Asks at each `check`; calls `on_unload` once, when the answer is certain."""

    def __init__(self, model_name: str, address: HttpAddress, on_unload: Callable[[], None]) -> None:
        self._path = f"/v2/models/{quote(model_name)}/ready"
        self._address = address
        self._on_unload = on_unload
        self._was_ready = False
        self._refusals = 0
        self._done = False

    def saw_ready(self) -> None:
        """The model is ready, as somebody else knows: a request that comes is proof."""
        self._was_ready = True

    def check(self) -> None:
        """One question; at most a second."""
        if self._done:
            return
        ready = self._ask()
        if ready is None:
            return
        self._was_ready = self._was_ready or ready
        self._refusals = 0 if ready else self._refusals + 1
        if self._was_ready and self._refusals >= _CERTAIN_AFTER:
            self._done = True
            _LOG.info("the model is being unloaded, or the server is stopping: draining")
            self._on_unload()

    def _ask(self) -> bool | None:
        """Whether the model is ready; None where it cannot be asked, or does not say in time."""
        connection = http.client.HTTPConnection(self._address.host, self._address.port, timeout=_TIMEOUT_S)
        try:
            # Not kept alive: an open connection would hold up the server's own shutdown.
            connection.request("GET", self._path, headers={"Connection": "close"})
            return connection.getresponse().status == http.client.OK
        except ConnectionError:  # refused, or closed unanswered: nobody listens any more
            return False
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
