"""All mutants. A feature adds those that its tests kill.

`TPU_WRITES` are defects of the kernel that writes tokens on TPUs, `STATES` of the states of
recurrent layers, `SERVER` of what the server tells when something goes wrong, `CONFIGS` of the
reader of configs and of tanh, `ROWS` of rows on several devices, `EXACT` of exact numerics,
`SURVIVORS` are defects that the tests once did not find, and `DRAWN` are changes of functions that
were drawn by lot from all folders.
"""

from tests.mutants.drawn import DRAWN
from tests.mutants.mutant import mutant
from tests.mutants.survivors import SURVIVORS

_TABLES = "paged_jax.cache.blocks.state_tables"
_PLANNED = f"{_TABLES}:PlannedStates.at_step"
_RECURRENT = "paged_jax.models.recurrent_states"
_SCENARIOS = "tests/cache/test_state_scenarios.py"
_DECODE = f"{_SCENARIOS}::test_a_decode_over_a_multiple_leaves_a_mark"
_VERIFY = f"{_SCENARIOS}::test_a_verification_that_ends_at_a_multiple_leaves_a_mark"
_SHARE = f"{_SCENARIOS}::test_slots_that_share_a_state_decode_one_after_the_other"
_OVERWRITE = f"{_SCENARIOS}::test_a_decode_overwrites_a_snapshot_only_if_no_entry_is_free"
_SNAPSHOT = f"{_SCENARIOS}::test_a_prefix_without_a_snapshot_is_possible_but_not_found"
_DRAFTS = "tests/models/test_recurrent_states.py"
_CONFIG = "tests/models/test_config.py"

STATES = (
    mutant(
        "a snapshot is one token late",
        "cache/states",
        _PLANNED,
        "lengths >= self.switch_lengths",
        "lengths > self.switch_lengths",
        _DECODE,
    ),
    mutant(
        "a verification writes over its mark",
        "cache/states",
        _PLANNED,
        "lengths >= self.switch_lengths",
        "lengths > self.switch_lengths",
        _VERIFY,
    ),
    mutant(
        "a verification leaves no mark",
        "cache/states",
        f"{_TABLES}:plan_marks",
        "switch_lengths < lengths + max_tokens",
        "switch_lengths > lengths",
        _VERIFY,
    ),
    mutant(
        "a mark has the length of the next token",
        "cache/states",
        f"{_TABLES}:commit_marks",
        "jnp.where(has_switched, tables.switch_lengths, tables.mark_lengths)",
        "jnp.where(has_switched, tables.switch_lengths + 1, tables.mark_lengths)",
        _DECODE,
    ),
    mutant(
        "a mark is not kept",
        "cache/states",
        f"{_TABLES}:commit_marks",
        "jnp.where(has_switched, tables.next_entries, tables.entries)",
        "jnp.where(has_switched, tables.entries, tables.entries)",
        _DECODE,
    ),
    mutant(
        "later steps read the entry of the first step",
        "cache/states",
        _PLANNED,
        "jnp.where(step == 0, self.sources, self.entries)",
        "self.sources",
        _SHARE,
    ),
    mutant(
        "the first step reads the entry to write",
        "cache/states",
        _PLANNED,
        "jnp.where(step == 0, self.sources, self.entries)",
        "self.entries",
        _SHARE,
    ),
    mutant(
        "rows without a token write",
        "cache/states",
        _PLANNED,
        "jnp.where(is_active, entries, P)",
        "entries",
        _DECODE,
    ),
    mutant(
        "a state is not copied on fork",
        "cache/states",
        f"{_TABLES}:reserve_states",
        "may_keep &= held_entries < P",
        "may_keep = held_entries < P",
        _SHARE,
    ),
    mutant(
        "an overwritten snapshot stays in the prefix cache",
        "cache/states",
        f"{_TABLES}:reserve_states",
        "block_pool.forget(pool, jnp.where(may_keep & ~is_taken, held_entries, P))",
        "pool",
        _OVERWRITE,
    ),
    mutant(
        "a hit needs no snapshot",
        "cache/states",
        "paged_jax.cache.groups:StateGroup.find_prefix",
        "jnp.pad(is_found, (1, 0), constant_values=True)",
        "jnp.ones(is_found.size + 1, bool)",
        _SNAPSHOT,
    ),
    mutant(
        "the states of rejected drafts stay",
        "cache/states",
        f"{_RECURRENT}:DraftStates.advance",
        "advance_states(self.metadata, layer, recurrence, pools, num_tokens, backend)",
        "advance_states("
        "self.metadata, layer, recurrence, pools, self.metadata.num_tokens, backend)",
        _DRAFTS,
    ),
    mutant(
        "a verification writes states",
        "cache/states",
        "paged_jax.models.paged_attention:DraftAttention.__call__",
        "out = run_without_writing(metadata, layer, inputs, carry.pools, backend)",
        "out, pools = self.prefill(layer, inputs, carry.pools); carry = DraftCarry(pools, ())",
        _DRAFTS,
    ),
)

