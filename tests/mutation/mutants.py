"""Ways to break the package that a test must notice: each a small edit of one file, and the tests that should fail for it.

``old`` stands exactly once in the file. A break that ``tests`` do not notice has survived; ``run_mutants.py --wider`` tries those
of the whole room too.
"""

from __future__ import annotations

from dataclasses import dataclass

PARITY, STATE = "end_to_end/test_parity.py", "end_to_end/test_state.py"
HAZARDS, BAD_INPUT = "end_to_end/test_hazards.py", "end_to_end/test_bad_input.py"
TRIALS_CACHE, TRIALS_ATTENTION = "end_to_end/test_trials_cache.py", "end_to_end/test_trials_attention.py"
TRIALS_MISC, AUDIT = "end_to_end/test_trials_misc.py", "end_to_end/test_audit.py"
MATCH_GAPS, REFERENCE_GAPS = "match/test_match_gaps.py", "kernels/test_reference_gaps.py"
FAULTS, GAPS = "end_to_end/test_faults.py", "end_to_end/test_mutation_gaps.py"
SEVERAL = "end_to_end/test_several_tokens.py"
DENSE_MODE, REPORT = "end_to_end/test_dense_mode.py", "end_to_end/test_report.py"
REFERENCE, INTERPRETER, OPS = "kernels/test_reference.py", "kernels/test_interpreter.py", "kernels/test_ops.py"
WINDOW = "kernels/test_window.py"
ROPE, ATTENTION, CACHE, GRAPH = (f"match/test_{name}.py" for name in ("rope", "attention", "cache", "graph"))
SCHEMA, FILES, FINGERPRINT = (f"profiles/test_{name}.py" for name in ("profile_schema", "profile_files", "fingerprint"))
ECOSYSTEM = "end_to_end/test_ecosystem.py"
STATS, BUDGETS, COST = (
    "profiles/test_calibration_stats.py",
    "profiles/test_calibration_budgets.py",
    "cost/test_cost_model.py",
)

#: What ``--wider`` runs where the mapped tests notice nothing, by the room of the file.
WIDER: dict[str, tuple[str, ...]] = {
    "patterns": ("match", PARITY, HAZARDS, TRIALS_ATTENTION, TRIALS_CACHE, TRIALS_MISC),
    "fasa_compile": ("internals", "match", PARITY, STATE, HAZARDS, BAD_INPUT, DENSE_MODE, AUDIT, TRIALS_MISC, STATS),
    "profiles": ("profiles", BAD_INPUT),
    "triton_kernels": ("kernels", PARITY),
}


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def interpreted(self) -> bool:
        """Whether its tests run kernels in Triton's interpreter, which needs a process of its own."""
        return self.tests[0].split("::")[0] in (INTERPRETER, WINDOW)

    @property
    def room(self) -> str:
        return self.file.split("/")[0]


MUTANTS: list[Mutant] = []


def breaks(file: str, *tests: str):
    """``add(name, old, new, *others)`` for breaks of ``file``; ``others`` replace the file's usual ``tests``."""

    def add(name: str, old: str, new: str, *others: str) -> None:
        MUTANTS.append(Mutant(name, file, old, new, others or tests))

    return add


# ---- capture ----------------------------------------------------------------------------------------------------------

add = breaks("fasa_compile/repeats.py", "internals/test_repeats.py")
add("a number read from another tensor serves", "if free_unbacked_symbols(number):", "if False:")
add(
    "a write that was not foreseen is not seen",
    "return all(value.made is None or",
    "return all(True or value.made is None or",
)
add(
    "what is written later is taken for a value",
    "if any(self._last_write.get(storage, -1) > at for",
    "if any(False for",
)
add("an assignment is taken for a change of state", "_NO_STATE = {operator.setitem,", "_NO_STATE = {")
add("what is assigned is taken for written", "node.all_input_nodes[: 1 if own else None]:", "node.all_input_nodes:")
add("tensors of a call are not told apart", "places.setdefault(x.node, len(places)), x.kind", "x.kind")

add = breaks("fasa_compile/capture.py", CACHE, "internals/test_torch_facts.py")
add(
    "a write through a view reaches no other view",
    "for alias in self._aliases.get(_storage(value), ()):",
    "for alias in self._aliases.get(_storage(value), ())[:1]:",
    f"{MATCH_GAPS}::test_every_alias_of_a_written_tensor_is_followed",
)
add(
    "assignment to an index is no write",
    '_IN_PLACE = {"setitem", "__setitem__"}',
    '_IN_PLACE = {"__setitem__"}',
    f"{CACHE}::test_static_with_slots",
)
add(
    "a value is that of one step later",
    "if since >= point:",
    "if since > point:",
    f"{MATCH_GAPS}::test_every_alias_of_a_written_tensor_is_followed",
)
add(
    "inputs that share memory are taken apart",
    "if j != i and self.is_written(j) and isinstance(other, torch.Tensor):",
    "if False and self.is_written(j) and isinstance(other, torch.Tensor):",
    f"{HAZARDS}::test_a_write_through_another_input_that_shares_memory",
)
add(
    "one graph serves every model of a class",
    "install_guard(source.make_guard(GuardBuilder.ID_MATCH))",
    "pass",
    f"{HAZARDS}::test_one_backend_on_two_models_checks_both",
)
add(
    "a number that is an input loses its symbol",
    "fake.item_memo = number",
    "pass",
    "internals/test_torch_facts.py::test_a_number_that_dynamo_made_an_input_keeps_its_symbol",
)

# ---- match ------------------------------------------------------------------------------------------------------------

add = breaks("fasa_compile/match.py", ROPE, ATTENTION)
add(
    "query heads read the KV head of their own number",
    "(b, h // repeat, row)",
    "(b, h, row)",
    f"{PARITY}::test_custom_modules_are_rewritten",
)
add(
    "a rotation that is the same everywhere is a rotary embedding",
    "if moved_any or np.abs(here.angles).max() <= 4 * tol:",
    "if False:",
    f"{ROPE}::test_no_rotation_is_refused",
)
add(
    "the packed cache is kept though other rows are written too",
    "if slots is None or ahead.end is not self.shadow.inputs[i]:",
    "if slots is None:",
    f"{HAZARDS}::test_a_row_written_at_a_fixed_place_before_the_new_one",
)
add(
    "a later write of the keys is overlooked",
    "rewritten_later=node is not self.shadow.final[i]",
    "rewritten_later=False",
    f"{CACHE}::test_buffer_written_again_after_it_was_read",
)
add(
    "keys that are an input may be anything",
    'if keys.write is None and keys.chain.end.op == "placeholder":',
    "if False:",
    f"{CACHE}::test_keys_that_arrive_ready_made",
)
add(
    "the first head speaks for all",
    "for h in sorted({0, heads // 2, heads - 1} if keys.part is None",
    "for h in sorted({0} if keys.part is None",
    f"{MATCH_GAPS}::test_every_head_that_is_looked_at_must_be_rotated",
)
add(
    "a layer's second run has the first one's name",
    "if self.runs[layer] > 1:",
    "if self.runs[layer] > 2:",
    f"{GRAPH}::test_names_order_and_counts",
)
add(
    "the rope of a site is that of an attention before",
    "key = (form.pattern(), tol)",
    "key = (who, tol)",
    f"{ROPE}::test_full_rotation",
    f"{MATCH_GAPS}::test_each_attention_is_proven_for_itself",
)

add(
    "the cache may be copied to be read",
    "        return None\n\n    def _emitted",
    "        return node\n\n    def _emitted",
    f"{GAPS}::test_keys_that_no_value_of_the_graph_holds_stay_dense",
)

