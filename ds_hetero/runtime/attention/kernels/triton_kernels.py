"""Flash attention of a block, forward and backward, as Triton kernels; launched by `triton_native`.

Every program has one block of queries (of keys, in the kernel for dK and dV) and loops along the band: first over the
blocks that are completely visible and need no mask, then over those that an edge of the band or of a tensor crosses.
The first loop runs hundreds of times where the second runs once or twice; without EDGES it is the only one. Blocks
outside the band are skipped. Scores are multiplied by log2(e), so that exp2 can be used:

                       score_scale          cap_scale
    without soft cap   scale * log2(e)      0
    with soft cap      scale / softcap      softcap * log2(e)

A launch computes one block, or with MANY all blocks in packed tensors. Then TABLE has seven integers for each program,
see `triton_native`: its first query (or key) in its block, the start and number of the block's queries and keys, and
the band.

All tensors are read as [B, heads, tokens, D] with D consecutive, less than 2**24 elements between tokens; lse and
delta are contiguous [B, H, Q]. Everything is accumulated in float32.

Source: FlashAttention-2 (arXiv:2307.08691), algorithms 1 and 2.
"""

# Triton reads the source of these functions itself, and has no type annotations.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

_SIZES = [
    "num_rows",
    "num_queries",
    "num_keys",
    "lo",
    "hi",
]  # vary from call to call: no special build for 1 or a multiple of 16


