"""A Llama-family decoder whose attention is `pagedattn.paged_attention`.

``xp`` is NumPy or CuPy. Everything between two attention calls is a function of single tokens, so one forward pass
takes the tokens of all sequences of a step as one flat batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from kv_cache import KVCache

from pagedattn import paged_attention, rope
from pagedattn.cache import Batch


@dataclass(frozen=True)
class Config:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kv_num_heads: int
    vocab_size: int
    max_length: int
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_interleaved: bool = True  # pairs (2i, 2i+1); False: (i, i + head_size / 2)
    window: int | None = None

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass
class Layer:
    """Weights of a block; a matrix is (out, in)."""

    attention_norm: Any  # (hidden,)
    qkv: Any  # ((num_heads + 2 * kv_num_heads) * head_size, hidden): [Q | K | V]
    attention_out: Any  # (hidden, num_heads * head_size)
    mlp_norm: Any  # (hidden,)
    gate_up: Any  # (2 * intermediate, hidden): [gate | up]
    down: Any  # (hidden, intermediate)


@dataclass
class Weights:
    embedding: Any  # (vocab, hidden)
    layers: list[Layer]
    final_norm: Any  # (hidden,)
    classifier: Any  # (vocab, hidden)


class Llama:
    def __init__(self, config: Config, weights: Weights, xp: Any = np) -> None:
        self.config = config
        self.xp = xp
        self.embedding = xp.asarray(weights.embedding)
        self.layers = [
            Layer(*(xp.asarray(getattr(layer, field.name)) for field in fields(Layer))) for layer in weights.layers
        ]
        self.final_norm = xp.asarray(weights.final_norm)
        tied = weights.classifier is weights.embedding
        self.classifier = self.embedding if tied else xp.asarray(weights.classifier)
        frequencies = rope.default(config.head_size, config.rope_theta)
        self.rope = functools.cache(
            lambda dtype: [xp.asarray(table) for table in frequencies.caches(config.max_length, dtype)]
        )

    def forward(self, tokens: Any, batch: Batch, cache: KVCache, rows: Any) -> Any:
        """Run the new tokens of a step, writing their keys and values into the cache.

        Parameters
        ----------
        tokens : (N,) int
        batch : Batch
            From `pagedattn.cache.assemble`, in the same order.
        cache : KVCache
        rows : (R,) int
            Tokens whose logits are wanted.

        Returns
        -------
        (R, vocab_size) float32
        """
        config = self.config
        cos, sin = self.rope(cache.io.name)
        x = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            qkv = self._norm(x, layer.attention_norm) @ layer.qkv.T
            attended = paged_attention(
                qkv.astype(cache.io.numpy),
                **cache.inputs(index),
                **batch.inputs,
                cos_cache=cos,
                sin_cache=sin,
                do_rotary=1,
                rotary_interleaved=int(config.rope_interleaved),
                num_heads=config.num_heads,
                kv_num_heads=config.kv_num_heads,
                local_window_size=config.window or -1,
            ).output
            x = x + attended.astype(np.float32) @ layer.attention_out.T
            gate, up = self.xp.split(self._norm(x, layer.mlp_norm) @ layer.gate_up.T, 2, axis=1)
            x = x + (self._silu(gate) * up) @ layer.down.T
        return self._norm(x[rows], self.final_norm) @ self.classifier.T

    def _norm(self, x: Any, weight: Any) -> Any:
        return x / self.xp.sqrt((x * x).mean(axis=-1, keepdims=True) + self.config.norm_epsilon) * weight

    def _silu(self, x: Any) -> Any:
        return x * (0.5 + 0.5 * self.xp.tanh(0.5 * x))  # x * sigmoid(x) without an exp that overflows


def random_model(config: Config, seed: int = 0, xp: Any = np) -> Llama:
    """Weights from a seed, at a scale that keeps activations near 1."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)

    hidden = config.hidden_size
    ones = np.ones(hidden, np.float32)
    layers = [
        Layer(
            ones,
            matrix((config.num_heads + 2 * config.kv_num_heads) * config.head_size, hidden),
            matrix(hidden, config.num_heads * config.head_size),
            ones,
            matrix(2 * config.intermediate_size, hidden),
            matrix(hidden, config.intermediate_size),
        )
        for _ in range(config.num_layers)
    ]
    embedding = rng.standard_normal((config.vocab_size, hidden), np.float32)
    return Llama(config, Weights(embedding, layers, ones, 2 * matrix(config.vocab_size, hidden)), xp)


def load_llama2c(path: str | Path, xp: Any = np) -> Llama:
    """Read a llama2.c "version 0" checkpoint: seven int32, then float32 tensors, each for all layers at a time."""
    data = np.fromfile(path, np.float32)
    if len(data) < 7:
        raise ValueError(f"{path}: too short for a llama2.c header.")
    header = data[:7].view(np.int32).tolist()
    dim, hidden, num_layers, num_heads, kv_num_heads, vocab, max_length = header
    if min(dim, hidden, num_layers, num_heads, kv_num_heads, max_length) < 1 or dim % num_heads:
        raise ValueError(f"{path}: no llama2.c version 0 checkpoint; its header reads {header}.")
    config = Config(dim, hidden, num_layers, num_heads, kv_num_heads, abs(vocab), max_length)
    size, at = config.head_size, 7

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        start, at = at, at + int(np.prod(shape))
        if at > len(data):
            raise ValueError(f"{path}: ends after {len(data)} floats, but its header asks for more.")
        return data[start:at].reshape(shape)

    embedding = take(config.vocab_size, dim)
    attention_norm = take(num_layers, dim)
    query, key, value = (take(num_layers, heads * size, dim) for heads in (num_heads, kv_num_heads, kv_num_heads))
    attention_out = take(num_layers, dim, num_heads * size)
    mlp_norm = take(num_layers, dim)
    gate, down, up = take(num_layers, hidden, dim), take(num_layers, dim, hidden), take(num_layers, hidden, dim)
    final_norm = take(dim)
    take(2, max_length, size // 2)  # tables of cosines and sines, computed here
    classifier = embedding if vocab > 0 else take(config.vocab_size, dim)  # a negative size says "not shared"
    layers = [
        Layer(
            attention_norm[i],
            np.concatenate([query[i], key[i], value[i]]),
            attention_out[i],
            mlp_norm[i],
            np.concatenate([gate[i], up[i]]),
            down[i],
        )
        for i in range(num_layers)
    ]
    return Llama(config, Weights(embedding, layers, final_norm, classifier), xp)