# ---- patterns ---------------------------------------------------------------------------------------------------------

add = breaks("patterns/rope.py", ROPE)
add(
    "the two dims of a pair are exchanged",
    "return Turn(tuple((b[0], b[1]) for b in blocks)",
    "return Turn(tuple((b[1], b[0]) for b in blocks)",
)
add(
    "queries and keys may turn by different angles",
    "if (apart := _apart(q.angles, k.angles)) > 4 * tol:",
    "if (apart := _apart(q.angles, k.angles)) > 4e9 * tol:",
    f"{ROPE}::test_queries_and_keys_that_differ_are_refused",
)
add(
    "queries and keys may turn other dims",
    "if q.pairs != k.pairs:",
    "if False:",
    f"{ROPE}::test_queries_and_keys_that_differ_are_refused",
)
add(
    "the magnitude of the tables is lost",
    "magnitude=round(k.magnitude, 6)",
    "magnitude=1.0",
    f"{ROPE}::test_magnitude_of_scaled_tables",
)
add(
    "a matrix with unequal sines is a rotation",
    " or abs(m[0, 1] + m[1, 0]) > tol * magnitude",
    "",
    f"{MATCH_GAPS}::test_one_plane_alone_must_be_a_rotation",
)
add(
    "planes may be scaled unequally",
    "if np.abs(magnitudes - magnitude).max() > tol * magnitude:",
    "if False:",
    f"{ROPE}::test_no_rotation_is_refused",
)
add(
    "angles need not move with the position",
    "return before.pairs == after.pairs and _apart(before.angles, after.angles) > 4 * tol",
    "return before.pairs == after.pairs",
    f"{MATCH_GAPS}::test_a_small_turn_that_never_moves_is_refused",
)
add(
    "a rotation need not start at the identity",
    "if far < 1.0 and abs(here.angles[slowest]) > far:",
    "if False:",
    f"{ROPE}::test_no_rotation_is_refused",
)

add = breaks("patterns/attention.py", ATTENTION)
add("the default scale is 1 / d", "scale = 1.0 / math.sqrt(qs[-1])", "scale = 1.0 / qs[-1]", f"{ATTENTION}::test_sdpa")
add(
    "a scale that is given is ignored",
    "    if scale is None:",
    "    if True:",
    f"{ATTENTION}::test_scale_is_the_graphs",
)
add("the mask is dropped", "masked, kind = mask_of(mask, qs, ks)", 'masked, kind = None, "none"')
add(
    "a causal single query sees all keys",
    "if is_causal and qs[2] == 1 and ks[2] > 1:",
    "if False:",
    f"{ATTENTION}::test_causal_with_one_query_is_refused",
)
add("dropout is left out", "    if dropout:\n", "    if False:\n", f"{ATTENTION}::test_dropout_is_refused")
add(
    "a log-sum-exp that is used is dropped",
    "if user is not results[0] and user in tables.shadow.needed:",
    "if False:",
    "match/test_flash_attention.py::test_a_log_sum_exp_matters_only_where_it_is_used",
)

add = breaks("patterns/written.py", ATTENTION)
add(
    "a soft cap is read and not applied",
    "self.softcap, self.scale = by, tanh * by",
    "self.softcap, self.scale = 0.0, tanh * by",
    f"{ATTENTION}::test_written_out",
)
add(
    "a soft cap leaves the scale without its factor",
    "self.softcap, self.scale = by, tanh * by",
    "self.softcap, self.scale = by, tanh",
    f"{ATTENTION}::test_written_out",
)
add(
    "a shift before a soft cap is dropped",
    'elif kind == "tanh":\n                if self.shifted:',
    'elif kind == "tanh":\n                if False:',
    f"{HAZARDS}::test_a_shift_before_a_softcap_is_not_dropped",
)
add(
    "numbers read from inputs are not watched",
    "tables.shadow.relied.add(place[head])",
    "pass",
    f"{HAZARDS}::test_a_scale_that_changes_after_compilation_is_noticed",
)
add(
    "a division of scores is a product",
    "return 1.0 / constant(b, self.tables)",
    "return constant(b, self.tables)",
    f"{ATTENTION}::test_written_out",
)
add(
    "a mask that is subtracted is added",
    '(-1.0 if graph.name(node) == "sub" else 1.0)',
    "1.0",
    f"{ATTENTION}::test_several_masks_are_one",
)
add(
    "scores filled with mild numbers are hidden",
    "_HIDDEN = -1e3",
    "_HIDDEN = 1e3",
    f"{ATTENTION}::test_what_cannot_be_read_is_refused_by_name",
)
add(
    "attention with dropout is read without it",
    'raise Refused("dropout", f"{node.name}: p=',
    'Refused("dropout", f"{node.name}: p=',
    f"{MATCH_GAPS}::test_dropout_of_weights_is_refused",
)

add = breaks("patterns/cache.py", CACHE)
add(
    "slots may count from the end",
    " or (places < 0).any():",
    ":",
    f"{MATCH_GAPS}::test_slots_that_count_from_the_end_are_none",
)
add("new tokens of a cat come first", "first = found[-1][1] - at.offset", "first = 0", f"{CACHE}::test_dynamic")
add(
    "which row is which sequence's never changes",
    "if _reads_tensors(indices[at.batch_dim]):",
    "if False:",
    f"{MATCH_GAPS}::test_rows_of_sequences_that_are_an_input_may_change",
)
add(
    "rows are counted without the view's offset",
    "return places % graph.shape(node)[at.dim] - at.offset",
    "return places % graph.shape(node)[at.dim]",
    f"{MATCH_GAPS}::test_keys_that_are_seen_from_a_row_on",
)

add = breaks("patterns/layout.py", ATTENTION, CACHE)
add(
    "keys that were rounded are read unrounded",
    "if torch.finfo(own).eps < torch.finfo(dtype).eps:",
    "if False:",
    f"{MATCH_GAPS}::test_keys_that_attention_rounds_are_rounded",
)

add = breaks("patterns/flash.py", "match/test_flash_attention.py")
add("the window is ignored", "        if left >= 0:\n            seen", "        if False:\n            seen")
add("lengths of the cache are ignored", "            end = begin + rest[-1].reshape(-1, 1, 1, 1)", "            pass")
add(
    "slopes and paged caches are ignored",
    "        if isinstance(given.get(name), fx.Node):\n            raise",
    "        if False:\n            raise",
)

add = breaks("patterns/flex.py", "match/test_flex_attention.py")
add(
    "blocks that are not listed are seen",
    "mask = seen if mask is None else mask & seen",
    "mask = seen if mask is None else mask",
    f"{MATCH_GAPS}::test_blocks_hide_what_a_mask_mod_would_show",
)
add("a score_mod's factor is lost", "factor = float(scale) * score.factor", "factor = float(scale)")
add("what a score_mod subtracts is added", "of[term] if sign > 0 else", "of[term] if sign else")

add = breaks("patterns/tables.py", ROPE)
add(
    "positions are constants",
    "                bits[node] = POSITION\n            continue\n        if is_size",
    "                bits[node] = 0\n            continue\n        if is_size",
    f"{ROPE}::test_no_rotation_is_refused",
)

# ---- plan -------------------------------------------------------------------------------------------------------------

