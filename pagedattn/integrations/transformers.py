"""Hugging Face transformers: attention by `paged_attention`, and a cache in pages.

After `register` any decoder that takes transformers' attention functions can use this one; with a `PagedCache` its keys
and values live in one pool of blocks a layer, shared by the sequences of the batch::

    from pagedattn.integrations.transformers import PagedCache, register

    register()
    model.set_attn_implementation("pagedattn")
    cache = PagedCache(model.config, max_batch_size=8, max_length=4096)
    tokens = model.generate(**tokenizer(prompts, padding=True, return_tensors="pt"), cache=cache)

Padding is neither stored nor computed. Keys arrive normalised and rotated, and those of latent attention expanded, with
values padded to their width: for the full operator (QK-norm, RoPE, the LATENT layout) replace the module's forward.
Without a `PagedCache` the keys that transformers gathers are attended as they come. Beam search, assisted generation
and masks other than causal, sliding and padding are refused. Written against transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedattn.api import paged_attention
from pagedattn.cache import BlockPool, BlockTable, assemble
from pagedattn.errors import InvalidArgumentError, MissingDependencyError, UnsupportedError

try:
    import torch
    import transformers
    from transformers.cache_utils import CacheLayerMixin
except ImportError as error:
    raise MissingDependencyError(
        f'pagedattn.integrations.transformers needs torch and transformers ({error}): pip install "pagedattn[models]"'
    ) from error

__all__ = ["PagedCache", "PagedLayer", "attention", "register"]


def register(name: str = "pagedattn") -> None:
    """Make the attention function known to transformers, for ``model.set_attn_implementation(name)``."""
    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, padding_mask)


class PagedCache(transformers.Cache):  # type: ignore[misc]
    """Keys and values of a batch of sequences, in blocks: what ``generate(cache=...)`` takes.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's.
    max_batch_size : int
        Sequences at a time.
    max_length : int
        Tokens of a sequence, prompt and generated ones.
    block_size : int
        Positions in a block; a power of two >= 16.
    """

    def __init__(self, config: Any, *, max_batch_size: int, max_length: int, block_size: int = 16) -> None:
        self.batch = _Batch(max_batch_size, max_length, block_size)
        text = config.get_text_config(decoder=True)
        others = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        sharing = bool(getattr(text, "num_kv_shared_layers", 0))
        if others or sharing:
            raise UnsupportedError(
                "PagedCache: expected a model whose layers all have full or sliding attention and a cache of their "
                f"own, got {', '.join(sorted(others)) or 'layers that share one'}."
            )
        super().__init__(layers=[PagedLayer(self.batch) for _ in range(text.num_hidden_layers)])


class _Batch:
    """The sequences of a cache, and where the tokens of the running forward belong; shared by the layers.

    Attributes
    ----------
    length : int
        Columns seen so far, padding included: what transformers calls the length of the cache.
    tokens : (N,) int64 tensor, or None
        Which of the batch_size * columns tokens of the forward are no padding; None: all.
    inputs : dict
        The operator's inputs that describe the batch.
    """

    def __init__(self, max_batch_size: int, max_length: int, block_size: int) -> None:
        self.max_batch_size, self.max_length, self.block_size = max_batch_size, max_length, block_size
        self.pool = BlockPool(max_batch_size * -(-max_length // block_size))
        self.tables: list[BlockTable] = []
        self.length = 0
        self.tokens: Any = None
        self.inputs: dict[str, Any] = {}

    def advance(self, batch_size: int, columns: int, mask: Any, device: Any) -> None:
        """Begin a forward of ``columns`` tokens a sequence, ``mask`` (batch_size, columns) tells the real ones."""
        if not self.tables:
            if batch_size > self.max_batch_size:
                raise InvalidArgumentError(
                    f"PagedCache: expected a batch of at most max_batch_size = "
                    f"{self.max_batch_size} sequences, got {batch_size}."
                )
            self.tables = [BlockTable(self.pool, self.block_size) for _ in range(batch_size)]
        if batch_size != len(self.tables):
            raise InvalidArgumentError(
                f"PagedCache: expected the {len(self.tables)} sequences that it holds, "
                f"got a batch of {batch_size}; reset() it for others."
            )
        counts = [columns] * batch_size if mask is None else mask.sum(1).tolist()
        longest = max(table.length + count for table, count in zip(self.tables, counts, strict=True))
        if longest > self.max_length:
            raise InvalidArgumentError(
                f"PagedCache: expected at most max_length = {self.max_length} tokens a sequence, got {longest}."
            )
        for table, count in zip(self.tables, counts, strict=True):
            table.append(count)
        batch = assemble(list(zip(self.tables, counts, strict=True)), token_count=sum(counts))
        self.inputs = {
            name: x if name == "attention_metadata" else torch.from_numpy(x).to(device)
            for name, x in batch.inputs.items()
        }
        self.tokens = None if mask is None else mask.flatten().nonzero()[:, 0]
        self.length += columns

    def pack(self, x: Any) -> Any:
        """Rows (N, heads * width) of the real tokens of x, (batch_size, heads, columns, width)."""
        rows = x.transpose(1, 2).reshape(-1, x.shape[1] * x.shape[3])
        return rows if self.tokens is None else rows[self.tokens]

    def unpack(self, rows: Any, columns: int) -> Any:
        """Inverse of `pack` up to the order of axes: (batch_size, columns, heads * width), 0 in padding."""
        if self.tokens is not None:
            spread = rows.new_zeros(len(self.tables) * columns, rows.shape[1])
            spread[self.tokens] = rows
            rows = spread
        return rows.view(len(self.tables), columns, -1)

    def reset(self) -> None:
        """Give every block back."""
        for table in self.tables:
            table.free()
        self.tables, self.length = [], 0


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's blocks: ``keys`` and ``values``, (num_blocks, block_size, kv_heads, width).

    The length is the batch's, but a layer reaches it only once its attention has run.
    """

    def __init__(self, batch: _Batch) -> None:
        super().__init__()
        self.batch = batch
        self.length = 0

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Allocate the blocks, of the states' type and on their device."""
        _, heads, _, width = key_states.shape
        shape = (self.batch.pool.num_blocks, self.batch.block_size, heads, width)
        self.keys, self.values = key_states.new_zeros(shape), key_states.new_zeros(shape)
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Leave the new states as they are, and tell the attention function, which stores them, where to."""
        keywords = kwargs.get("kwargs")
        if keywords is None:
            raise UnsupportedError(
                "PagedCache: this model's attention does not hand its keywords to the cache, which "
                "transformers 5.24 and later do for models that take attention functions."
            )
        keywords["paged_layer"] = self
        return key_states, value_states

    def advance(self, shape: tuple[int, int], mask: Any, device: Any) -> None:
        """Begin this layer's part of a forward; the first layer to come begins it for all."""
        if self.length == self.batch.length:
            self.batch.advance(*shape, mask, device)
        self.length = self.batch.length

    def write(self, key: Any, value: Any) -> None:
        """Store states (batch_size, kv_heads, columns, width) without attending to anything."""
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        slots = self.batch.inputs["slot_mapping"].long()
        for blocks, x in ((self.keys, key), (self.values, value)):
            blocks.view(-1, x.shape[1] * x.shape[3])[slots] = self.batch.pack(x)

    def attend(self, query: Any, key: Any, value: Any, sink: Any, **attributes: Any) -> Any:
        """Store key and value and attend: (batch_size, columns, heads, width)."""
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        _, heads, columns, width = query.shape
        output = paged_attention(
            self.batch.pack(query),
            self.batch.pack(key),
            self.batch.pack(value),
            self.keys,
            self.values,
            **self.batch.inputs,
            head_sink=None if sink is None else sink.to(query.dtype),
            num_heads=heads,
            kv_num_heads=key.shape[1],
            **attributes,
        ).output
        return self.batch.unpack(output, columns).unflatten(-1, (heads, width))

    def get_seq_length(self) -> int:
        """Columns seen, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the columns that a mask is made for."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Most columns; -1 for none, because padding takes no room here."""
        return -1

    def reset(self) -> None:
        """Forget every sequence; the blocks stay allocated."""
        self.length = 0
        self.batch.reset()

    def reorder_cache(self, beam_idx: Any) -> None:
        """Refuse beam search."""
        raise UnsupportedError("PagedCache: beam search is not supported.")

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse assisted generation."""
        raise UnsupportedError("PagedCache: removing tokens, as assisted generation does, is not supported.")

    batch_repeat_interleave = batch_select_indices = reorder_cache


def attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    paged_layer: PagedLayer | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Attention as transformers calls it.

    Parameters
    ----------
    query : (batch_size, heads, columns, width)
    key, value : (batch_size, kv_heads, columns, width)
        New ones with a `PagedCache`, else all there are.
    attention_mask : (batch_size, columns seen) bool, or None
        False in padding; what `padding_mask` made.
    scaling, sliding_window, softcap, s_aux
        The operator's scale, local_window_size, softcap and head_sink.
    paged_layer : PagedLayer, optional
        Put among the keywords by `PagedLayer.update`.

    Returns
    -------
    output : (batch_size, columns, heads, width of value)
    None
        In place of attention weights.

    Raises
    ------
    UnsupportedError
        There is dropout, a mask other than of padding, or values are wider than keys.
    InvalidArgumentError
        The batch or its tokens are more than the `PagedCache` was made for.
    """
    if dropout:
        raise UnsupportedError(f"dropout: expected 0, because there is no backward pass here, got {dropout}.")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise UnsupportedError(
            f"attention_mask: expected (batch_size, columns), 0 in padding, got shape {tuple(attention_mask.shape)}."
        )
    width = value.shape[3]
    if width > key.shape[3]:
        raise UnsupportedError(f"value: expected heads no wider than those of key, {key.shape[3]}, got {width}.")
    value = torch.nn.functional.pad(value, (0, key.shape[3] - width))
    batch_size, _, columns, _ = query.shape
    if paged_layer is None:
        paged_layer = _gathered(query, key, value, attention_mask)
    mask = None if attention_mask is None else attention_mask[:, -columns:]
    paged_layer.advance((batch_size, columns), mask, query.device)
    output = paged_layer.attend(
        query,
        key[:, :, -columns:],
        value[:, :, -columns:],
        s_aux,
        scale=scaling or 0.0,
        softcap=softcap or 0.0,
        local_window_size=sliding_window or -1,
    )
    return output[..., :width], None


