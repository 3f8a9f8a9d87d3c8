"""build_engine: everything an engine is made of, put together from one configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from nereid.batch import Capacity
from nereid.config import EngineConfig
from nereid.engine import Emit, Engine
from nereid.executor import LocalExecutor
from nereid.guided.compiler import GuideCompiler
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_memory.budget import describe_pool
from nereid.model_config import ModelConfig
from nereid.model_runner import ModelRunner
from nereid.models.source import resolve
from nereid.tokenization.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A started engine and what its surroundings need to know. directory: where the model's files lie."""

    engine: Engine
    tokenizer: Tokenizer
    compiler: GuideCompiler
    model_config: ModelConfig
    capacity: Capacity
    directory: Path


def build_engine(config: EngineConfig, base: Path, emit: Emit) -> BuiltEngine:
    """Load the model of `config` and start an engine on it.

    base: what relative directories are relative to.  Raises ConfigError or ModelLoadError.
    """
    config = config.located(base)
    directory = resolve(config.model, base)
    model_config = ModelConfig.load(directory)
    tokenizer = Tokenizer(directory)
    executor = LocalExecutor(lambda: ModelRunner(directory, config, model_config))
    compiler = GuideCompiler(tokenizer, model_config.vocab_size, model_config.eos_token_ids)
    engine = Engine(config, model_config, tokenizer, executor, compiler, emit)
    capacity = engine.start()
    _log_room(config, model_config, capacity, engine.max_model_len)
    return BuiltEngine(engine, tokenizer, compiler, model_config, capacity, directory)


def _log_room(config: EngineConfig, model_config: ModelConfig, capacity: Capacity, max_model_len: int) -> None:
    layout = BlockLayout(capacity.block_size, capacity.groups, config.max_num_batched_tokens)
    _LOG.info("%s", describe_pool(capacity, layout, max_model_len))
    wanted = config.model_len(model_config.max_position_embeddings)
    if max_model_len < wanted:
        cut = "max_model_len is cut from %d to %d, which is what the %d blocks of the KV cache hold"
        _LOG.warning(cut, wanted, max_model_len, capacity.num_blocks - 1)
    _LOG.info("ready: at most %d tokens a request, %d requests at once", max_model_len, config.max_num_seqs)