add = breaks("fasa_compile/plan.py", BAD_INPUT, DENSE_MODE)
add(
    "a budget of exactly the cache is sparse",
    "holds >= held:",
    "holds > held:",
    f"{GAPS}::test_a_budget_of_exactly_the_cache_is_dense",
)
add(
    "gradients are not declined",
    "    if grad:\n        return Decision(",
    "    if False:\n        return Decision(",
    f"{BAD_INPUT}::test_training_gives_the_ordinary_gradients",
)
add("autocast is not declined", "    if autocast:\n", "    if False:\n", f"{HAZARDS}::test_autocast_stays_dense")
add(
    "a layer that is to stay dense is sparse",
    "if layer is not None and layer.dense:",
    "if False:",
    f"{BAD_INPUT}::test_layers_that_the_profile_calls_dense_stay_dense",
)
add(
    "a user's budget does not scale a layer's own",
    "scaled = round(layer.n_fac * budget.n_fac / base.n_fac)",
    "scaled = layer.n_fac",
    f"{BUDGETS}::test_a_users_budget_scales_the_layers_own",
)
add(
    "the profile is not compared with the graph",
    "check_layer(layer, site.layer, Hq, Hkv, D, site.rope)",
    "pass",
    f"{BAD_INPUT}::test_profile_of_another_model",
)
add(
    "dense_below is the other way round",
    "for n in site.shape) and least > asked:",
    "for n in site.shape) and least < asked:",
    f"{DENSE_MODE}::test_a_length_that_the_user_sets",
)
add(
    "dense_below is ignored",
    "least = policy.dense_below if policy.dense_below is not None else None if hosted else cost.break_even",
    "least = cost.break_even",
    f"{DENSE_MODE}::test_a_length_that_the_user_sets",
)
add(
    "a slice of a buffer is kept in step",
    "        and not _sliced(site)\n",
    "",
    f"{GAPS}::test_a_row_beyond_what_attention_reads",
)
add(
    "keys that are written again are kept in step",
    "        and not cache.rewritten_later\n",
    "",
    f"{HAZARDS}::test_a_write_through_another_input_that_shares_memory",
)
add(
    "a layer that the profile lacks stays dense",
    "            raise _not_in_profile(site, policy.profile)",
    '            return Decision(site, "dense", "unknown-layer")',
    f"{BAD_INPUT}::test_profile_of_another_model",
)
add(
    "any dtype will do",
    "if any(t.dtype not in _FLOATS for t in tensors) or",
    "if",
    f"{GAPS}::test_double_precision_stays_dense",
)
add(
    "a wrapper's name is part of the layer's",
    "return self.profile.by_layer(name.removeprefix(prefix))",
    "return self.profile.by_layer(name)",
    f"{HAZARDS}::test_a_wrapper_around_the_model_is_seen_through",
)
add(
    "only a layer's own budget tells whether it holds the cache",
    "holds = max(budget.n_fac, policy.budget_for(None, length).n_fac)",
    "holds = budget.n_fac",
    f"{GAPS}::test_a_budget_that_holds_the_cache_counts_for_every_layer",
)
add(
    "a layer that calibration could not read is another model's",
    "        if layer is None and policy.uncalibrated(site.layer, prefix):",
    "        if False:",
    f"{GAPS}::test_a_layer_that_calibration_could_not_read_stays_dense",
)
add(
    "a part of the model is the model",
    "        if layer is None and _is_part_of(site.layer, policy.profile):",
    "        if False:",
    f"{BAD_INPUT}::test_graph_breaks",
)

# ---- rewrite ----------------------------------------------------------------------------------------------------------

SPARSE = f"{PARITY}::test_sparse_equals_the_plain_reference"
add(
    "any number of query tokens is a step",
    "    return bool(tokens <= STEP_TOKENS)\n",
    "    return True\n",
    f"{SEVERAL}::test_one_graph_serves_all_numbers_of_tokens_and_a_prompt_has_another",
)
add(
    "a causal flag is overlooked in a step of several tokens",
    "    if site.is_causal:\n",
    "    if False:\n",
    f"{SEVERAL}::test_what_is_no_step",
)
add(
    "several tokens go through the hot buffer",
    'and state == "packed" and one else None',
    'and state == "packed" else None',
    f"{SEVERAL}::test_k_and_v_in_host_memory",
)

add = breaks("fasa_compile/rewrite.py", SPARSE)
add(
    "the mask is dropped",
    "mask = emit.expr(site.mask, at) if site.mask is not None else None",
    "mask = None",
    f"{PARITY}::test_left_padded_rows_equal_their_own_run",
)
add(
    "learned sinks are dropped",
    "sinks = emit.expr(site.sinks, at) if site.sinks is not None else None",
    "sinks = None",
    f"{TRIALS_ATTENTION}::test_a_learned_sink_joins_the_denominator",
)
add(
    "the soft cap is ignored",
    "softcap=site.softcap,\n        sinks=sinks,\n        fmt=",
    "softcap=0.0,\n        sinks=sinks,\n        fmt=",
    f"{TRIALS_ATTENTION}::test_a_softcap_that_bites",
)
add(
    "the dense kernel ignores the soft cap",
    "scale=site.scale, softcap=site.softcap, sinks=sinks)",
    "scale=site.scale, softcap=0.0, sinks=sinks)",
    f"{DENSE_MODE}::test_softcap_and_sliding_layers",
)
add(
    "the scale is that of the head's size",
    "scale=site.scale,\n        n_fac=",
    "scale=site.shape[5] ** -0.5,\n        n_fac=",
    f"{PARITY}::test_scale_comes_from_the_graph",
)
add(
    "the dense kernel swaps keys and values",
    "arguments = (q, k, v, mask, limits)",
    "arguments = (q, v, k, mask, limits)",
    f"{DENSE_MODE}::test_every_site_is_exact",
)
add("the sparse step swaps keys and values", "(q, k, v, data, meta, *profile", "(q, v, k, data, meta, *profile")
add("the budget is one short", "n_fac=budget.n_fac,", "n_fac=budget.n_fac - 1,")
add("recent tokens are not forced", "n_recent=budget.n_recent,", "n_recent=0,")
add("first tokens are not forced", "n_sink=budget.n_sink,", "n_sink=0,")
add(
    "centre and spread are exchanged",
    'profile = tuple(inputs.get(role) for role in ("dims", "centre", "spread"))',
    'profile = tuple(inputs.get(role) for role in ("dims", "spread", "centre"))',
)
add("the norm is missing", '*profile, inputs.get("norm"), mask, limits)', "*profile, None, mask, limits)")
add(
    "the reduction is always static",
    'reduction=decision.reduction if layer is not None else "softmax_sum"',
    'reduction="static"',
    f"{GAPS}::test_the_graph_reduces_as_the_profile_says",
)
add(
    "layers with other masks share their bounds",
    "seen = (site.mask, str(site.shape[4]))",
    "seen = str(site.shape[4])",
    f"{GAPS}::test_layers_with_other_masks_have_bounds_of_their_own",
)
add(
    "rows that the model writes are not packed",
    "slots = emit.expr(site.cache.slots, at)",
    "slots = None",
    f"{STATE}::test_reset_and_a_new_prompt",
)
add(
    "a cache write without a reader is removed",
    " or may_write(dead):",
    ":",
    f"{GAPS}::test_a_write_whose_result_is_what_attention_reads",
)
add(
    "a copied graph forgets where its inputs come from",
    "            new._dynamo_source = old._dynamo_source",
    "            pass",
    "internals/test_torch_facts.py::test_placeholders_carry_a_source_and_survive_a_copy_of_the_graph",
)
# ---- runtime and audit ------------------------------------------------------------------------------------------------