_STREAMS = "tests/server/test_completions.py"
_REFUSED = f"{_STREAMS}::test_stream_is_refused_with_the_status_of_a_whole_answer"

SERVER = (
    mutant(
        "a stream starts before the engine has accepted it",
        "server",
        "paged_jax.server.completions:_Exchange._send_events",
        "job = await self._make_job()",
        "sender.accept(); job = await self._make_job()",
        _REFUSED,
    ),
    mutant(
        "a failed stream forgets the code of the error",
        "server",
        "paged_jax.server.response_codec:ResponsesWriter.failure",
        "error.code or code",
        "code",
        f"{_STREAMS}::test_failed_stream_keeps_the_code_of_the_error",
    ),
    mutant(
        "the server exits as usual after its engine has failed",
        "server",
        "paged_jax.server.app:Startup.has_failed_engine",
        "self.service.engine.failure is not None",
        "self.service.is_sleeping",
        "tests/server/test_service.py",
    ),
    mutant(
        "a step that is tried again is not logged",
        "engine",
        "paged_jax.async_engine:AsyncEngine._advance",
        "_logger.exception",
        "_logger.debug",
        "tests/test_async_engine.py::test_step_that_fails_once_is_logged_and_tried_again",
    ),
    mutant(
        "headers may be one byte longer",
        "server",
        "paged_jax.server.http_server:_Framing.next_event",
        "num_bytes - self._num_unparsed() > self._max_header_bytes",
        "num_bytes - self._num_unparsed() > self._max_header_bytes + 1",
        "tests/server/test_http_server.py::test_limit_of_headers_is_exact",
    ),
    mutant(
        "tools leave the prompt with tool_choice none",
        "server",
        "paged_jax.server.chats:Chat._prompt",
        "self._shown_tools or None",
        "self.tools or None",
        "tests/server/test_all_formats.py::test_tool_choice_none_keeps_the_prompt",
    ),
)

CONFIGS = (
    mutant(
        "values of single layers are ignored in most families",
        "models",
        "paged_jax.models.known_keys:check_layer_changes",
        "read_layer_changes(config, num_layers).items()",
        "()",
        f"{_CONFIG}::test_from_dict_reads_values_of_single_layers",
    ),
    mutant(
        "keys of layers are compared as text",
        "models",
        "paged_jax.models.known_keys:read_layer_changes",
        "int(key) >= num_layers",
        "key not in [str(layer) for layer in range(num_layers)]",
        f"{_CONFIG}::test_from_dict_reads_configs_with_the_layers_of_real_models",
    ),
    mutant(
        "no entry counts as unread",
        "models",
        "paged_jax.models.config_json:ConfigEntries.find_unread",
        "{key for key, value in self._values.items() if value is not None} - self._keys_read",
        "set()",
        f"{_CONFIG}::test_from_dict_names_entries_that_it_does_not_read",
    ),
    mutant(
        "tanh cancels near 0",
        "kernels",
        "paged_jax.kernels.mosaic_gpu.launch:compute_tanh",
        "square < 0.25",
        "square < 0",
        "tests/kernels/test_mosaic_gpu.py::test_compute_tanh_is_precise_everywhere",
    ),
)

