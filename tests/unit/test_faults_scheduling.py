"""Known faults of schedulers and cache managers, each as its kind.

Most run twice: on `RecallModel` with small blocks, where every wrong key changes the answer and freed blocks are
poisoned, and through the operator with a random Llama.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn import InvalidArgumentError, paged_attention
from pagedattn.cache import BlockPool, BlockTable, OutOfBlocksError, allocate_cache, assemble, window_blocks
from tests.support.serving import (
    Config,
    Engine,
    KVCache,
    RecallModel,
    RequestError,
    Status,
    audit,
    cells,
    drain,
    greedy,
    poison,
    prefix_keys,
    random_model,
    recall,
    run_step,
)

CONFIG = Config(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, kv_num_heads=2, vocab_size=64, max_length=512
)


def tables(engine: Engine) -> list[BlockTable]:
    return [sequence.table for sequence in engine.sequences]


def random_prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, 64, length).tolist()


def mean_of_visible(first: int, count: int, window: int) -> np.ndarray:
    """Output where keys are zero and the value at a position is the position."""
    return np.array([np.mean(np.arange(max(0, own - window + 1), own + 1)) for own in range(first, first + count)])


class PositionCache:
    """One layer of the operator with zero keys and ``V[position] = position``."""

    def __init__(self, num_blocks: int, window: int, block_size: int = 16) -> None:
        self.window = window
        self.caches = allocate_cache(num_blocks, block_size, 1, 8, "float32")

    def run(self, table: BlockTable, count: int) -> np.ndarray:
        """Append, run, and give one channel of the output."""
        table.append(count)
        positions = np.arange(table.length - count, table.length, dtype=np.float32)
        value = np.repeat(positions[:, None], 8, axis=1)
        zero = np.zeros((count, 8), np.float32)
        result = paged_attention(
            zero,
            zero,
            value,
            *self.caches,
            **assemble([(table, count)]).inputs,
            num_heads=1,
            kv_num_heads=1,
            local_window_size=self.window,
        )
        return result.output[:, 0]


class TestWindowBlocksFreedWhileAChunkStillNeedsThem:
    @pytest.mark.parametrize(
        ("window", "block_size", "prompt", "chunk"),
        [(6, 4, 20, 8), (1, 4, 20, 8), (5, 4, 33, 3), (9, 8, 64, 16), (4, 4, 12, 1)],
    )
    def test_scheduler_with_the_smallest_pool(self, window, block_size, prompt, chunk):
        most = window_blocks(window, block_size, chunk)
        engine = Engine(RecallModel(window), most, block_size, chunk_size=chunk)
        poison(engine.pool, engine.cache)
        tokens = random_prompt(np.random.default_rng(0), prompt)
        sequence = engine.add(tokens, 20)
        while engine.scheduler.has_work:
            engine.step()
            assert engine.pool.used <= most
        assert sequence.new_tokens == recall(tokens, 20, window)

    def test_a_ragged_mix_in_a_pool_that_only_eviction_makes_sufficient(self):
        rng = np.random.default_rng(1)
        engine = Engine(RecallModel(7), 24, 4, chunk_size=6, max_running=5)
        poison(engine.pool, engine.cache)
        prompts = [random_prompt(rng, length) for length in (60, 3, 41, 22, 90, 7, 33)]
        sequences = [engine.add(prompt, 30) for prompt in prompts]
        assert sum(len(prompt) + 30 for prompt in prompts) > 24 * 4
        drain(engine)
        for prompt, sequence in zip(prompts, sequences, strict=True):
            assert sequence.new_tokens == recall(prompt, 30, 7)

    @pytest.mark.parametrize("cache_dtype", ["float32", "float16"])
    def test_operator_gives_the_same_bits_as_without_eviction(self, cache_dtype):
        """Window 20, a prompt of 100 in chunks of 24, then decode; every freed block holds NaN."""
        rng = np.random.default_rng(2)
        window, chunks = 20, [24, 24, 24, 24, 4, *[1] * 40]
        sink = rng.standard_normal(4).astype(cache_dtype)
        pools = BlockPool(window_blocks(window, 16, 24)), BlockPool(16)
        caches = [KVCache(CONFIG, pool.num_blocks, 16, cache_dtype) for pool in pools]
        poison(pools[0], caches[0])
        evicting, keeping = BlockTable(pools[0], 16, window=window), BlockTable(pools[1], 16)
        for count in chunks:
            qkv = rng.standard_normal((count, (4 + 4) * 8)).astype(cache_dtype)
            outputs = []
            for table, cache in ((evicting, caches[0]), (keeping, caches[1])):
                table.append(count)
                outputs.append(
                    paged_attention(
                        qkv,
                        **cache.inputs(0),
                        **assemble([(table, count)]).inputs,
                        num_heads=4,
                        kv_num_heads=2,
                        head_sink=sink,
                        local_window_size=window,
                    ).output
                )
            assert np.isfinite(outputs[0]).all()
            assert np.array_equal(*outputs)
            assert len(evicting.blocks) <= window_blocks(window, 16, count)

    def test_the_model_answers_the_same_with_a_tiny_pool(self):
        config = Config(**{**vars(CONFIG), "window": 20})
        model = random_model(config, 3)
        prompt = random_prompt(np.random.default_rng(3), 80)
        engine = Engine(model, window_blocks(20, 16, 24), 16, chunk_size=24)
        poison(engine.pool, engine.cache)
        sequence = engine.add(prompt, 40)
        drain(engine)
        unlimited = Engine(model, 64, 16, chunk_size=24)
        unlimited.scheduler.window = None  # the model still looks back 20 tokens, but nothing is evicted
        expected = unlimited.add(prompt, 40)
        drain(unlimited)
        assert sequence.new_tokens == expected.new_tokens


class TestRingOverwrittenBeforeItsOwnChunkHasReadIt:
    @pytest.mark.parametrize(("block_size", "window", "past"), [(4, 4, 8), (16, 16, 32), (16, 9, 40)])
    def test_a_chunk_that_the_ring_cannot_hold_is_refused_before_any_write(self, block_size, window, past):
        ring = 2 * block_size
        table = BlockTable(BlockPool(2), block_size, window=window, ring_blocks=2)
        while table.length < past:
            table.append(1)
        most = ring - window + 1  # window + count - 1 positions
        with pytest.raises(InvalidArgumentError, match=f"takes at most {most} now"):
            table.append(most + 1)
        assert table.length == past
        table.append(most)

    def test_the_largest_legal_chunk_reads_the_old_keys(self):
        """Ring of 2 blocks of 16, window 16, past 32: 17 tokens fit exactly, 32 do not."""
        layer = PositionCache(4, window=16)
        table = BlockTable(BlockPool(4), 16, window=16, ring_blocks=2)
        assert np.allclose(layer.run(table, 32), mean_of_visible(0, 32, 16), rtol=1e-6)
        before = [cache.tobytes() for cache in layer.caches]
        with pytest.raises(InvalidArgumentError, match="at most 17 now"):
            layer.run(table, 32)
        assert [cache.tobytes() for cache in layer.caches] == before
        assert np.allclose(layer.run(table, 17), mean_of_visible(32, 17, 16), rtol=1e-6)

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(window=st.integers(1, 40), slack=st.integers(0, 2), chunks=st.lists(st.integers(1, 40), max_size=6))
    def test_a_prompt_written_in_pieces_of_the_limit_is_right(self, window, slack, chunks):
        ring_blocks = -(-window // 16) + slack
        layer = PositionCache(ring_blocks, window)
        table = BlockTable(BlockPool(ring_blocks), 16, window=window, ring_blocks=ring_blocks)
        for chunk in chunks:
            while chunk:
                count = min(chunk, table.append_limit)
                past = table.length
                assert np.allclose(layer.run(table, count), mean_of_visible(past, count, window), rtol=1e-6)
                chunk -= count


class TestRollbackPastWhatARollingCacheStillHolds:
    def test_rejected_drafts_inside_the_ring_leave_no_trace(self):
        """Window 16 on a ring of 32 slots, length 80: 16 drafts, all rejected, then on."""
        outputs = []
        for drafts in (0, 16):
            layer = PositionCache(2, window=16)
            table = BlockTable(BlockPool(2), 16, window=16, ring_blocks=2)
            for count in (32, 17, 17, 14):
                layer.run(table, count)
            if drafts:
                layer.run(table, drafts)
                slots = table.slots(80, 80 + drafts)
                layer.caches[1][slots // 16, slots % 16] = np.nan  # what a draft writes is not what is accepted there
                table.truncate(80)
            outputs.append(np.concatenate([layer.run(table, 1) for _ in range(40)]))
        assert np.array_equal(*outputs)
        assert np.allclose(outputs[0], mean_of_visible(80, 40, 16), rtol=1e-6)

    def test_more_drafts_than_the_ring_takes_are_refused(self):
        """Window 4, ring of 8 slots, length 20: 4 drafts may be rejected, 6 do not fit (window - 1 + 6 > 8)."""
        table = BlockTable(BlockPool(2), 4, window=4, ring_blocks=2)
        for _ in range(20):
            table.append(1)
        table.append(4)
        table.truncate(20)
        with pytest.raises(InvalidArgumentError, match="6 tokens at position 20 would overwrite keys"):
            table.append(6)
        table.append(5)
        table.truncate(20)

    @pytest.mark.parametrize("policy", ["ring", "free list"])
    @pytest.mark.parametrize("length", [20, 23, 24, 25])
    def test_a_rewind_is_refused_exactly_when_a_visible_key_is_gone(self, policy, length):
        for target in range(length):
            table = BlockTable(BlockPool(8), 4, window=4, ring_blocks=3 if policy == "ring" else None)
            for _ in range(length):
                table.append(1)
            needed = max(0, target - 4 + 1)
            held = length - 12 if policy == "ring" else (length - 1 - 4 + 1) // 4 * 4
            assert table.oldest_resident == held
            if needed >= held:
                table.truncate(target)
                table.append(1)
                assert (table.row(1)[needed // 4 :] >= 0).all()
            else:
                with pytest.raises(InvalidArgumentError, match="are gone"):
                    table.truncate(target)
                assert table.length == length


class Failure(Exception):
    """Raised inside the model."""


class TestBlocksLeakOnSomeWayOut:
    @pytest.mark.parametrize(("seed", "window"), [(0, None), (1, None), (2, 9)])
    def test_random_events(self, seed, window):
        """2,000 events on 64 blocks: every way in and out, with the books checked after each."""
        rng = np.random.default_rng(seed)
        engine = Engine(RecallModel(window), 64, 4, chunk_size=6, max_batch_tokens=24, max_running=12)
        poison(engine.pool, engine.cache)
        forward = engine.model.forward
        seen = Counter()
        prefixes = [random_prompt(rng, 24) for _ in range(3)]
        prompts = {}

        def failing(*arguments):
            if rng.random() < 0.5:  # before or after everything is written
                forward(*arguments)
            raise Failure

        for _ in range(2000):
            event = rng.choice(["add", "step", "abort", "fail"], p=[0.22, 0.64, 0.1, 0.04])
            live = [sequence for sequence in engine.sequences if sequence.is_live]
            if event == "add" and len(live) < 30:
                shared = prefixes[rng.integers(3)][: rng.integers(25)]
                prompt = [*shared, *random_prompt(rng, rng.integers(1, 30))]
                sequence = engine.add(prompt, int(rng.integers(1, 40)))
                prompts[sequence] = prompt
            elif event == "step":
                engine.step()
            elif event == "abort" and engine.sequences:
                candidates = live if live and rng.random() < 0.8 else engine.sequences
                sequence = candidates[rng.integers(len(candidates))]
                seen[self.stage(sequence)] += 1
                engine.abort(sequence)
            elif event == "fail" and live:
                engine.model.forward = failing
                lengths = {sequence: sequence.table.length for sequence in engine.scheduler.running}
                with pytest.raises(Failure):
                    engine.step()
                engine.model.forward = forward
                seen["failed"] += 1
                assert all(
                    sequence.table.length == lengths[sequence]
                    for sequence in engine.scheduler.running
                    if sequence in lengths
                )
            running = engine.scheduler.running
            assert all((sequence.status is Status.RUNNING) == (sequence in running) for sequence in live)
            audit(engine.pool, [sequence.table for sequence in running])
            assert not any(sequence.table.length for sequence in live if sequence not in running)
        seen["finished"] = sum(sequence.status is Status.FINISHED for sequence in engine.sequences)
        seen["preempted"] = sum(sequence.preemptions for sequence in engine.sequences)
        seen["prefix hits"] = sum(sequence.reused_tokens > 0 for sequence in engine.sequences)
        drain(engine)
        assert engine.pool.available == 64
        audit(engine.pool, [])
        for stage in ("waiting", "mid-chunk", "decoding", "over", "failed", "finished", "prefix hits"):
            assert seen[stage], f"no event met a request that is {stage}: {seen}"
        if window is None:
            assert seen["preempted"], "the pool is never dry"
            assert seen["was preempted"], "no preempted request is aborted"
        for sequence, prompt in prompts.items():
            if sequence.status is Status.FINISHED:
                assert sequence.new_tokens == recall(prompt, sequence.max_new_tokens, window)

    @staticmethod
    def stage(sequence) -> str:
        if not sequence.is_live:
            return "over"  # aborted twice, or after its end
        if sequence.status is Status.WAITING:
            return "was preempted" if sequence.preemptions else "waiting"
        return "decoding" if sequence.new_tokens and sequence.remaining == 1 else "mid-chunk"

    def test_a_step_that_fails_in_the_model_can_be_repeated(self):
        model = random_model(CONFIG, 0)
        prompts = [random_prompt(np.random.default_rng(n), 10 * n + 5) for n in range(3)]
        engine = Engine(model, 16, 16, chunk_size=7)
        sequences = [engine.add(prompt, 8) for prompt in prompts]
        forward, calls = model.forward, iter(range(1000))

        def flaky(tokens, batch, cache, rows):
            logits = forward(tokens, batch, cache, rows)  # everything is written before it fails
            if next(calls) % 3 == 0:
                raise Failure
            return logits

        model.forward = flaky
        while engine.scheduler.has_work:
            try:
                engine.step()
            except Failure:
                audit(engine.pool, tables(engine))
        model.forward = forward
        assert [sequence.new_tokens for sequence in sequences] == [greedy(model, prompt, 8) for prompt in prompts]
        assert engine.pool.available == 16


class Ledger:
    """Notes (request, logical block, physical block) of every write, and finds two writers of one block."""

    def __init__(self, engine: Engine) -> None:
        self.triples: list[tuple[int, int, int, int]] = []
        self.engine, self.forward = engine, engine.model.forward
        run = engine.run

        def noted(step):
            owner = {}
            for sequence, count in step.entries:
                request, table = engine.sequences.index(sequence), sequence.table
                for position, slot in zip(
                    range(table.length - count, table.length),
                    table.slots(table.length - count, table.length).tolist(),
                    strict=True,
                ):
                    block = slot // table.block_size
                    assert owner.setdefault(block, request) == request, f"block {block} has two writers in one step"
                    assert engine.pool.references(block) == 1, f"block {block} is written while it is shared"
                    self.triples.append((engine.steps, request, position // table.block_size, block))
            return run(step)

        engine.run = noted


class TestFreedBlockSurvivesAPreemption:
    def test_three_growing_requests_in_a_pool_of_twelve(self):
        engine = Engine(RecallModel(), 12, 4)
        poison(engine.pool, engine.cache)
        ledger = Ledger(engine)
        rng = np.random.default_rng(0)
        prompts = [random_prompt(rng, 7) for _ in range(3)]
        sequences = [engine.add(prompt, 24) for prompt in prompts]
        drain(engine)
        assert sum(sequence.preemptions for sequence in sequences) >= 1
        for prompt, sequence in zip(prompts, sequences, strict=True):
            assert sequence.new_tokens == recall(prompt, 24)
        assert len({block for *_, block in ledger.triples}) == 12

    def test_the_elder_takes_the_blocks_of_the_younger_before_that_has_had_its_turn(self):
        """Turns go by age and the youngest gives way, so nobody is preempted after a block was given in that step."""
        engine = Engine(RecallModel(), 4, 4, prefix_caching=False)
        first, second = engine.add([1] * 7, 8), engine.add([2] * 7, 8)
        engine.step()  # both prompts, 2 blocks each
        engine.step()
        assert (first.table.length, second.table.length) == (8, 8)
        engine.step()  # both want a third block, the pool has none: the younger gives way
        assert second.status is Status.WAITING
        assert second.table.blocks == []
        assert len(first.table.blocks) == 3
        audit(engine.pool, tables(engine))
        drain(engine)
        assert (first.new_tokens, second.new_tokens) == (recall([1] * 7, 8), recall([2] * 7, 8))

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(
        num_blocks=st.integers(8, 14),
        chunk=st.integers(1, 9),
        caching=st.booleans(),
        seed=st.integers(0, 99),
        lengths=st.lists(st.integers(1, 16), min_size=3, max_size=6),
    )
    def test_any_mix_answers_as_without_pressure(self, num_blocks, chunk, caching, seed, lengths):
        rng = np.random.default_rng(seed)
        engine = Engine(RecallModel(), num_blocks, 4, chunk_size=chunk, prefix_caching=caching)
        poison(engine.pool, engine.cache)
        Ledger(engine)
        prompts = [random_prompt(rng, length) for length in lengths]
        sequences = [engine.add(prompt, 12) for prompt in prompts]
        while engine.scheduler.has_work:
            engine.step()
            audit(engine.pool, tables(engine))
        assert [sequence.new_tokens for sequence in sequences] == [recall(prompt, 12) for prompt in prompts]

    def test_operator_under_preemption_answers_as_without(self):
        model = random_model(CONFIG, 1)
        rng = np.random.default_rng(1)
        prompts = [random_prompt(rng, length) for length in (30, 25, 20)]
        engine = Engine(model, 8, 16)
        poison(engine.pool, engine.cache)
        Ledger(engine)
        sequences = [engine.add(prompt, 40) for prompt in prompts]
        drain(engine)
        assert sum(sequence.preemptions for sequence in sequences) >= 1
        assert [sequence.new_tokens for sequence in sequences] == [greedy(model, prompt, 40) for prompt in prompts]


class TestPreemptionNeverMakesProgress:
    def test_pool_too_small_for_one_request_and_just_enough_for_the_others(self):
        """4 blocks of 4. Blocks needed: 5, exactly 4, 3 and 3."""
        engine = Engine(RecallModel(), 4, 4)
        with pytest.raises(RequestError, match="the request needs 5 blocks of 4, the pool has 4"):
            engine.add([1] * 10, 8)
        assert engine.sequences == []
        sequences = [engine.add([n] * 5, new) for n, new in ((1, 12), (2, 8), (3, 8))]
        drain(engine, step_limit=500)
        assert all(sequence.status is Status.FINISHED for sequence in sequences)
        assert engine.pool.available == 4

    @pytest.mark.parametrize("caching", [True, False])
    def test_running_requests_advance_every_step_and_all_finish_in_order_of_arrival(self, caching):
        engine = Engine(RecallModel(), 6, 4, chunk_size=4, max_batch_tokens=8, max_running=4, prefix_caching=caching)
        sequences = [engine.add([n] * (3 + n), 9) for n in range(8)]
        for _ in range(500):
            if not engine.scheduler.has_work:
                break
            schedule = engine.scheduler.schedule()
            engine.scheduler.cancel(schedule)
            assert {sequence for sequence, _ in schedule.entries} == set(engine.scheduler.running)
            assert all(count >= 1 for _, count in schedule.entries)
            oldest = engine.scheduler.running[0]
            before = (oldest.table.length, len(oldest.tokens))
            engine.step()
            assert not oldest.is_live or (oldest.table.length, len(oldest.tokens)) > before, "the oldest is starved"
        assert all(sequence.status is Status.FINISHED for sequence in sequences)
        ends = [sequence.finished_at for sequence in sequences]
        assert ends == sorted(ends)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        num_blocks=st.integers(1, 9),
        chunk=st.integers(1, 8),
        running=st.integers(1, 6),
        shapes=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 16)), min_size=1, max_size=8),
        window=st.sampled_from([None, 3, 8]),
    )
    def test_whatever_is_accepted_finishes(self, num_blocks, chunk, running, shapes, window):
        engine = Engine(RecallModel(window), num_blocks, 4, chunk_size=chunk, max_running=running, max_batch_tokens=16)
        poison(engine.pool, engine.cache)
        accepted = []
        for number, (length, new) in enumerate(shapes):
            prompt = [number] * length
            try:
                accepted.append((engine.add(prompt, new), prompt, new))
            except RequestError:
                blocks = -(-(length + new - 1) // 4)
                assert min(blocks, window_blocks(window, 4, chunk) if window else blocks) > num_blocks
        work = sum(len(prompt) + new for _, prompt, new in accepted)
        drain(engine, step_limit=10 + 20 * work)
        for sequence, prompt, new in accepted:
            assert sequence.new_tokens == recall(prompt, new, window)
        assert engine.pool.available == num_blocks

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(budget=st.integers(1, 12), chunk=st.integers(1, 12), seed=st.integers(0, 999))
    def test_no_running_request_is_left_out_of_a_step(self, budget, chunk, seed):
        """However small a step is, and however long the prompts of the elders are."""
        rng = np.random.default_rng(seed)
        engine = Engine(RecallModel(), 24, 4, chunk_size=chunk, max_batch_tokens=budget, max_running=6)
        run = engine.run

        def noted(step):
            assert [sequence for sequence, _ in step.entries] == engine.scheduler.running
            assert all(count >= 1 for _, count in step.entries)
            assert sum(count for _, count in step.entries) <= budget
            return run(step)

        engine.run = noted
        prompts = [random_prompt(rng, rng.integers(1, 40)) for _ in range(8)]
        sequences = [engine.add(prompt, int(rng.integers(1, 20))) for prompt in prompts]
        drain(engine)
        for prompt, sequence in zip(prompts, sequences, strict=True):
            assert sequence.new_tokens == recall(prompt, sequence.max_new_tokens)

    def test_a_step_without_room_is_refused(self):
        with pytest.raises(ValueError, match=r"max_batch_tokens \(0\), .* must be at least 1"):
            Engine(RecallModel(), 4, 4, max_batch_tokens=0)


class TestPromptFullyCoveredByThePrefixCache:
    @pytest.mark.parametrize("others", [0, 2])
    @pytest.mark.parametrize("lengths", [(8, 8), (8, 9), (8, 7), (9, 8), (8, 4), (8, 5)])
    @pytest.mark.parametrize("owner_is_decoding", [True, False])
    def test_something_is_left_to_run_and_shared_blocks_keep_their_bytes(self, lengths, others, owner_is_decoding):
        text = random_prompt(np.random.default_rng(0), 9)
        self.check(
            RecallModel(),
            lambda prompt: recall(prompt, 6),
            4,
            [text[:length] for length in lengths],
            others,
            owner_is_decoding,
        )

    @pytest.mark.parametrize("others", [0, 2])
    @pytest.mark.parametrize("lengths", [(32, 32), (32, 33), (32, 31)])
    def test_operator(self, lengths, others):
        model = random_model(CONFIG, 0)
        text = random_prompt(np.random.default_rng(0), 33)
        self.check(
            model,
            lambda prompt: greedy(model, prompt, 6),
            16,
            [text[:length] for length in lengths],
            others,
            owner_is_decoding=True,
        )

    def check(self, model, answer, block_size, prompts, others, owner_is_decoding):
        engine = Engine(model, 32, block_size)
        first, second = prompts
        owner = engine.add(first, 6)
        for number in range(others):
            engine.add([number] * 5, 6)
        while owner.is_live if not owner_is_decoding else not owner.new_tokens:
            engine.step()
        expected = (min(len(first), len(second) - 1)) // block_size * block_size
        shared = [engine.pool.lookup(key) for key in prefix_keys(second[:expected], block_size)]
        before = [[cache[shared].copy() for cache in pair] for pair in engine.cache.layers]
        hit = engine.add(second, 6)
        run = engine.tokens_run
        engine.step()
        assert hit.reused_tokens == expected
        assert hit.table.blocks[: len(shared)] == shared
        assert engine.tokens_run - run >= len(second) - expected >= 1
        drain(engine)
        assert hit.new_tokens == answer(second)
        assert owner.new_tokens == answer(first)
        for pair, copies in zip(engine.cache.layers, before, strict=True):
            for cache, copy in zip(pair, copies, strict=True):
                assert np.array_equal(cache[shared], copy)


class TestTwoRequestsProduceTheSameBlock:
    def test_copies_made_in_one_step_are_freed_shared_and_evicted_apart(self):
        prompt = random_prompt(np.random.default_rng(0), 9)
        engine = Engine(RecallModel(), 10, 4)
        poison(engine.pool, engine.cache)
        first, second = engine.add(prompt, 2), engine.add(prompt, 6)
        engine.step()
        assert not set(first.table.blocks) & set(second.table.blocks), "in one step neither can know of the other"
        drain_one(engine, first)
        audit(engine.pool, tables(engine))
        third = engine.add(prompt, 5)
        engine.step()
        assert third.reused_tokens == 8
        drain_one(engine, second)
        audit(engine.pool, tables(engine))
        drain(engine)
        filler = engine.add([5] * 30, 8)  # evicts every cached block
        drain(engine)
        audit(engine.pool, tables(engine))
        fourth = engine.add(prompt, 5)
        drain(engine)
        assert fourth.reused_tokens == 0
        for sequence in (first, second, third, fourth):
            assert sequence.new_tokens == recall(prompt, sequence.max_new_tokens)
        assert filler.new_tokens == recall([5] * 30, 8)
        assert engine.pool.available == 10

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
    def test_equal_tables_freed_in_any_order(self, order):
        tokens = list(range(8))
        pool = BlockPool(6)
        copies = [BlockTable(pool, 4) for _ in range(3)]
        for table in copies:
            table.append(8)
        for table in copies:
            table.commit(tokens)
            table.commit(tokens)
        for position in order:
            copies[position].free()
            audit(pool, copies)
        assert pool.cached == 2, "one copy of each block stays"
        again = BlockTable(pool, 4)
        assert again.reuse_prefix(tokens) == 8
        audit(pool, [*copies, again])
        assert len(pool.allocate(4)) == 4
        with pytest.raises(OutOfBlocksError):
            pool.allocate()


def drain_one(engine: Engine, sequence) -> None:
    while sequence.is_live:
        engine.step()


def speculate(model, block_size: int, prompt: list[int], stream: list[int], accepted: list[int]) -> None:
    """Decode with drafts of 4 tokens of which the model accepts a given number, checking the books after each round.

    ``stream`` is the plain greedy answer. The draft is right as far as it shall be accepted and wrong after.
    """
    pool = BlockPool(64)
    cache = KVCache(model.config, 64, block_size)
    poison(pool, cache)
    table = BlockTable(pool, block_size)
    tokens = list(prompt)
    tokens.append(int(run_step(model, cache, table, tokens)[-1].argmax()))
    table.commit(tokens[: table.length])
    for accept in accepted:
        at = len(tokens) - len(prompt)
        draft = stream[at : at + accept] + [(token + 1) % 64 for token in stream[at + accept : at + 4]]
        choices = run_step(model, cache, table, [tokens[-1], *draft]).argmax(axis=1).tolist()
        right = next((n for n, token in enumerate(draft) if choices[n] != token), len(draft))
        assert right == accept
        rejected = table.slots(len(tokens) + accept, table.length)
        tokens += choices[: accept + 1]
        table.truncate(len(tokens) - 1)
        for pair in cache.layers:
            for stored in pair:
                stored[rejected // block_size, rejected % block_size] = np.nan
        table.commit(tokens[:-1])
        assert tokens[len(prompt) :] == stream[: len(tokens) - len(prompt)]
        assert table.length == len(tokens) - 1  # prompt and answer, but for the token that has not run
        assert len(table.blocks) == -(-table.length // block_size)
        assert set(pool._block_of) <= set(prefix_keys(prompt + stream, block_size)), "a rejected token is findable"
        audit(pool, [table])


class TestSpeculativeRollbackTrimsTheWrongAmount:
    ROUNDS = tuple(np.random.default_rng(0).integers(0, 5, 30).tolist())

    @pytest.mark.parametrize("accepted", [ROUNDS, (0,) * 30, (4,) * 30, (0, 4) * 15, (3, 1, 2) * 10])
    def test_thirty_rounds_across_small_blocks(self, accepted):
        prompt = random_prompt(np.random.default_rng(1), 6)
        speculate(RecallModel(), 4, prompt, recall(prompt, 160), list(accepted))

    @pytest.mark.parametrize("accepted", [ROUNDS, (0, 4, 2) * 10])
    def test_operator(self, accepted):
        model = random_model(CONFIG, 2)
        prompt = random_prompt(np.random.default_rng(2), 6)
        speculate(model, 16, prompt, greedy(model, prompt, 160), list(accepted))

    def test_a_rejected_block_is_not_findable_even_where_it_was_full(self):
        pool = BlockPool(8)
        table = BlockTable(pool, 4)
        table.append(6)
        table.commit(list(range(6)))
        table.append(6)  # drafts that fill two blocks
        table.truncate(6)
        table.commit(list(range(6)))
        assert set(pool._block_of) == set(prefix_keys(list(range(6)), 4))
        assert pool.used == 2


class TestLastGeneratedTokenMissingWhenASessionContinues:
    @pytest.mark.parametrize("generated", [3, 4, 8])  # 5 prompt tokens: the turn ends at a block edge, or off it
    def test_second_turn_on_the_same_table(self, generated):
        prompt, more = random_prompt(np.random.default_rng(0), 5), random_prompt(np.random.default_rng(1), 3)
        model, cache, table = RecallModel(), KVCache(RecallModel().config, 16, 4), BlockTable(BlockPool(16), 4)
        tokens = self.turn(model, cache, table, prompt, generated)
        assert table.length == len(tokens) - 1
        first_turn = list(tokens)
        tokens = self.turn(model, cache, table, [*tokens, *more], 4)
        assert first_turn == prompt + recall(prompt, generated)
        assert tokens == first_turn + more + recall(first_turn + more, 4)
        slots = table.slots(0, table.length)
        for stored, expected in zip(cache.layers[0], cells(tokens[:-1]), strict=True):
            assert np.array_equal(stored[slots // 4, slots % 4, 0, 0], expected)

    @pytest.mark.parametrize("generated", [11, 12, 20])
    def test_operator_second_turn_equals_one_run_over_the_whole_text(self, generated):
        model = random_model(CONFIG, 4)
        prompt, more = random_prompt(np.random.default_rng(0), 5), random_prompt(np.random.default_rng(1), 3)
        caches = [KVCache(CONFIG, 8, 16) for _ in range(2)]
        session, whole = (BlockTable(BlockPool(8), 16) for _ in range(2))
        tokens = self.turn(model, caches[0], session, prompt, generated)
        text = [*tokens, *more]
        tokens = self.turn(model, caches[0], session, text, 4)
        assert tokens == self.turn(model, caches[1], whole, text, 4)
        assert session.length == whole.length == len(tokens) - 1
        for pair, other in zip(caches[0].layers, caches[1].layers, strict=True):
            for cache, other_cache in zip(pair, other, strict=True):
                kept, fresh = (
                    array.reshape(-1, *array.shape[2:])[table.slots(0, table.length)]
                    for array, table in ((cache, session), (other_cache, whole))
                )
                assert np.allclose(kept, fresh, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("generated", [11, 12, 20])
    def test_second_turn_as_a_request_that_finds_the_first_in_the_prefix_cache(self, generated):
        model = random_model(CONFIG, 4)
        prompt, more = random_prompt(np.random.default_rng(0), 5), random_prompt(np.random.default_rng(1), 3)
        engine = Engine(model, 16, 16)
        first = engine.add(prompt, generated)
        drain(engine)
        second = engine.add([*first.tokens, *more], 4)
        drain(engine)
        assert second.reused_tokens == (len(first.tokens) - 1) // 16 * 16, "full blocks of all but the token not run"
        assert second.new_tokens == greedy(model, [*first.tokens, *more], 4)

    @staticmethod
    def turn(model, cache, table, tokens, count) -> list[int]:
        """Run what has not run yet, and generate; no position is written twice."""
        tokens = list(tokens)
        for _ in range(count):
            logits = run_step(model, cache, table, tokens[table.length :])
            assert table.length == len(tokens)
            tokens.append(int(logits[-1].argmax()))
        return tokens