add = breaks("fasa_compile/runtime.py", STATE)
add(
    "what a cache has counted goes with it",
    "            self.past.append(packed.ledger)",
    "            pass",
    "end_to_end/test_offload.py::test_what_was_counted_outlives_the_cache",
)
add(
    "of past caches only the last one counts",
    "sums[ledger.device] + total if ledger.device in sums else total",
    "total",
    "end_to_end/test_offload.py::test_what_was_counted_outlives_the_cache",
)
add(
    "past caches are never added up",
    "                self.layer.add_up()",
    "                pass",
    "end_to_end/test_offload.py::test_what_was_counted_outlives_the_cache",
)
add(
    "writes to K are not counted",
    " and self.version == k._version",
    "",
    f"{STATE}::test_reset_and_a_new_prompt",
)
add(
    "storage may be swapped under the cache",
    " and self.address == k.data_ptr()",
    "",
    f"{HAZARDS}::test_storage_that_is_swapped_under_the_cache",
)
add(
    "packed caches are trusted after an exception",
    "            except BaseException as problem:\n                self._distrust()\n",
    "            except BaseException as problem:\n",
    f"{FAULTS}::test_a_step_that_broke_off_under_a_compiler_whose_writes_are_not_counted",
)
add(
    "the memory of the last threshold outlives a prompt",
    "packed.hint.zero_()",
    "pass",
    f"{GAPS}::test_what_the_last_threshold_was_is_forgotten_with_the_prompt",
)
add(
    "numbers read into the graph are not watched",
    "number.check(arguments)",
    "pass",
    f"{HAZARDS}::test_a_scale_that_changes_after_compilation_is_noticed",
)
add(
    "packed caches outlive the cache",
    "gone = layer.caches.pop(key, None)",
    "gone = layer.caches.get(key)",
    f"{STATE}::test_the_packed_cache_dies_with_the_cache",
)
add(
    "the packed cache is made anew in every step",
    "        self.version = k._version\n",
    "        self.version = _UNTRACKED\n",
    f"{STATE}::test_two_caches_in_turn_keep_their_own_state",
)
add(
    "centre and spread are exchanged in the packed cache",
    'return (centre if role == "centre" else spread).clone()',
    'return (spread if role == "centre" else centre).clone()',
    SPARSE,
)
add(
    "every head has the norm 0",
    "return layer.normaliser(decision.reduction)[0].clone()",
    "return torch.zeros_like(layer.norm)",
    SPARSE,
)
add(
    "scale and zero are not packed anew",
    "packed.meta[:, :, first : first + keys.shape[2]].copy_(meta)",
    "pass",
    SPARSE,
)
add(
    "a cache in inference mode is trusted",
    "hint, frozen=k.is_inference())",
    "hint, frozen=False)",
    f"{STATE}::test_inference_mode_is_never_stale",
)
add(
    "one packed cache serves two caches",
    'packed = self.layer.caches.get(id(k))\n        why = "uncounted" if capturing else _why_stale(packed, k)\n'
    "        stale = packed is None or packed.key() is not k or",
    'packed = self.current or self.layer.caches.get(id(k))\n        why = "uncounted" if capturing else _why_stale(packed, k)\n'
    "        stale = packed is None or",
    f"{STATE}::test_two_caches_in_turn_keep_their_own_state",
)

add(
    "what a failed step changed is not put back",
    "        put_back(arguments, saved)\n",
    "",
    f"{FAULTS}::test_what_a_failed_step_changed_is_put_back",
)
add(
    "an interrupted step is run again",
    "if not isinstance(problem, Exception) or isinstance(problem, _RAISED):",
    "if False:",
    f"{FAULTS}::test_a_step_that_broke_off_can_be_made_again",
)
add(
    "any step may be run again",
    "saved = self._copies(arguments) if not self._ran and not capturing else None",
    "saved = self._copies(arguments)",
    f"{FAULTS}::test_a_step_that_broke_off_can_be_made_again",
)
add(
    "a forked process waits for its parent's thread",
    "        if self.lock.locked():\n            self.lock = threading.Lock()\n",
    "        if self.lock.locked():\n",
    f"{FAULTS}::test_a_forked_process_goes_on_where_its_parent_was",
)

add(
    "weights may be replaced after the first step",
    "if anew and self._check is not None:",
    "if False:",
    "end_to_end/test_later_changes.py::test_a_profile_of_the_weights_before_is_an_error_at_the_next_prompt",
)

add(
    "hot rows outlive a write to V",
    "            self.tags.zero_()",
    "            pass",
    "end_to_end/test_offload.py::test_a_hot_row_is_never_stale",
)

add(
    "graphs of a backend have packed caches of their own",
    "key = (profile.layer, decision.fc_format,",
    "key = (id(decision), decision.fc_format,",
    f"{SEVERAL}::test_kinds_of_steps_in_turn_share_the_packed_cache",
)

add = breaks("fasa_compile/fallback.py", FAULTS)
add(
    "a cache of any size is copied",
    "return tuple(kept) if size <= LARGEST_COPY else None",
    "return tuple(kept)",
    f"{FAULTS}::test_a_cache_too_large_to_copy_is_an_error",
)
add(
    "inputs that share memory may be written twice",
    "if any(shadow.overlaps_a_written_input(i)",
    "if False and any(shadow.overlaps_a_written_input(i)",
    f"{FAULTS}::test_what_may_be_run_again",
)
add("an index_put that adds may be made twice", "any(user.args[3:])", "False", f"{FAULTS}::test_what_may_be_run_again")
add(
    "rows may be told by what the graph writes",
    " or _rows_told_by(shadow.inputs[i]) & moving]",
    "]",
    f"{FAULTS}::test_what_may_be_run_again",
)
add(
    "whatever reads a cache may read it before the write",
    "        else:\n            return None\n    return found\n\n\ndef _made_of",
    "    return found\n\n\ndef _made_of",
    f"{FAULTS}::test_what_may_be_run_again",
)

add = breaks("fasa_compile/offload.py", "end_to_end/test_offload.py::test_rows_lie_side_by_side_and_are_recognised")
add("keys and values in host memory begin at one place", "offset = first * self.rows.element_size()", "offset = 0")

add = breaks("fasa_compile/audit.py", AUDIT)
add("the audit tells what was kept", "return (1.0 - kept)", "return (0.0 + kept)")
add("the audit comes a step late", "return self.steps % self.every == 0", "return self.steps % (self.every + 1) == 0")
add(
    "the audit sees tokens that a mask hides",
    "        None,\n        watched.bounds,\n",
    "        None,\n        None,\n",
)
add("the audit looks at the first head alone", "head=self.turn // stride)", "head=0)")
add("the audit forgets the forced tokens", "        n_recent=budget.n_recent,\n", "        n_recent=0,\n")
add("one audit above the bound is enough", "IN_A_ROW = 4", "IN_A_ROW = 1")
add(
    "audits above the bound need not follow each other",
    "(watched.lost[2] + 1) * (loss > self.bound)",
    "watched.lost[2] + (loss > self.bound)",
)
add("the audit ignores the scale", "        site.scale * (q.float()[:, :, 0]", "        (q.float()[:, :, 0]")

# ---- backend ----------------------------------------------------------------------------------------------------------