def _gathered(query: Any, key: Any, value: Any, mask: Any) -> PagedLayer:
    """Make a layer for keys that transformers gathered, and store those before the query's."""
    batch_size, _, total, _ = key.shape
    past = total - query.shape[2]
    layer = PagedLayer(_Batch(batch_size, total, 16))
    if past:
        layer.advance((batch_size, past), None if mask is None else mask[:, :past], query.device)
        layer.write(key[:, :, :past], value[:, :, :past])
    return layer


def padding_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any],
    attention_mask: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: Any = None,
    **kwargs: Any,
) -> Any:
    """Mask as transformers asks for it: of padding only, (batch_size, kv_length) bool; None if there is none.

    The operator masks by order and window itself. ``mask_function`` is looked at next to the diagonal, where every
    other mask (both ways, chunks, several sequences in a row) differs.

    Raises
    ------
    UnsupportedError
        The mask goes by more than order, window and padding, or the cache is a static one.
    """
    total = kv_offset + kv_length
    if int(q_offset) + q_length != total:
        raise UnsupportedError(
            "cache: expected a PagedCache, or one that returns only the keys it holds; a static cache is not supported."
        )
    ordered = not use_vmap  # else a function of the caller, not even made for index arrays
    if ordered:
        sequence = torch.arange(batch_size, device=device)[:, None]
        later = torch.arange(int(q_offset) + 1, total, device=device)[None]
        earlier = torch.arange(max(int(q_offset), kv_offset + 1), total, device=device)[None]
        ordered = not bool(torch.as_tensor(mask_function(sequence, 0, later - 1, later)).any()) and (
            local_size == 1 or bool(torch.as_tensor(mask_function(sequence, 0, earlier, earlier - 1)).all())
        )
    if not ordered:
        raise UnsupportedError("attention_mask: a mask by more than order, window and padding is not supported.")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask[:, -kv_length:]
