"""The form for few tokens (1..64) of the input-pruned product: bound by the bytes of the weights.

One program reads `BLOCK_N` rows of w, of each the channels of those groups that some token needs:

    program id -> BLOCK_N outputs; all tokens; loop over K, BLOCK_K channels at a time
    one token:     sum over k of w[BLOCK_N, k] * h[k]     on the ordinary units, from registers
    more tokens:   w[BLOCK_N, k] . h[tokens, k]^T         on the tensor cores, weights as the
                                                          long operand
A group that nobody needs is masked off in the loads: its weights are not read.
"""

# pyrefly: ignore-errors
# (Triton types a compile-time value as its wrapper, and plain operators do not know it.)
import triton.language as tl

from pallas_kernels._common.jit import jit


@jit
def k_small_kernel(
    h,  # [M, K]
    w,  # [N, K]
    bias,  # [N], read if HAS_BIAS
    residual,  # [M, N], read if HAS_RESIDUAL
    mask,  # [M, GROUPS] bool
    M,
    out,  # [M, N]
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,  # 1, or M rounded up to 16, 32, 64
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at most G rounded up to a power of two, unless TOKENS is 1
    CHUNK: tl.constexpr,  # divides G and K; read if TOKENS is 1
):
    """Compute one block of outputs of the drawing above."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_ok = columns < N
    channel = tl.minimum(columns, N - 1).to(tl.int64)
    if TOKENS == 1:
        # CHUNK channels lie in one group, and the mask is read once a chunk: a flag for every
        # channel would be more loads than the weights are. The next step's flags are under way
        # while this step's weights are.
        chunk = tl.arange(0, BLOCK_K // CHUNK) * CHUNK
        lane = tl.arange(0, CHUNK)
        acc = tl.zeros((BLOCK_N, BLOCK_K // CHUNK), tl.float32)
        on = tl.load(mask + chunk // G, mask=chunk < K, other=0).to(tl.int32) != 0
        for start in range(0, K, BLOCK_K):
            channels = (start + chunk)[:, None] + lane[None, :]
            a = tl.load(
                w + channel[:, None, None] * K + channels[None, :, :],
                mask=on[None, :, None],
                other=0.0,
            )
            b = tl.load(h + channels, mask=on[:, None], other=0.0)
            after = start + BLOCK_K + chunk
            on = tl.load(mask + after // G, mask=after < K, other=0).to(tl.int32) != 0
            acc += tl.sum(a.to(tl.float32) * b.to(tl.float32)[None, :, :], axis=2)
        result = tl.sum(acc, axis=1)
        if HAS_BIAS:
            result += tl.load(bias + columns, mask=column_ok, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            result += tl.load(residual + columns, mask=column_ok, other=0.0).to(tl.float32)
        tl.store(out + columns, result.to(out.dtype.element_ty), mask=column_ok)
    else:
        k = tl.arange(0, BLOCK_K)
        STEPS_A_GROUP: tl.constexpr = (G + BLOCK_K - 1) // BLOCK_K
        WORDS: tl.constexpr = (GROUPS + 31) // 32
        tokens = tl.arange(0, TOKENS)
        token_ok = tokens < M
        row = tl.where(token_ok, tokens, 0).to(tl.int64)
        # The whole mask in registers, 32 groups a word: a load that waits for the mask in the loop
        # would not be fetched ahead.
        bit = tl.arange(0, 32)
        on_words = ()
        needed_words = ()
        for word in tl.static_range(WORDS):
            some = word * 32 + bit
            on_bits = tl.load(
                mask + row[:, None] * GROUPS + some[None, :],
                mask=token_ok[:, None] & (some < GROUPS)[None, :],
                other=0,
            ).to(tl.int32)
            # Triton cannot read (*words, word).
            on_words = on_words + (tl.sum(on_bits << bit[None, :], axis=1),)  # noqa: RUF005
            needed_word = tl.sum(tl.max(on_bits, axis=0) << bit, axis=0)
            needed_words = needed_words + (needed_word,)  # noqa: RUF005
        result = tl.zeros((BLOCK_N, TOKENS), tl.float32)
        for step in range(0, GROUPS * STEPS_A_GROUP):
            group = step // STEPS_A_GROUP
            in_group = (step % STEPS_A_GROUP) * BLOCK_K
            on_word = on_words[0]
            in_word = needed_words[0]
            for word in tl.static_range(1, WORDS):
                on_word = tl.where(group // 32 == word, on_words[word], on_word)
                in_word = tl.where(group // 32 == word, needed_words[word], in_word)
            on = ((on_word >> (group % 32)) & 1) != 0
            needed = ((in_word >> (group % 32)) & 1) != 0
            channels = group * G + in_group + k
            k_ok = (in_group + k < G) & (channels < K)
            a = tl.load(
                w + channel[:, None] * K + channels[None, :],
                mask=(k_ok & needed)[None, :],
                other=0.0,
            )
            b = tl.load(
                h + row[None, :] * K + channels[:, None],
                mask=on[None, :] & k_ok[:, None],
                other=0.0,
            )
            result = tl.dot(a, b, result, input_precision=PRECISION)
        ok = column_ok[:, None] & token_ok[None, :]
        offsets = row[None, :] * N + columns[:, None]
        if HAS_BIAS:
            result += tl.load(bias + columns, mask=column_ok, other=0.0).to(tl.float32)[:, None]
        if HAS_RESIDUAL:
            result += tl.load(residual + offsets, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + offsets, result.to(out.dtype.element_ty), mask=ok)