add = breaks("fasa_compile/backend.py", BAD_INPUT)
add(
    "training is not noticed",
    "return torch.is_grad_enabled() and any(",
    "return False and any(",
    f"{BAD_INPUT}::test_training_gives_the_ordinary_gradients",
)
add(
    "an error of ours means dense",
    "    FasaError,\n    TensorifyScalar",
    "    TensorifyScalar",
    f"{BAD_INPUT}::test_interrupts_are_not_swallowed",
)
add(
    "other weights are accepted",
    "if self.check_weights and not same_weights(",
    "if False and not same_weights(",
    f"{BAD_INPUT}::test_profile_of_other_weights",
)
add(
    "a model with fewer layers is accepted",
    "        if missing:\n",
    "        if False:\n",
    f"{BAD_INPUT}::test_profile_of_another_model",
)
add(
    "writes through another input are overlooked",
    "return replace(site, cache=replace(site.cache, rewritten_later=True))",
    "return site",
    f"{HAZARDS}::test_a_write_through_another_input_that_shares_memory",
)
add(
    "autocast inside the graph is overlooked",
    "return any(len(args) < 3 or (args[2] is not False",
    "return any(False and (args[2] is not False",
    f"{HAZARDS}::test_autocast_stays_dense",
)
add(
    "a decode step is taken for a prefill",
    "if not isinstance(q.shape[2], int) or is_step(q.shape[2]):",
    "if not isinstance(q.shape[2], int):",
    SPARSE,
)
add(
    "a failure of one stage is raised",
    "        if self.strict or isinstance(problem, _NOT_SWALLOWED):",
    "        if True:",
    f"{BAD_INPUT}::test_a_failing_stage_leaves_the_model_dense",
)
add(
    "sites that stay dense are not counted",
    "                decline(decision.reason)",
    "                pass",
    f"{REPORT}::test_counts_add_up",
    f"{BAD_INPUT}::test_a_failing_stage_leaves_the_model_dense",
)

# ---- the specification ------------------------------------------------------------------------------------------------

add = breaks("triton_kernels/reference.py", REFERENCE)
add(
    "equal keys go to the higher index",
    "picked = (ordered * 2**32 + (2**31 - position)).topk(n, dim=-1).values\n    return 2**31 - (picked & 0xFFFFFFFF)",
    "picked = (ordered * 2**32 + position).topk(n, dim=-1).values\n    return picked & 0xFFFFFFFF",
)
add("the budget is one too many", "chosen = best(key, n_fac)", "n_fac += 1\n    chosen = best(key, n_fac)")
add("one recent token too few is forced", "(t >= stop - n_recent)", "(t > stop - n_recent)")
add(
    "first tokens are counted from slot 0",
    "always = (t < first + n_sink)",
    "always = (t < n_sink)",
    f"{REFERENCE_GAPS}::test_forced_tokens_are_counted_from_the_first_and_last_valid_one",
)
add(
    "keys are not centred",
    "x = (chosen.float() - centre[:, None, :]) / spread[:, None, :]",
    "x = chosen.float() / spread[:, None, :]",
)
add(
    "codes are read without their zero",
    " + token_zero * rounded.sum(-1, keepdim=True))",
    ")",
    f"{REFERENCE_GAPS}::test_scores_are_those_of_what_is_stored",
)
add("codes of int8 are read as stored", "return data.float() + 128.0", "return data.float()")
add("nibbles are exchanged", "torch.cat([data & 15, data >> 4], dim=-1)", "torch.cat([data >> 4, data & 15], dim=-1)")
add(
    "scores by all dims are unscaled",
    "s = scale * _matmul(together, k)\n    else:",
    "s = _matmul(together, k)\n    else:",
    f"{REFERENCE_GAPS}::test_scores_by_all_dims_have_the_attentions_scale",
)
add("attention ignores the soft cap", "s = capped(scale * _matmul(qg, k), softcap)", "s = scale * _matmul(qg, k)")
add("sinks do not join the denominator", "total = total + (sink - top).exp()", "pass")
add(
    "the bias of kept tokens is dropped",
    "kept_bias = None if bias is None else bias.expand(N, Hkv, G, L).gather(3, by_head)",
    "kept_bias = None",
)
add("the norm is ignored", "s = s - level\n", "pass\n")
add("values of hidden tokens spread", "v = torch.where(allowed.any(2)[..., None], v, 0.0)", "pass")
add(
    "heads are numbered across groups",
    "return out.reshape(B, Hkv * G, 1, v.shape[-1])",
    "return out.transpose(1, 2).reshape(B, Hkv * G, 1, v.shape[-1])",
)
add(
    "all sequences are written at the first one's slots",
    "row = slots.reshape(-1, slots.shape[-1])[:, None, :]",
    "row = slots.reshape(-1, slots.shape[-1])[:1, None, :]",
)
add("a dtype's lowest value hides nothing", "mask > torch.finfo(mask.dtype).min", "mask >= torch.finfo(mask.dtype).min")
add("the last valid token is cut off", "stop = torch.where(allowed, t + 1, 0)", "stop = torch.where(allowed, t, 0)")
add(
    "a written row keeps its old scale",
    "    if INFO[fmt].meta_columns:\n        meta.index_put_",
    "    if False:\n        meta.index_put_",
)
add(
    "codes are taken with the unrounded zero",
    "    zero = rounded_to(zero, torch.float16)\n",
    "",
    f"{INTERPRETER}::test_packed_bytes_are_the_references",
)
add("max is a sum", 'key = s.amax(2) if reduction == "max" else', "key =")
add("heads are not compared by their softmax", "s = s - guarded_logsumexp(s, -1)\n", "pass\n")
add(
    "NaN is stored",
    "x = torch.where(x == x, x, 0.0).clamp(-info.limit, info.limit)\n    if",
    "x = x.clamp(-info.limit, info.limit)\n    if",
)

SHARDED, SEQUENCE = "kernels/test_sharded_decode.py", "match/test_sequence_sites.py"
add = breaks("triton_kernels/sharded_decode.py", SHARDED)
add(
    "a process takes the next one's choice for its own",
    "taken = taken[..., rank * width : (rank + 1) * width]\n",
    "taken = taken[..., -n_fac - width : -n_fac]\n",
)
add("every process attends to all of its best", "taken = taken & (listed", "taken = (listed")
add(
    "lists are in order of keys",
    ".sort(-1).values  # [B, Hkv, n], in order of position",
    "",
    f"{SHARDED}::test_candidates_are_in_order_of_position",
)
add("fewer keys are sent than may be chosen", "n = min(n_fac, rows)", "n = min(n_fac // 2 + 1, rows)")
add("bounds are those of all tokens", "return mask, bounds - first", "return mask, bounds")
add("the mask is the first process's", "mask[..., first : first + rows]", "mask[..., :rows]")
add(
    "softmax_sum compares by a process's own",
    "norm = reference.guarded_logsumexp(all_gather(own, ranks, group), 0)[0]",
    "norm = own",
)
add(
    "the row that nobody reads is read",
    "    k = k[:, :, :rows]\n",
    "    k = k[:, :, -rows:]\n",
)
add("parts are merged as if all weighed the same", "weight = (lse - top).exp()", "weight = (lse > -torch.inf).float()")
add("sinks do not join the merge", "total = total + (sink - top).exp()", "pass")

add = breaks("fasa_compile/sequence.py", SEQUENCE)
add("tokens beyond the end are lost", "torch.where(positions >= self.length, self.rows + 1, ", "(")
add("tokens of later processes are written here", "(own >= 0) & (own < self.rows)", "own >= 0")

