"""TransferCosts: whether blocks are copied back or computed anew, by what was measured when the executor started."""

from __future__ import annotations

from dataclasses import dataclass

from nereid.batch import TransferRates


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """bytes_per_block: of one group's block.  rates: None where nothing was measured; copying is then taken to pay."""

    bytes_per_block: int = 0
    rates: TransferRates | None = None

    def reload_pays(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether blocks are copied to the device in less time than so many tokens are computed in."""
        if self.rates is None:
            return True
        copying = num_blocks * self.bytes_per_block / self.rates.in_bytes_per_s
        return copying < num_tokens / self.rates.prefill_tokens_per_s

    def swap_pays(self, num_blocks: int, num_tokens: int) -> bool:
        """The same, to the host and back."""
        if self.rates is None:
            return True
        size = num_blocks * self.bytes_per_block
        copying = size / self.rates.out_bytes_per_s + size / self.rates.in_bytes_per_s
        return copying < num_tokens / self.rates.prefill_tokens_per_s