# Random numbers of rows on several devices, and in several engines.
_ROWS = "tests/test_data_axes.py"

ROWS = (
    mutant(
        "each device counts its rows from 0",
        "rollouts",
        "paged_jax.data_axes:_first_row_of_device",
        "lax.axis_index(tuple(names)) * jax.tree.leaves(rows)[0].shape[0]",
        "jnp.int32(0)",
        f"{_ROWS}::test_map_rows_counts_rows_inside_shard_map",
    ),
    mutant(
        "the index of the first prompt is ignored",
        "rollouts",
        "paged_jax.rollouts:_generate",
        "first_prompt * num_samples + slots",
        "slots",
        f"{_ROWS}::test_rows_have_the_random_keys_of_one_device",
    ),
)

_ROWS = "tests/kernels/test_cpu_exact.py::test_norms_and_sums_do_not_depend_on_the_number_of_rows"
_STEPS = "tests/kernels/test_cpu_exact.py::test_prompt_has_the_bits_of_decode_steps"
_ENGINE = "tests/engine/test_exact.py::test_engine_has_the_bits_of_log_probs"

EXACT = (
    mutant(
        "a norm sums in another order from 65 rows on",
        "kernels",
        "paged_jax.kernels.linear:sum_rows",
        "is_exact(backend)",
        "is_exact(backend) and x.shape[0] <= 64",
        _ROWS,
    ),
    mutant(
        "a prompt sums in another order than a decode step",
        "kernels",
        "paged_jax.kernels.cpu.attention:attend",
        "np.int32(1)",
        "np.int32(0)",
        _STEPS,
    ),
    mutant(
        "the length of the parts of a prompt depends on the batch",
        "kernels",
        "paged_jax.kernels.cpu.attention:attend",
        'is_exact and args.op == "prefill"',
        'is_exact and args.op == "prefill" and args.q.shape[0] == 1',
        f"{_ENGINE}[dense-bfloat16]",
    ),
    mutant(
        "keys of whole sequences are not rounded to the dtype of the cache",
        "models",
        "paged_jax.models.sequence_attention:_attend_to",
        "x.astype(kv_dtype.values)",
        "x",
        f"{_ENGINE}[dense-bfloat16]",
    ),
)

_TPU_WRITE = "paged_jax.kernels.mosaic_tpu.write"
_TPU_TESTS = "tests/kernels/test_tpu_write.py"

TPU_WRITES = (
    mutant(
        "tokens of a tile have buffers of their own",
        "kernels/mosaic_tpu",
        f"{_TPU_WRITE}:_find_places",
        "jnp.where(is_token, first, -1)",
        "jnp.where(is_token, index[:, 0], -1)",
        _TPU_TESTS,
    ),
    mutant(
        "the first token of a tile starts the write",
        "kernels/mosaic_tpu",
        f"{_TPU_WRITE}:_find_places",
        "last == index[:, 0]",
        "first == index[:, 0]",
        _TPU_TESTS,
    ),
    mutant(
        "a token past the end of its block is written",
        "kernels/mosaic_tpu",
        f"{_TPU_WRITE}:_find_places",
        "args.offsets < C",
        "args.offsets <= C",
        _TPU_TESTS,
    ),
    mutant(
        "a tile is changed before all tiles have arrived",
        "kernels/mosaic_tpu",
        f"{_TPU_WRITE}:_kernel",
        "(read, wait, change, finish)",
        "(read, change, wait, finish)",
        "tests/kernels/test_tpu_races.py",
    ),
    mutant(
        "a token has the row of its block and not of its tile",
        "kernels/mosaic_tpu",
        f"{_TPU_WRITE}:_kernel",
        "lax.rem(places.offsets[start + token], np.int32(_TILE))",
        "places.offsets[start + token]",
        _TPU_TESTS,
    ),
)

MUTANTS = (*TPU_WRITES, *STATES, *SERVER, *CONFIGS, *ROWS, *EXACT, *SURVIVORS, *DRAWN)