add = breaks("fasa_compile/match.py", SEQUENCE)
add(
    "gathered values may be moved",
    "if graph.name(chain.end) != GATHER or not plain:",
    "if graph.name(chain.end) != GATHER:",
)
add("keys and values may be shared out apart", "if parts[0] != parts[1]:", "if False:")
add = breaks("triton_kernels/tokens.py", f"{SEVERAL}::test_a_step_of_several_equals_steps_of_one")
add(
    "every query token of a step has the last one's mask",
    "token_rows(mask.expand(",
    "token_rows(mask[:, :, -1:].expand(",
    f"{REFERENCE}::test_several_query_tokens_are_as_many_steps_of_one",
)
add(
    "rows of several tokens come back in another order",
    "out.view(-1, S, out.shape[1], out.shape[3]).transpose(1, 2)",
    "out.view(-1, out.shape[1], S, out.shape[3])",
)

add = breaks("triton_kernels/hot_slots.py", "kernels/test_hot_slots.py")
add("rows that a step wrote stay hot", "held = torch.where((held[..., None] == rows + 1).any(-1), 0, held)", "pass")
add("hot rows are named by the token before", ".reshape(tags.shape) + 1, held))", ".reshape(tags.shape), held))")

add = breaks("triton_kernels/ops.py", OPS)
add("the operator does not refresh rows", "if slots is not None and data is not None:", "if False:")
add(
    "the operator hides what it writes",
    "Tensor v, Tensor(a!)? data, Tensor(b!)? meta",
    "Tensor v, Tensor? data, Tensor? meta",
    f"{REFERENCE_GAPS}::test_the_schema_says_what_the_sparse_step_writes",
)

# ---- kernels, in the interpreter --------------------------------------------------------------------------------------

PROCESSES = f"{INTERPRETER}::test_tokens_on_several_processes"
add = breaks("triton_kernels/shard.py", PROCESSES)
add("each program looks at the first run of tokens", "base + part * share, share, n_fac", "base, share, n_fac")
add("lists are not padded", "if part == PARTS - 1:", "if part == PARTS:")
add(
    "parts of a list overwrite each other",
    "tl.sum(tl.where(n < part, counts, 0), axis=0)",
    "tl.sum(counts * 0, axis=0)",
)
add("a process's candidates are the first one's", "at = rank * width + i\n", "at = i\n")
add("all candidates are attended to", "((key >= hi) | ((key >= lo) & (at < below)))", "(key >= lo - 1e30)")
add(
    "of equal keys all are attended to",
    "(key >= lo) & (at < below)",
    "key >= lo",
    f"{INTERPRETER}::test_equal_keys_of_several_processes_are_told_apart_by_position",
)
add = breaks("triton_kernels/score.py", PROCESSES)
add(
    "first and last tokens are each process's own",
    "    first, stop = own_bounds(first, stop, SHARD)\n    base",
    "    first, stop = own_bounds(first, stop, SHARD)\n    sinks_end, recent = first + n_sink, stop - n_recent\n    base",
)
add("tokens beyond a process's part are scored", "tl.minimum(stop, SHARD)", "tl.minimum(stop, SHARD + 1)")
add = breaks("triton_kernels/attend.py", PROCESSES)
add(
    "a share's log-sum-exp is of the scores' squares",
    "(top + tl.log2(total)) / 1.44",
    "(top + 2 * tl.log2(total)) / 1.44",
)

add = breaks("triton_kernels/score.py", INTERPRETER)
add(
    "TIP forces one recent token too few",
    "(token >= recent)",
    "(token > recent)",
    f"{INTERPRETER}::test_formats",
)
add(
    "TIP counts first tokens from slot 0",
    "sinks_end = first + n_sink",
    "sinks_end = n_sink",
    f"{INTERPRETER}::test_masks",
)
add(
    "TIP ignores the mask",
    "counted, bias = _token_mask(mask, b, 0, token, inside, stride_mb, 0, stride_mt, MASK_KIND)",
    "pass",
    f"{INTERPRETER}::test_masks",
)
add(
    "TIP ignores the soft cap",
    "                s = _soft(s, softcap)",
    "                pass",
    f"{INTERPRETER}::test_options",
)
add(
    "TIP ignores the norm",
    'level = tl.load(norm + head, mask=is_head, other=float("inf")).to(tl.float32) * LOG2E',
    'level = tl.where(is_head, 0.0, float("inf"))',
    f"{INTERPRETER}::test_formats",
)
add(
    "TIP leaves out the zero of codes",
    "+ token_zero[:, None] * code_sum.to(tl.float32)[None, :]",
    "+ 0.0",
    f"{INTERPRETER}::test_formats",
)
add(
    "TIP compares heads without their softmax",
    'level = tl.where(is_head, tl.maximum(_log_sum(s_top, s_total, NATIVE), LOWEST), float("inf"))',
    'level = tl.where(is_head, 0.0, float("inf"))',
    f"{INTERPRETER}::test_options",
)
add(
    "bounds are those of the first sequence",
    "first = tl.load(bounds + b * stride_bounds)",
    "first = tl.load(bounds)",
    f"{INTERPRETER}::test_masks",
)

add(
    "what lies just below the lowest bin is kept and not counted",
    "code = (tl.maximum(bin_of(key, origin, per_width), -1.0) + 2.0).to(tl.int32)",
    "code = tl.maximum(bin_of(key, origin, per_width), -1.0).to(tl.int32) + 2\n"
    "                counted = counted & (bin_of(key, origin, per_width) >= 0.0)",
    f"{INTERPRETER}::test_a_threshold_in_the_lowest_bin",
)
add(
    "a thread's tokens are neighbours",
    "        lane = lane // 32 * 64 + lane % 32\n",
    "        lane = lane * 2\n",
    f"{INTERPRETER}::test_fragments",
)
add(
    "the window stays where the threshold was",
    "return level + slope * growth - BELOW * width,",
    "return level - BELOW * width,",
    f"{INTERPRETER}::test_thresholds_follow_the_size_of_the_query",
)
add(
    "a slope that is no number is used",
    "slope = tl.where((guess > -1e3) & (guess < 1e3), guess, slope)",
    "slope = guess",
    f"{INTERPRETER}::test_whatever_the_hint_holds",
)
add(
    "a query may have grown by anything",
    "(size - last > -2.0) & (size - last < 2.0)",
    "size > -1e3",
    f"{INTERPRETER}::test_a_search_halves_the_slope",
)

add = breaks("triton_kernels/fragments.py", INTERPRETER)
add(
    "heads of a pair are exchanged",
    "+ column % 2 * WORDS",
    "+ (1 - column % 2) * WORDS",
    f"{INTERPRETER}::test_fragments",
)
add(
    "all pieces are of the row's first token",
    "own = column // 2 == (n * 4 * BYTES + place) // WIDTH",
    "own = column // 2 == place // WIDTH",
    f"{INTERPRETER}::test_fragments",
)

add = breaks("triton_kernels/query.py", INTERPRETER)
add(
    "query heads are numbered across groups",
    "q_rows = q + b * stride_qb + (h * G + g[:, None]) * stride_qh",
    "q_rows = q + b * stride_qb + (g[:, None] * HKV + h) * stride_qh",
    f"{INTERPRETER}::test_formats",
)
add(
    "the largest of half a query scales it",
    "largest = tl.maximum(largest, tl.abs(hi))",
    "pass",
    f"{INTERPRETER}::test_formats",
    f"{INTERPRETER}::test_masks",
)
add(
    "half a query tells its size",
    "square += hi * hi",
    "pass",
    f"{INTERPRETER}::test_thresholds_follow_the_size_of_the_query",
)
add(
    "rows are not refreshed",
    "if HAS_SLOTS and tl.program_id(1) == 1:",
    "if HAS_SLOTS and tl.program_id(1) == 2:",
    f"{INTERPRETER}::test_rows_are_refreshed_before_they_are_scored",
)