@triton.jit
def _rows(base, first_token, stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pointers [BLOCK, BLOCK_D] to the rows from ``first_token`` on.

    The way to the first row has 64 bits and is one number; offsets within the block have the 32 bits of ``stride``.
    """
    rows, dims = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    return base + first_token.to(tl.int64) * stride + (rows[:, None] * stride + dims[None, :])


@triton.jit
def _is_element(
    first_token, num_tokens, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EDGE: tl.constexpr
):
    """Mask of a block [BLOCK, BLOCK_D]: False beyond HEAD_DIM and, on an edge, beyond the last token."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    if EDGE:
        tokens = first_token + tl.arange(0, BLOCK)[:, None]
        return (tokens < num_tokens) & (dims < HEAD_DIM)
    elif BLOCK_D != HEAD_DIM:  # noqa: RET505 - Triton compiles one branch, and wants it to end the function
        return dims < HEAD_DIM
    else:
        return None


@triton.jit
def _load(
    base, first_token, stride, num_tokens,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Load [BLOCK, BLOCK_D]; zero where `_is_element` is False."""
    mask = _is_element(first_token, num_tokens, BLOCK, HEAD_DIM, BLOCK_D, EDGE)
    pointers = _rows(base, first_token, stride, BLOCK, BLOCK_D)
    if mask is None:
        return tl.load(pointers)
    else:  # noqa: RET505 - as above
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _store(
    base, values, first_token, stride, num_tokens,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Store [BLOCK, BLOCK_D] where `_is_element` is True."""
    mask = _is_element(first_token, num_tokens, BLOCK, HEAD_DIM, BLOCK_D, EDGE)
    tl.store(_rows(base, first_token, stride, BLOCK, BLOCK_D), values, mask=mask)


@triton.jit
def _load_row(base, tokens, num_tokens, EDGE: tl.constexpr):
    """Load a number for each token; zero beyond the last one on an edge."""
    if EDGE:
        return tl.load(base + tokens, mask=tokens < num_tokens, other=0.0)
    else:  # noqa: RET505 - as above
        return tl.load(base + tokens)


@triton.jit
def _scores(a, b, score_scale, cap_scale, SOFTCAP: tl.constexpr):
    """Return the scores of the rows of ``a`` against the rows of ``b``, times log2(e)."""
    scores = tl.dot(a, tl.trans(b), input_precision="ieee") * score_scale
    if SOFTCAP:
        scores = cap_scale * (2 * tl.sigmoid(2 * scores) - 1)  # tanh
    return scores


@triton.jit
def _visible(queries, keys, num_queries, num_keys, lo, hi):
    """Whether a key is in the band of a query, for indices that broadcast against each other."""
    diagonal = keys - queries
    return (diagonal >= lo) & (diagonal <= hi) & (queries < num_queries) & (keys < num_keys)


@triton.jit
def _key_bounds(first_query, num_queries, num_keys, lo, hi, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the keys that a block of queries loops over: (start, start of the visible blocks, their stop, stop)."""
    last_query = tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    start = tl.maximum(first_query + lo, 0) // BLOCK_K * BLOCK_K
    stop = tl.minimum(last_query + hi + 1, num_keys)
    unmasked_start = tl.cdiv(tl.maximum(last_query + lo, 0), BLOCK_K) * BLOCK_K
    unmasked_stop = tl.minimum(first_query + hi + 1, num_keys) // BLOCK_K * BLOCK_K
    unmasked_start = tl.minimum(unmasked_start, stop)
    return start, unmasked_start, tl.maximum(unmasked_start, unmasked_stop), stop


@triton.jit
def _query_bounds(first_key, num_queries, num_keys, lo, hi, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the queries that a block of keys loops over: (start, start of the visible blocks, their stop, stop)."""
    last_key = tl.minimum(first_key + BLOCK_K, num_keys) - 1
    start = tl.maximum(first_key - hi, 0) // BLOCK_Q * BLOCK_Q
    stop = tl.minimum(last_key - lo + 1, num_queries)
    unmasked_start = tl.cdiv(tl.maximum(last_key - hi, 0), BLOCK_Q) * BLOCK_Q
    unmasked_stop = tl.minimum(first_key - lo + 1, num_queries) // BLOCK_Q * BLOCK_Q
    unmasked_start = tl.minimum(unmasked_start, stop)
    return start, unmasked_start, tl.maximum(unmasked_start, unmasked_stop), stop


@triton.jit
def _num_steps(bounds, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    """Return how many blocks one of the two loops has: the visible ones, or those of both edges."""
    start, visible_start, visible_stop, stop = bounds
    if EDGE:
        return tl.cdiv(visible_start - start, BLOCK) + tl.cdiv(stop - visible_stop, BLOCK)
    else:  # noqa: RET505 - as above
        return (visible_stop - visible_start) // BLOCK


@triton.jit
def _first_of_step(step, bounds, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    """Return the first token of a loop's block; on the edges, blocks before the visible ones come first.

    ``visible_start`` is cut to ``stop`` where nothing is visible, and no multiple of BLOCK then; no edge follows there.
    """
    start, visible_start, visible_stop, _ = bounds
    if EDGE:
        first = start + step * BLOCK
        return tl.where(first < visible_start, first, first - visible_start + visible_stop)
    else:  # noqa: RET505 - as above
        return visible_start + step * BLOCK


@triton.jit
def _work_of_program(TABLE, BLOCK: tl.constexpr, num_queries, num_keys, lo, hi, MANY: tl.constexpr):
    """Return this program's work: its first token in its block, and the block's sizes and band.

    These are the block's first query, first key, number of queries, number of keys, and lo and hi of its band.
    """
    if MANY:
        entry = TABLE + tl.program_id(0) * 7
        q_start, k_start = tl.load(entry + 1).to(tl.int64), tl.load(entry + 3).to(tl.int64)
        first, num_queries, num_keys = tl.load(entry), tl.load(entry + 2), tl.load(entry + 4)
        return first, q_start, k_start, num_queries, num_keys, tl.load(entry + 5), tl.load(entry + 6)
    else:  # noqa: RET505 - as above
        return tl.program_id(0) * BLOCK, 0, 0, num_queries, num_keys, lo, hi


@triton.jit(do_not_specialize=_SIZES)
def forward_kernel(
    Q, K, V, OUT, LSE, TABLE,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kh, stride_k, stride_vb, stride_vh, stride_v,
    stride_ob, stride_oh, stride_o,
    num_heads, group, num_rows, num_queries, num_keys, lo, hi, score_scale, cap_scale,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr,
    MANY: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Compute OUT [B, H, Q, D] and LSE [B, H, Q] of a block, on a grid (blocks of queries, B * H)."""
    work = _work_of_program(TABLE, BLOCK_Q, num_queries, num_keys, lo, hi, MANY)
    first_query, q_start, k_start, num_queries, num_keys, lo, hi = work
    sample = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    Q += sample * stride_qb + head * stride_qh + q_start * stride_q
    K += sample * stride_kb + head // group * stride_kh + k_start * stride_k
    V += sample * stride_vb + head // group * stride_vh + k_start * stride_v
    queries = first_query + tl.arange(0, BLOCK_Q)
    q = _load(Q, first_query, stride_q, num_queries, BLOCK_Q, HEAD_DIM, BLOCK_D, EDGES)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    top = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    bounds = _key_bounds(first_query, num_queries, num_keys, lo, hi, BLOCK_Q, BLOCK_K)
    for edge in tl.static_range(1 + EDGES):
        for step in range(_num_steps(bounds, BLOCK_K, edge)):
            first_key = _first_of_step(step, bounds, BLOCK_K, edge)
            k = _load(K, first_key, stride_k, num_keys, BLOCK_K, HEAD_DIM, BLOCK_D, edge)
            scores = _scores(q, k, score_scale, cap_scale, SOFTCAP)
            if edge:
                keys = first_key + tl.arange(0, BLOCK_K)
                visible = _visible(queries[:, None], keys[None, :], num_queries, num_keys, lo, hi)
                scores = tl.where(visible, scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(new_top == -float("inf"), 0.0, new_top)  # a query that has seen nothing yet
            probs = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(top - base)
            v = _load(V, first_key, stride_v, num_keys, BLOCK_K, HEAD_DIM, BLOCK_D, edge)
            acc = acc * shrink[:, None] + tl.dot(probs.to(v.dtype), v, input_precision="ieee")
            total = total * shrink + tl.sum(probs, 1)
            top = new_top
    if EDGES:
        total = tl.where(queries < num_queries, total, 1.0)
    OUT += sample * stride_ob + head * stride_oh + q_start * stride_o
    values = (acc / total[:, None]).to(OUT.dtype.element_ty)
    _store(OUT, values, first_query, stride_o, num_queries, BLOCK_Q, HEAD_DIM, BLOCK_D, EDGES)
    lse = (top + tl.log2(total)) * 0.6931471805599453
    tl.store(LSE + tl.program_id(1).to(tl.int64) * num_rows + q_start + queries, lse, mask=queries < num_queries)


@triton.jit(do_not_specialize=["num_queries"])
def delta_kernel(
    OUT, DOUT, DELTA,
    stride_ob, stride_oh, stride_o, stride_db, stride_dh, stride_d,
    num_heads, num_queries,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute DELTA [B, H, Q] = rowsum(out * dout), on a grid (blocks of queries, B * H)."""
    sample = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    first_query = tl.program_id(0) * BLOCK_Q
    queries = first_query + tl.arange(0, BLOCK_Q)
    OUT += sample * stride_ob + head * stride_oh
    DOUT += sample * stride_db + head * stride_dh
    out = _load(OUT, first_query, stride_o, num_queries, BLOCK_Q, HEAD_DIM, BLOCK_D, True)
    dout = _load(DOUT, first_query, stride_d, num_queries, BLOCK_Q, HEAD_DIM, BLOCK_D, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(DELTA + tl.program_id(1).to(tl.int64) * num_queries + queries, delta, mask=queries < num_queries)


@triton.jit(do_not_specialize=_SIZES)
def dq_kernel(
    Q, K, V, DOUT, LSE, DELTA, DQ, TABLE,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kh, stride_k, stride_vb, stride_vh, stride_v,
    stride_db, stride_dh, stride_d, stride_gb, stride_gh, stride_g,
    num_heads, group, num_rows, num_queries, num_keys, lo, hi, score_scale, cap_scale, scale,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr,
    MANY: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Compute DQ [B, H, Q, D] in float32, on a grid (blocks of queries, B * H)."""
    work = _work_of_program(TABLE, BLOCK_Q, num_queries, num_keys, lo, hi, MANY)
    first_query, q_start, k_start, num_queries, num_keys, lo, hi = work
    sample = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    Q += sample * stride_qb + head * stride_qh + q_start * stride_q
    DOUT += sample * stride_db + head * stride_dh + q_start * stride_d
    K += sample * stride_kb + head // group * stride_kh + k_start * stride_k
    V += sample * stride_vb + head // group * stride_vh + k_start * stride_v
    queries = first_query + tl.arange(0, BLOCK_Q)
    row = tl.program_id(1).to(tl.int64) * num_rows + q_start
    lse = _load_row(LSE + row, queries, num_queries, EDGES) * 1.4426950408889634
    delta = _load_row(DELTA + row, queries, num_queries, EDGES)
    q = _load(Q, first_query, stride_q, num_queries, BLOCK_Q, HEAD_DIM, BLOCK_D, EDGES)
    dout = _load(DOUT, first_query, stride_d, num_queries, BLOCK_Q, HEAD_DIM, BLOCK_D, EDGES)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    bounds = _key_bounds(first_query, num_queries, num_keys, lo, hi, BLOCK_Q, BLOCK_K)
    for edge in tl.static_range(1 + EDGES):
        for step in range(_num_steps(bounds, BLOCK_K, edge)):
            first_key = _first_of_step(step, bounds, BLOCK_K, edge)
            k = _load(K, first_key, stride_k, num_keys, BLOCK_K, HEAD_DIM, BLOCK_D, edge)
            v = _load(V, first_key, stride_v, num_keys, BLOCK_K, HEAD_DIM, BLOCK_D, edge)
            scores = _scores(q, k, score_scale, cap_scale, SOFTCAP)
            probs = tl.exp2(scores - lse[:, None])
            if edge:
                keys = first_key + tl.arange(0, BLOCK_K)
                visible = _visible(queries[:, None], keys[None, :], num_queries, num_keys, lo, hi)
                probs = tl.where(visible, probs, 0.0)
            dscores = probs * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])
            if SOFTCAP:
                dscores *= 1 - (scores / cap_scale) * (scores / cap_scale)
            dq += tl.dot(dscores.to(k.dtype), k, input_precision="ieee")
    DQ += sample * stride_gb + head * stride_gh + q_start * stride_g
    _store(DQ, dq * scale, first_query, stride_g, num_queries, BLOCK_Q, HEAD_DIM, BLOCK_D, EDGES)


@triton.jit(do_not_specialize=_SIZES)
def dkv_kernel(
    Q, K, V, DOUT, LSE, DELTA, DK, DV, TABLE,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kh, stride_k, stride_vb, stride_vh, stride_v,
    stride_db, stride_dh, stride_d, stride_gb, stride_gh, stride_g,
    num_kv_heads, group, num_rows, num_queries, num_keys, lo, hi, score_scale, cap_scale, scale,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr,
    MANY: tl.constexpr, EDGES: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Compute DK and DV [B, G, K, D] in float32 with equal strides, on a grid (blocks of keys, B * G, 1 + APART).

    With APART the first half of the programs sums DK, the other half DV. Both compute the scores, so that there are
    five products in place of four, but a program has one sum of BLOCK_K * BLOCK_D numbers in its registers, not two.
    """
    work = _work_of_program(TABLE, BLOCK_K, num_queries, num_keys, lo, hi, MANY)
    first_key, q_start, k_start, num_queries, num_keys, lo, hi = work
    sample = (tl.program_id(1) // num_kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % num_kv_heads).to(tl.int64)
    Q += sample * stride_qb + q_start * stride_q
    DOUT += sample * stride_db + q_start * stride_d
    K += sample * stride_kb + kv_head * stride_kh + k_start * stride_k
    V += sample * stride_vb + kv_head * stride_vh + k_start * stride_v
    DK += sample * stride_gb + kv_head * stride_gh + k_start * stride_g
    DV += sample * stride_gb + kv_head * stride_gh + k_start * stride_g
    first_head, row = kv_head * group, sample * num_kv_heads * group * num_rows + q_start
    LSE += row
    DELTA += row
    tensors = (Q, K, V, DOUT, LSE, DELTA, DK, DV)
    strides = (stride_qh, stride_q, stride_k, stride_v, stride_dh, stride_d, stride_g)
    heads = (first_head, group, num_rows)
    block = (first_key, num_queries, num_keys, lo, hi)
    factors = (score_scale, cap_scale, scale)
    if APART:
        if tl.program_id(2) == 0:
            _sum_over_queries(
                tensors, strides, heads, block, factors, HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, SOFTCAP, EDGES,
                SUMS_DK=True, SUMS_DV=False,
            )  # fmt: skip
        else:
            _sum_over_queries(
                tensors, strides, heads, block, factors, HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, SOFTCAP, EDGES,
                SUMS_DK=False, SUMS_DV=True,
            )  # fmt: skip
    else:
        _sum_over_queries(
            tensors, strides, heads, block, factors, HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, SOFTCAP, EDGES,
            SUMS_DK=True, SUMS_DV=True,
        )  # fmt: skip


@triton.jit
def _sum_over_queries(
    tensors, strides, heads, block, factors,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr,
    EDGES: tl.constexpr, SUMS_DK: tl.constexpr, SUMS_DV: tl.constexpr,
):  # fmt: skip
    """Sum DK, DV or both of a block of keys over the queries of all heads that share the keys, and store the sums.

    Tensors of queries begin at head 0, those of keys at the KV head. Scores and probabilities are transposed here,
    [keys, queries], as the left operands of both products.
    """
    Q, K, V, DOUT, LSE, DELTA, DK, DV = tensors
    stride_qh, stride_q, stride_k, stride_v, stride_dh, stride_d, stride_g = strides
    first_head, group, num_rows = heads
    first_key, num_queries, num_keys, lo, hi = block
    score_scale, cap_scale, scale = factors
    keys = first_key + tl.arange(0, BLOCK_K)
    k = _load(K, first_key, stride_k, num_keys, BLOCK_K, HEAD_DIM, BLOCK_D, EDGES)
    if SUMS_DK:
        v = _load(V, first_key, stride_v, num_keys, BLOCK_K, HEAD_DIM, BLOCK_D, EDGES)
        dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    if SUMS_DV:
        dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    bounds = _query_bounds(first_key, num_queries, num_keys, lo, hi, BLOCK_Q, BLOCK_K)
    for head in range(first_head, first_head + group):  # of 64 bits, as is what it is multiplied by
        Q_h, DOUT_h, row = Q + head * stride_qh, DOUT + head * stride_dh, head * num_rows
        for edge in tl.static_range(1 + EDGES):
            for step in range(_num_steps(bounds, BLOCK_Q, edge)):
                first_query = _first_of_step(step, bounds, BLOCK_Q, edge)
                queries = first_query + tl.arange(0, BLOCK_Q)
                q = _load(Q_h, first_query, stride_q, num_queries, BLOCK_Q, HEAD_DIM, BLOCK_D, edge)
                dout = _load(DOUT_h, first_query, stride_d, num_queries, BLOCK_Q, HEAD_DIM, BLOCK_D, edge)
                lse = _load_row(LSE + row, queries, num_queries, edge) * 1.4426950408889634
                scores = _scores(k, q, score_scale, cap_scale, SOFTCAP)
                probs = tl.exp2(scores - lse[None, :])
                if edge:
                    visible = _visible(queries[None, :], keys[:, None], num_queries, num_keys, lo, hi)
                    probs = tl.where(visible, probs, 0.0)
                if SUMS_DV:
                    dv += tl.dot(probs.to(dout.dtype), dout, input_precision="ieee")
                if SUMS_DK:
                    delta = _load_row(DELTA + row, queries, num_queries, edge)
                    dscores = probs * (tl.dot(v, tl.trans(dout), input_precision="ieee") - delta[None, :])
                    if SOFTCAP:
                        dscores *= 1 - (scores / cap_scale) * (scores / cap_scale)
                    dk += tl.dot(dscores.to(q.dtype), q, input_precision="ieee")
    if SUMS_DK:
        _store(DK, dk * scale, first_key, stride_g, num_keys, BLOCK_K, HEAD_DIM, BLOCK_D, EDGES)
    if SUMS_DV:
        _store(DV, dv, first_key, stride_g, num_keys, BLOCK_K, HEAD_DIM, BLOCK_D, EDGES)