add = breaks("triton_kernels/attend.py", INTERPRETER)
add(
    "the threshold itself is not kept",
    "keep = (x >= hi_level) | (",
    "keep = (x > hi_level) | (",
    f"{INTERPRETER}::test_keys_that_are_neighbouring_numbers",
)
add(
    "a bin may hold any number of tokens",
    "by_bin = everything | ((bin >= 0) & (n_bin <= n_fac + n_fac * 3 // 25))",
    "by_bin = everything | (bin >= 0)",
    f"{INTERPRETER}::test_whatever_the_hint_holds",
)
add(
    "a level's count is that of the level below",
    "level_2, tl.sum(n_2, axis=0), want)",
    "level_2, tl.sum(n_1, axis=0), want)",
    f"{INTERPRETER}::test_search_finds_the_best",
)
add(
    "bins double where the threshold has moved",
    "(moved > 8) & (cell * 24 <= n_fac), 1.5,",
    "(moved > 8) & (cell * 24 <= n_fac), 2.0,",
    f"{WINDOW}::test_the_replay_has_the_kernels_rule",
)
add(
    "what a query's growth did to the threshold is learned backwards",
    "return slope + 0.25 * growth",
    "return slope - 0.25 * growth",
    f"{INTERPRETER}::test_thresholds_follow_the_size_of_the_query",
    f"{WINDOW}::test_the_replay_has_the_kernels_rule",
)
add(
    "a step's size is not kept for the next",
    "tl.store(hint + 3, tl.load(window + 2))",
    "tl.store(hint + 3, 0.0)",
    f"{INTERPRETER}::test_thresholds_follow_the_size_of_the_query",
)
add(
    "a slope outlives all searches",
    "tl.where(inside_window, taught, slope), 0.5 * slope)",
    "tl.where(inside_window, taught, slope), slope)",
    f"{INTERPRETER}::test_a_search_halves_the_slope",
    f"{INTERPRETER}::test_whatever_the_hint_holds_is_forgotten",
)
add(
    "all equal keys are needed",
    "need = want - n_hi",
    "need = want",
    f"{INTERPRETER}::test_equal_keys_are_told_apart_by_index",
)
add(
    "the merge forgets the sink",
    "        total += tl.exp2(sink - top)",
    "        pass",
    f"{INTERPRETER}::test_options",
    f"{INTERPRETER}::test_dense",
)
add(
    "an additive mask only hides",
    "bias = bias + tl.where(ok, m.to(tl.float32), 0.0) * 1.4426950408889634",
    "pass",
    f"{INTERPRETER}::test_masks",
)
add(
    "the second block of a wide head is left out",
    '        s = tl.dot(q2, tl.trans(k2), acc=s, input_precision="ieee")',
    "        pass",
    f"{INTERPRETER}::test_options",
)
add(
    "an empty part spreads NaN",
    'safe = tl.where(top == -float("inf"), 0.0, top)\n    p =',
    "safe = top\n    p =",
    f"{INTERPRETER}::test_dense",
)
add(
    "the shares of a row are merged without their weights",
    "o = tl.sum(acc * weight[:, None], axis=0)",
    "o = tl.sum(acc, axis=0)",
    f"{INTERPRETER}::test_dense",
)

add(
    "offsets of kept tokens are int32",
    "chosen = tl.load(kept + n0 + lane, mask=inside, other=0).to(tl.int64)",
    "chosen = tl.load(kept + n0 + lane, mask=inside, other=0)",
    f"{INTERPRETER}::test_offsets_beyond_two_to_the_31",
)

add(
    "the first query token's threshold is the next step's guess",
    "row // HKV % TOKENS == TOKENS - 1",
    "row // HKV % TOKENS == 0",
    f"{INTERPRETER}::test_several_query_tokens_select_each_for_itself",
)

add(
    "a window of several tokens begins at the highest threshold",
    "    return lowest, tl.max(",
    "    return tl.max(tl.where(back < TOKENS, found, -1), axis=0), tl.max(",
    f"{INTERPRETER}::test_several_query_tokens_select_each_for_itself",
)

add = breaks("triton_kernels/sparse_decode.py", INTERPRETER)
add(
    "a hint may have any shape",
    "self.hint.shape != state or ",
    "",
    f"{INTERPRETER}::test_a_hint_of_another_kind_is_refused",
)

add = breaks("triton_kernels/dense_decode.py", INTERPRETER)
add(
    "the dense kernel begins at slot 0",
    "begin = first + split * share",
    "begin = split * share",
    f"{INTERPRETER}::test_dense",
)
add(
    "the dense kernel's offsets are int32",
    "token = (n0 + lane).to(tl.int64)",
    "token = n0 + lane",
    f"{INTERPRETER}::test_offsets_beyond_two_to_the_31",
)
add(
    "rows are not refreshed by the dense kernel",
    "if HAS_SLOTS and split == SPLITS:",
    "if HAS_SLOTS and split == SPLITS + 1:",
    f"{INTERPRETER}::test_rows_are_refreshed_where_the_budget_holds_all",
)

add = breaks("triton_kernels/pack.py", INTERPRETER)
add(
    "a negative slot is no slot",
    "token = tl.where(token < 0, token + L, token)  # as indexing counts",
    "pass",
    f"{INTERPRETER}::test_packed_bytes_are_the_references",
)
add(
    "the zero of codes is not stored",
    "zero = least.to(tl.float16)",
    "zero = (least * 0).to(tl.float16)",
    f"{INTERPRETER}::test_packed_bytes_are_the_references",
)
add(
    "codes round half away",
    "return (x + 12582912.0) - 12582912.0",
    "return tl.floor(x + 0.5)",
    f"{INTERPRETER}::test_packed_bytes_are_the_references",
)

add(
    "a query token packs one row alone",
    "for number in range(first, n_slots, STEP):",
    "for number in range(first, first + 1):",
    f"{INTERPRETER}::test_several_rows_are_packed_before_they_are_scored",
)

add = breaks("triton_kernels/bounds.py", INTERPRETER)
add(
    "the bounds' end is the last token itself",
    "tl.where(ok, t + 1, 0)",
    "tl.where(ok, t, 0)",
    f"{INTERPRETER}::test_mask_bounds",
)
add(
    "the lowest value of fp16 hides nothing",
    "return m > -65504.0",
    "return m >= -65504.0",
    f"{INTERPRETER}::test_mask_bounds",
)

LAUNCHED = "kernels/test_compile.py::test_kernels_are_launched_on_the_device_of_their_tensors"
for file, tensor in {"sparse_decode": "q", "dense_decode": "q", "pack": "k", "bounds": "mask"}.items():
    add = breaks(f"triton_kernels/{file}.py", LAUNCHED)
    add("kernels go to the device that is current", f"with on_device({tensor}):", f"if on_device({tensor}):")

add = breaks("triton_kernels/launch.py", INTERPRETER)
add(
    "a mask for each head is one for all",
    "(strides[0], strides[1], strides[3]), strides[1] != 0)",
    "(strides[0], strides[1], strides[3]), False)",
    f"{INTERPRETER}::test_masks",
)

# ---- profiles ---------------------------------------------------------------------------------------------------------

add = breaks("profiles/schema.py", SCHEMA)
add("a newer schema is read", "if found > SCHEMA_VERSION:", "if False:")
add(
    "a rank gets the first heads' norms",
    "self.norm[group * kv_heads.start : group * kv_heads.stop]",
    "self.norm[: group * len(kv_heads)]",
)
add("magnitudes are not compared", "if not math.isclose(", "if False and not math.isclose(")
add("numbers of KV heads are not compared", '    same("num_kv_heads", profile.num_kv_heads, num_kv_heads)\n', "")
add("an FC may count twice", "unsorted = fcs[:, 1:] <= fcs[:, :-1]", "unsorted = fcs[:, 1:] < fcs[:, :-1]")
add("infinities are numbers", "bad = ~value.isfinite()", "bad = value != value")
add("forced tokens may exceed the budget", "if self.n_sink + self.n_recent > self.n_fac:", "if False:")
add("FCs may share a dim", "if dim in owner:", "if False:")
add("a layer may be listed twice", "if layer.layer in first:", "if False:")

add = breaks("profiles/files.py", FILES)
add("a key may stand twice in a file", "if len(found) < len(items):", "if False:")
add("files of any size are read", "if facts.st_size > limit:", "if False:")

add = breaks("fasa_compile/fingerprint.py", FINGERPRINT)
add(
    "a write to a weight leaves its stamp",
    "-1 if p.is_inference() else p._version",
    "0",
    "end_to_end/test_later_changes.py::test_a_profile_of_the_weights_before_is_an_error_at_the_next_prompt",
)
add("values do not count", "            values.update(sample)", "            pass")
add("names and shapes do not count", "return a[:2] == b[:2] and (", "return (")

# ---- calibration ------------------------------------------------------------------------------------------------------

add = breaks("fasa_compile/calibration.py", TRIALS_MISC, HAZARDS)
add(
    "calibration leaves a model's forward changed",
    "        if own is not None:\n            model.forward = own",
    "        if own is not None:\n            pass",
    f"{FAULTS}::test_calibration_that_is_interrupted",
)
add(
    "padding is calibrated on",
    "    if mask is None:\n        return q, k[:, :, :L]",
    "    if True:\n        return q, k[:, :, :L]",
    f"{GAPS}::test_padding_is_not_calibrated_on",
)
add(
    "all rows have the first one's mask",
    "mask[row if mask.shape[0] > 1 else 0]",
    "mask[0]",
    f"{GAPS}::test_padding_is_not_calibrated_on",
)
add(
    "layers that could not be read are forgotten",
    '{"uncalibrated": unread}',
    "{}",
    f"{GAPS}::test_a_layer_that_calibration_could_not_read_stays_dense",
)
add(
    "a text that did not reach a layer is no error",
    "                if unseen:\n",
    "                if False:\n",
    f"{TRIALS_MISC}::test_a_layer_that_calibration_did_not_reach_is_an_error_or_dense",
)

add = breaks("fasa_compile/calibration.py", "quality/test_layer_budgets.py")
add("no layer is found to be dense", "dense_above is not None and row[at] > dense_above", "False")
add("dense layers take part in sharing", "if not layer.dense]", "if layer.n_fac is None]")

add = breaks("fasa_compile/calibration_stats.py", STATS)
add("mass is counted over all keys", "held.gather(-1, keep - 1)", "held[:, -1:].expand_as(keep)")
add("moments are merged without the means' distance", " + delta.square() * (self.n * other.n / n),", ",")
add(
    "the spread is upside down",
    "(_floored(total.key_variance().sqrt()) / _floored(total.query_square().sqrt())).sqrt()",
    "(_floored(total.query_square().sqrt()) / _floored(total.key_variance().sqrt())).sqrt()",
)
add("the norm grows with the context", "scores.logsumexp(-1).double() - seen", "scores.logsumexp(-1).double()")
add("the centre is zero", "centre = self.key_mean().float().cpu()\n", "centre = self.key_mean().float().cpu() * 0\n")
add(
    "a soft cap is applied to centred scores",
    "torch.tanh((scores + shift) / sample.softcap)",
    "torch.tanh(scores / sample.softcap)",
)
add(
    "groups of heads are strided",
    "q = sample.q[h * group : (h + 1) * group].double()",
    "q = sample.q[h :: len(sample.k)].double()",
)
add(
    "the worst FCs are chosen",
    "return score.sort(dim=1, descending=True, stable=True).indices",
    "return score.sort(dim=1, stable=True).indices",
)

add = breaks("fasa_compile/calibration_budgets.py", BUDGETS)
add(
    "the layer that gains least gets more",
    "given[max(open_to_more, key=gain)] += STEP",
    "given[min(open_to_more, key=gain)] += STEP",
)
add("a pyramid falls by more than its mean", "fall = 2 * (mean - last)", "fall = 3 * (mean - last)")
add("no gain is seen behind a plateau", "AHEAD = (1, 2, 4, 8)", "AHEAD = (1,)")

add = breaks("fasa_compile/cost.py", COST)
add("values cost nothing to read", "_row = (_d + _dv) * _item", "_row = _d * _item")
add("packing anew costs nothing", "            gain -= c.dense_rate * bytes_of(PACK_BYTES) / shape.L\n", "")
add("a step has one launch less", "SPARSE_LAUNCHES = sympy.Integer(4)", "SPARSE_LAUNCHES = sympy.Integer(3)")

add = breaks("fasa_compile/counters.py", REPORT)
add(
    "counters of declined sites outlive a reset",
    "        _declined.clear()\n",
    "",
    f"{GAPS}::test_double_precision_stays_dense",
)

add = breaks("fasa_compile/local_weights.py", "internals/test_local_weights.py")
add("weights that are trained enter as plain tensors", "{} if torch.is_grad_enabled() else ", "")
add("a weight's shards are taken for the whole", "local, mesh, placements,", "local, mesh, None,")

PEERS = "internals/test_peer_memory.py"
add = breaks("fasa_compile/peer_memory.py", PEERS)
add("tensors on the host go through the GPUs' memory", "return x.is_cuda", "return True")
add("collectives of any size are replaced", "0 < size <= MOST_BYTES", "0 < size")
add("the largest of all is summed", 'node.args[1] != "sum"', "False")
add("any number of processes exchange", "_ranks(str(node.args[2])) <= MOST_RANKS", "True")
add("a pass of the user's is dropped", "            theirs(graph)\n", "            pass\n")
add("the node says what a wait's arguments were", 'for name in ("val", "stack_trace")', "for name in wait.meta")

add = breaks("triton_kernels/peers.py", f"{INTERPRETER}::test_exchanges_through_peers_memory")
add("every exchange uses the same half", "(number & 1).to(tl.int64)", "(number * 0).to(tl.int64)")
add(
    "a process's numbers go where its neighbour's belong",
    "at + RANK * CAPACITY, labelled",
    "at + (1 - RANK) * CAPACITY, labelled",
)
add("the high half of a word is lost", "(word >> 16).to(tl.int16).to(DTYPE", "word.to(tl.int16).to(DTYPE")
add("exchanges are not counted", "tl.store(numbers + program, number)", "tl.store(numbers + program, number - 1)")
add(
    "a group's memory outlives it",
    " or _workspaces[group][0] is not processes",
    "",
    f"{PEERS}::test_a_workspace_belongs_to_its_group",
)
add("too much is exchanged", "not 0 < size <= MOST_BYTES or", "not 0 < size or", f"{PEERS}::test_what_is_wrong_is_said")

add = breaks("fasa_compile/placement.py", f"{ECOSYSTEM}::test_a_device_map_over_several_devices")
add("hooks are put on twice", "if not any(hasattr", "if False and not any(hasattr")
add("weights on the host are overlooked", "if p.is_meta})", "if False})")

add = breaks("fasa_compile/match.py", f"{ECOSYSTEM}::test_a_device_map_over_several_devices")
add("a forward that was set has a name of its own", '        (".forward.__self__", ""),\n', "")
