"""The compiled kernels of file merges.

A kernel makes one pass over a block of every input, in tiles that stay in cache.

Kernels repeat the torch functions in `mergekit_lite.methods` operation by operation, in the same
order, and round every product before it is added, so that both write the same bytes. Sums over a
whole tensor run in float64, in another order than in torch.

A block is ``raw`` (rows, columns): one row per input, the base last if there is one. It is uint16
for bfloat16 bit patterns, else float32. A result is written to ``out``, as uint16 (bfloat16) or
float32, and the kernel returns whether the result has NaN or infinity. ``work`` is scratch memory,
(K + 5, T) float32, whose rows each kernel names at its beginning. `native` runs the kernels.

Loops that must be vectorized are functions of one-dimensional arrays of equal length, because there
the compiler can prove that every index is in range.

Shape letters: K models, n elements of the block, T elements of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding
from numba import carray, cfunc, from_dtype, njit, types
from numba.extending import overload

from .tiles import CHOSEN, DRAW, EVERY, MIDDLE, TILE, TRIM, Kind

_GROUP = 16  # elements that one vector operation compares
_WORDS = TILE // 4  # random words per tile: each element uses 8 bits
_ZERO, _ONE = np.float32(0), np.float32(1)
_MINUS_ZERO = np.float32(-0.0)  # adding any number to it, even -0, returns that number
# a sum of weights below _SMALL counts as 0; sce never divides by less than _LEAST
_SMALL, _LEAST = np.float32(1e-8), np.float32(1e-6)
# the bits of a float32 without its sign, and the bit pattern of infinity
_SIZE, _INFINITE = (np.uint32(0x7FFFFFFF), np.uint32(0x7F800000))


def _kernel(function: Callable[..., object], **options: Any) -> Any:
    """Return a function that numba compiles on first use: a kernel, or a helper of kernels."""
    # numba's default error model checks each divisor for 0, which prevents vectorization
    return njit(error_model="numpy", **options)(function)


def _summing(function: Callable[..., object]) -> Callable[..., Any]:
    """Return a helper of kernels in which sums may be reordered, so that loops are vectorized."""
    return _kernel(function, fastmath={"reassoc"})


# One-dimensional loops


def _load(source, row):
    raise NotImplementedError


@overload(_load)
def _load_typed(source, row):
    if source.dtype == types.uint16:

        def bfloat16(source, row):
            # a bfloat16 is the upper half of the float32 of equal value
            bits = row.view(np.uint32)
            for i in range(bits.size):
                bits[i] = np.uint32(source[i]) << np.uint32(16)

        return bfloat16

    def float32(source, row):
        for i in range(row.size):
            row[i] = source[i]

    return float32


def _store(row, out):
    raise NotImplementedError


@overload(_store)
def _store_typed(row, out):
    """Implement `_store`: write values rounded half to even; return whether any is not finite."""
    if out.dtype == types.uint16:

        def bfloat16(row, out):
            bits, worst = row.view(np.uint32), np.uint32(0)
            for i in range(bits.size):
                word = bits[i]
                # adding this rounds up if the lower 16 bits are above 0x8000 or, so that ties go to
                # even, if they are 0x8000 and the last kept bit is 1
                odd = np.uint32(np.uint32(word >> np.uint32(16)) & np.uint32(1))
                rounded = np.uint32(word + np.uint32(odd + np.uint32(0x7FFF)))
                # NaN may round to any pattern, so the pattern before rounding is checked, too
                size = max(np.uint32(rounded & _INFINITE), np.uint32(word & _INFINITE))
                worst = max(worst, size)
                out[i] = np.uint16(rounded >> np.uint32(16))
            return worst == _INFINITE

        return bfloat16

    def float32(row, out):
        bits, worst = row.view(np.uint32), np.uint32(0)
        for i in range(bits.size):
            worst = max(worst, np.uint32(bits[i] & _INFINITE))
            out[i] = row[i]
        return worst == _INFINITE

    return float32


@_kernel
def _load_delta(source, base, row):
    _load(source, row)
    for i in range(row.size):
        row[i] = row[i] - base[i]


@_kernel
def _times(row, factor):
    for i in range(row.size):
        row[i] = row[i] * factor


@_kernel
def _times_each(row, factors):
    for i in range(row.size):
        row[i] = row[i] * factors[i]


@_kernel
def _mark_above(row, threshold):
    for i in range(row.size):
        row[i] = _ONE if row[i] > threshold else _ZERO


@_kernel
def _mark_at_least(row, threshold):
    for i in range(row.size):
        row[i] = _ONE if row[i] >= threshold else _ZERO


@_kernel
def _product(row, factor, out):
    for i in range(row.size):
        out[i] = row[i] * factor


@_kernel
def _add_product(row, factor, out):
    for i in range(row.size):
        out[i] = out[i] + row[i] * factor


@_kernel
def _add(row, out):
    for i in range(row.size):
        out[i] = out[i] + row[i]


@_kernel
def _fill(row, value):
    for i in range(row.size):
        row[i] = value


@_summing
def _dot(a, b):
    total = 0.0
    for i in range(a.size):
        total += np.float64(a[i]) * np.float64(b[i])
    return total


@_summing
def _l1(row):
    total = 0.0
    for i in range(row.size):
        total += np.float64(abs(row[i]))
    return total


@_kernel
def _sizes(bits):
    """Clear the sign bits of float32 bit patterns in place, and return the largest pattern."""
    largest = np.uint32(0)
    for i in range(bits.size):
        bits[i] = bits[i] & _SIZE
        largest = max(largest, bits[i])
    return largest


@_kernel
def _at_least(row, threshold):
    for i in range(row.size):
        row[i] = row[i] if abs(row[i]) >= threshold else _ZERO


@_kernel
def _above(row, threshold):
    for i in range(row.size):
        row[i] = row[i] if abs(row[i]) > threshold else _ZERO


@_kernel
def _trim(row, threshold, budget):
    """Zero magnitudes below the threshold, and all but the first ``budget`` of those equal to it.

    Returns:
        The part of the budget that is left.
    """
    # the first two cases are vectorized; only a block that keeps some ties has to count them
    if budget == EVERY:
        _at_least(row, threshold)
    elif budget == 0:
        _above(row, threshold)
    else:
        for i in range(row.size):
            size = abs(row[i])
            keep = size > threshold
            if size == threshold and budget > 0:
                keep = True
                budget -= 1
            row[i] = row[i] if keep else _ZERO
    return budget


@_kernel
def _middle(row, top):
    for i in range(row.size):
        row[i] = row[i] - top[i]


@_kernel
def _hash(counter, first, second):
    """Return the 32-bit hash of a counter, as in `mergekit_lite.methods.noise`."""
    # numba widens sums of uint32 to uint64, so each result is cut back to wrap at 32 bits
    x = np.uint32(counter + first)
    x = np.uint32(x ^ np.uint32(x >> np.uint32(16)))
    x = np.uint32(np.uint32(x * np.uint32(0x7FEB352D)) ^ second)
    x = np.uint32(x ^ np.uint32(x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@_kernel
def _draw_words(words, counter, first, second):
    for w in range(words.size):
        words[w] = _hash(np.uint32(counter + np.uint32(w)), first, second)


@_kernel
def _keep_lanes(row, lanes, whole):
    for i in range(row.size):
        row[i] = row[i] * (_ONE if lanes[i] < whole else _ZERO)


@_kernel
def _draw(row, place, words, keys, whole, limit):
    """Keep each element with the same probability, and zero all other elements.

    Four elements share a 32-bit hash, and each uses one byte. An element is kept if its byte is
    below ``whole``, or if its byte is equal to ``whole`` and a second hash, of this element alone,
    is below ``limit``. A negative limit means never. ``place`` is the index of the first element in
    the tensor, a multiple of 4.
    """
    # the counter of a shared hash is the index of its first element, divided by 4
    _draw_words(words[: (row.size + 3) // 4], np.uint32(place // 4), keys[0], keys[1])
    lanes = words.view(np.int8)[: row.size]
    if limit >= 0:
        for i in range(row.size):
            if lanes[i] == whole:
                word = np.uint32(_hash(np.uint32(place + i), keys[2], keys[3]) & _SIZE)
                # compared in float32, as torch compares an int32 tensor with a Python float
                lanes[i] = -128 if np.float32(word) < limit else 127
    # kept elements are marked with -128, and no byte is below -128, so raise the limit by 1
    if limit >= 0 and whole == -128:
        whole += 1
    _keep_lanes(row, lanes, np.int8(whole))


@_kernel
def _signs(total, share):
    for i in range(total.size):
        total[i] = np.copysign(_ONE, total[i])
        share[i] = _ZERO


@_kernel
def _add_agreeing(row, elected, weight, merged, share):
    for i in range(row.size):
        agreeing = elected[i] * row[i]
        agreeing = _ZERO if agreeing <= _ZERO else agreeing  # NaN stays NaN
        merged[i] = merged[i] + agreeing
        share[i] = share[i] + (weight if agreeing > _ZERO else _ZERO)


@_kernel
def _divide_unless_zero(row, elected, share):
    for i in range(row.size):
        row[i] = row[i] * elected[i] / (_ONE if abs(share[i]) < _SMALL else share[i])


@_kernel
def _from_base(row, base, scale):
    for i in range(row.size):
        row[i] = base[i] + row[i] * scale


@_kernel
def _divide(row, number):
    for i in range(row.size):
        row[i] = row[i] / number


@_kernel
def _add_square(row, mean, out):
    for i in range(row.size):
        distance = row[i] - mean[i]
        out[i] = out[i] + distance * distance


@_kernel
def _count_above(bits, high):
    above = np.uint32(0)
    for i in range(bits.size):
        above += np.uint32(bits[i] >= high)
    return above


@_kernel
def _collect(bits, low, high, patterns, count):
    """Append to ``patterns`` the bit patterns that are at least ``low`` and below ``high``.

    The first ``count`` entries of ``patterns`` are already used.

    Returns:
        The new number of patterns.
    """
    # the difference wraps and is large for values below `low`, so one comparison tests both ends
    span, whole = np.uint32(high - low), bits.size // _GROUP * _GROUP
    for start in range(0, whole, _GROUP):  # one vector operation skips most groups
        inside = np.uint32(0)
        for i in range(start, start + _GROUP):
            inside += np.uint32(np.uint32(bits[i] - low) < span)
        if inside:
            for i in range(start, start + _GROUP):
                if np.uint32(bits[i] - low) < span:
                    patterns[count] = bits[i]
                    count += 1
    for i in range(whole, bits.size):
        if np.uint32(bits[i] - low) < span:
            patterns[count] = bits[i]
            count += 1
    return count


# Kernels, which work on a block tile by tile


@_kernel
def _load_deltas(raw, start, stop, base, deltas):
    _load(raw[-1, start:stop], base)
    for k in range(deltas.shape[0]):
        _load_delta(raw[k, start:stop], base, deltas[k, : base.size])


@_kernel
def combine(raw, n, coefficients, work, out):
    """Write Σ c_k x_k over all rows to ``out``."""
    bad = False
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        row = work[0, : stop - start]
        sums = work[1, : stop - start]
        _load(raw[0, start:stop], row)
        # the first product is not added to 0, which would turn -0 into 0
        _product(row, coefficients[0], sums)
        for k in range(1, coefficients.size):
            _load(raw[k, start:stop], row)
            _add_product(row, coefficients[k], sums)
        bad |= _store(sums, out[start:stop])
    return bad


@_kernel
def gram(raw, n, rows, shifted, work, sums):
    """Add the dot products of the first ``rows`` rows to ``sums``.

    If ``shifted``, they are the dot products of the rows' differences from the base.
    """
    base = work[0]
    values = work[1 : 1 + rows]
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        count = stop - start
        if shifted:
            _load_deltas(raw, start, stop, base[:count], values)
        else:
            for k in range(rows):
                _load(raw[k, start:stop], values[k, :count])
        for i in range(rows):
            for j in range(i, rows):
                sums[i, j] += _dot(values[i, :count], values[j, :count])
    # the matrix is symmetric and only one half was summed: copy it to the other half
    for i in range(rows):
        for j in range(i):
            sums[i, j] = sums[j, i]
    return False


@_kernel
def _keep(kept, deltas, count, start, place, second, words):
    """Zero the elements of each model's tile that the method drops.

    ``kept`` is the result of `passes.Kept.arguments`. ``start`` and ``place`` are the indices of
    the first element in the block and in the tensor.
    """
    kind, cuts, budgets, keys, wholes, limits, mask = kept
    for k in range(deltas.shape[0]):
        row = deltas[k, :count]
        if kind == TRIM:
            budgets[k] = _trim(row, cuts[k], budgets[k])
        elif kind == MIDDLE:
            # the outlier thresholds follow the K lower thresholds; outliers are among the elements
            # that the lower threshold keeps, so the difference below is exactly the value or 0
            top, other = deltas.shape[0] + k, second[:count]
            _product(row, _ONE, other)
            budgets[k] = _trim(row, cuts[k], budgets[k])
            budgets[top] = _trim(other, cuts[top], budgets[top])
            _middle(row, other)
        elif kind == DRAW and wholes[k] < 128:
            # 128 means that the model keeps everything without random numbers, as in `Noise.keep`
            _draw(row, place, words, keys[k], wholes[k], limits[k])
        elif kind == CHOSEN:
            _apply(row, mask[k], start)


@_kernel
def _count_below(bits, pattern):
    below = np.uint32(0)
    for i in range(bits.size):
        below += np.uint32(bits[i] < pattern)
    return below


@_kernel
def _count_equal(bits, pattern):
    equal = np.uint32(0)
    for i in range(bits.size):
        equal += np.uint32(bits[i] == pattern)
    return equal


@_kernel
def _limits_of_bins(bits, largest, shift, limits, counts, surely, perhaps):
    """Find the smallest and the largest limit in each bin, from the ranks that the bin spans.

    They are written to ``surely`` and ``perhaps``. A bin spans ``2**shift`` consecutive bit
    patterns. The last bin ends at the largest pattern. The first bin also has all patterns that are
    too small for the other bins.
    """
    last = np.int64(counts.size - 1)
    for b in range(counts.size):
        counts[b] = 0
    for i in range(bits.size):
        counts[max(last - np.int64((largest - bits[i]) >> shift), 0)] += 1
    first = np.int64(0)
    for b in range(counts.size):
        count = np.int64(counts[b])
        # limits grow with the rank, so the first and the last limit of a bin bound the others
        if count:
            surely[b] = limits[first]
            perhaps[b] = limits[first + count - 1]
        first += count


@_kernel
def _mark_by_rank(bits, words, largest, shift, limits, surely, perhaps, start, mask):
    """Set an element's bit in ``mask`` if its random number is below the limit for its rank.

    Elements are ranked by magnitude within the row, and equal magnitudes by index. For most
    elements the two limits of their bin decide, so that the rank is not needed. The random numbers
    in ``words`` are overwritten with the kept magnitudes, and with 0 for dropped elements.
    """
    last = np.int64(surely.size - 1)
    # a row may begin inside a byte, after the last bits of the previous row
    byte = mask[start >> 3]
    for i in range(bits.size):
        b = max(last - np.int64((largest - bits[i]) >> shift), 0)
        word = np.int32(words[i])
        keep = word < surely[b]
        # a 0 stays 0 whether it is kept or not
        if keep != (word < perhaps[b]) and bits[i] != 0:
            # so few elements are undecided that counting for each costs less than sorting the row
            rank = _count_below(bits, bits[i]) + _count_equal(bits[:i], bits[i])
            keep = word < limits[rank]
        words[i] = bits[i] * np.uint32(keep)
        at = start + i
        byte |= np.uint8(np.uint8(keep) << np.uint8(at & 7))
        if at & 7 == 7:
            mask[at >> 3] = byte
            byte = np.uint8(0)
    end = start + bits.size
    # the row ends inside a byte, which the next row continues
    if end & 7:
        mask[end >> 3] = byte


@_kernel
def choose(raw, n, columns, models, place, shift, keys, limits, keeps_all, row, bins, mask, sums):
    """Choose at random which elements of each model's rows to keep, larger ones more often.

    An element is kept if its random number is below the limit of its rank in ``limits``
    (K, columns). ``keeps_all`` (K,) marks models that keep all elements. ``row`` (3, columns) and
    ``bins`` (3, number) are scratch memory. The kernel sets the bits of kept elements in ``mask``
    (K, bytes), which must be zero before. It adds each model's L1 norms, before and after elements
    are dropped, to ``sums`` (K, 2).
    """
    base = row[0]
    delta = row[1]
    words = row[2].view(np.uint32)
    for start in range(0, n, columns):
        _load(raw[-1, start : start + columns], base)
        for k in range(models):
            _load_delta(raw[k, start : start + columns], base, delta)
            bits = delta.view(np.uint32)
            largest = _sizes(bits)
            total = _l1(delta)
            sums[k, 0] += total
            if keeps_all[k]:
                sums[k, 1] += total
                _mark_all(mask[k], start, columns)
                continue
            _draw_words(words, np.uint32(place + start), keys[k, 0], keys[k, 1])
            _limits_of_bins(bits, largest, shift, limits[k], bins[0], bins[1], bins[2])
            _mark_by_rank(bits, words, largest, shift, limits[k], bins[1], bins[2], start, mask[k])
            sums[k, 1] += _l1(row[2])  # which `_mark_by_rank` overwrote with the kept magnitudes
    return False


@_kernel
def _mark_all(mask, start, count):
    for at in range(start, start + count):
        mask[at >> 3] |= np.uint8(np.uint8(1) << np.uint8(at & 7))


@_kernel
def _apply(row, mask, start):
    """Zero the elements whose bit in the mask is 0; these zeros keep the elements' signs."""
    for i in range(row.size):
        at = start + i
        row[i] = row[i] * np.float32((mask[at >> 3] >> np.uint8(at & 7)) & np.uint8(1))


@_kernel
def norms(raw, n, models, place, kind, cuts, budgets, keys, wholes, limits, mask, work, sums):
    """Add each model's L1 norms, before and after elements are dropped, to ``sums`` (K, 2)."""
    kept = (kind, cuts, budgets, keys, wholes, limits, mask)
    base = work[0]
    second = work[1]
    words = work[2, :_WORDS].view(np.uint32)
    deltas = work[3 : 3 + models]
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        count = stop - start
        _load_deltas(raw, start, stop, base[:count], deltas)
        for k in range(models):
            sums[k, 0] += _l1(deltas[k, :count])
        _keep(kept, deltas, count, start, place + start, second, words)
        for k in range(models):
            sums[k, 1] += _l1(deltas[k, :count])
    return False


@_kernel
def _consensus(deltas, weights, normalize, elected, merged, share):
    """Write the weighted sum of changes to ``merged``, or their weighted mean if ``normalize``.

    Only changes with the same sign as the weighted total are included.
    """
    count = merged.size
    _fill(elected, _ZERO)
    for k in range(deltas.shape[0]):
        _times(deltas[k, :count], weights[k])
        _add(deltas[k, :count], elected)
    # this also sets `share` to 0, in the same loop
    _signs(elected, share)
    _fill(merged, _ZERO)
    for k in range(deltas.shape[0]):
        _add_agreeing(deltas[k, :count], elected, weights[k], merged, share)
    if normalize:
        _divide_unless_zero(merged, elected, share)
    else:
        _times_each(merged, elected)


@_kernel
def shift(
    raw,
    n,
    models,
    place,
    kind,
    cuts,
    budgets,
    keys,
    wholes,
    limits,
    mask,
    scales,
    weights,
    voting,
    normalize,
    scale,
    work,
    out,
):
    """Write B plus ``scale`` times the weighted sum, or the consensus, of the kept task vectors.

    Each task vector is first multiplied by its entry in ``scales``, unless ``scales`` is empty. If
    ``voting``, the consensus is used instead of the weighted sum. If ``normalize``, the consensus
    is divided by the sum of the agreeing weights.
    """
    kept = (kind, cuts, budgets, keys, wholes, limits, mask)
    base = work[0]
    second = work[1]
    words = work[2, :_WORDS].view(np.uint32)
    total = work[3]
    share = work[4]
    deltas = work[5 : 5 + models]
    bad = False
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        count = stop - start
        merged = total[:count]
        origin = base[:count]
        _load_deltas(raw, start, stop, origin, deltas)
        _keep(kept, deltas, count, start, place + start, second, words)
        for k in range(scales.size):
            _times(deltas[k, :count], scales[k])
        if voting:
            _consensus(deltas, weights, normalize, second[:count], merged, share[:count])
        else:
            _product(deltas[0, :count], weights[0], merged)
            for k in range(1, models):
                _add_product(deltas[k, :count], weights[k], merged)
        _from_base(merged, origin, scale)
        bad |= _store(merged, out[start:stop])
    return bad


@_kernel
def window(raw, n, models, lows, highs, top, patterns, above, inside, work):
    """Count each task vector's magnitudes above a window, and collect the magnitudes inside it.

    A model may have several windows: window w belongs to model w modulo K. The bit patterns inside
    window w are written to row w of ``patterns`` (windows, n).

    Returns:
        Whether any magnitude is NaN.
    """
    base = work[0]
    deltas = work[1 : 1 + models]
    largest = np.uint32(0)
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        count = stop - start
        _load_deltas(raw, start, stop, base[:count], deltas)
        for k in range(models):
            bits = deltas[k, :count].view(np.uint32)
            largest = max(largest, _sizes(bits))
            for w in range(k, lows.size, models):
                above[w] += _count_above(bits, highs[w])
                inside[w] = _collect(bits, lows[w], highs[w], patterns[w], inside[w])
    # NaN has larger patterns than infinity, so the largest pattern shows whether there is any NaN
    return largest >= top


@_kernel
def _variance(deltas, mean, scores):
    """Write the population variance over models, for each element of a tile, to ``scores``."""
    count, number = scores.size, np.float32(deltas.shape[0])
    # a product with 1 is a copy
    _product(deltas[0, :count], _ONE, mean)
    for k in range(1, deltas.shape[0]):
        _add(deltas[k, :count], mean)
    _divide(mean, number)
    _fill(scores, _ZERO)
    for k in range(deltas.shape[0]):
        _add_square(deltas[k, :count], mean, scores)
    _divide(scores, number)


@_kernel
def variance_window(raw, n, models, low, high, top, patterns, counts, work):
    """Count and collect variances over models, as `window` does with magnitudes.

    ``counts`` gets the numbers of variances above the window, inside it, and different from 0.

    Returns:
        Whether any variance is NaN.
    """
    base = work[0]
    mean = work[1]
    variances = work[2]
    deltas = work[3 : 3 + models]
    largest = np.uint32(0)
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        count = stop - start
        scores = variances[:count]
        _load_deltas(raw, start, stop, base[:count], deltas)
        _variance(deltas, mean[:count], scores)
        bits = scores.view(np.uint32)
        largest = max(largest, _sizes(bits))
        # every variance other than 0 has a pattern of 1 or more
        counts[2] += _count_above(bits, np.uint32(1))
        counts[0] += _count_above(bits, high)
        counts[1] = _collect(bits, low, high, patterns, counts[1])
    return largest >= top


@_kernel
def _select(deltas, cut, budget, mean, scores):
    """Zero the elements of every model at positions whose variance is not among the largest.

    Returns:
        The part of the budget that is left: how many more elements to keep if their variance equals
        ``cut``.
    """
    _variance(deltas, mean, scores)
    if budget == EVERY:
        _mark_at_least(scores, cut)
    elif budget == 0:
        _mark_above(scores, cut)
    else:
        for i in range(scores.size):
            keep = scores[i] > cut
            if scores[i] == cut and budget > 0:
                keep = True
                budget -= 1
            scores[i] = _ONE if keep else _ZERO
    for k in range(deltas.shape[0]):
        _times_each(deltas[k, : scores.size], scores)
    return budget


@_kernel
def energy(raw, n, models, selecting, cut, budget, work, sums):
    """Add each model's sum of squares over the selected elements to ``sums`` (K,)."""
    base = work[0]
    mean = work[1]
    scores = work[2]
    deltas = work[3 : 3 + models]
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        count = stop - start
        _load_deltas(raw, start, stop, base[:count], deltas)
        if selecting:
            budget = _select(deltas, cut, budget, mean[:count], scores[:count])
        for k in range(models):
            sums[k] += _dot(deltas[k, :count], deltas[k, :count])
    return False


@_kernel
def _add_majority(row, elected, weight, merged, share):
    for i in range(row.size):
        counted = weight if row[i] * elected[i] > _ZERO else _ZERO
        share[i] = share[i] + counted
        merged[i] = merged[i] + row[i] * counted


@_kernel
def _from_base_divided(row, base, share):
    for i in range(row.size):
        row[i] = base[i] + row[i] / max(share[i], _LEAST)


@_kernel
def erase_minority(raw, n, models, selecting, cut, budget, weights, work, out):
    """Write B plus the weighted mean of the selected changes, without those of the minority sign.

    The majority sign of an element is the sign of the sum of its changes.
    """
    deltas = work[4 : 4 + models]
    bad = False
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        count = stop - start
        origin = work[0, :count]
        elected = work[1, :count]
        share = work[2, :count]
        merged = work[3, :count]
        _load_deltas(raw, start, stop, origin, deltas)
        if selecting:
            # mean and variance use two rows that are overwritten below
            budget = _select(deltas, cut, budget, elected, share)
        _fill(elected, _ZERO)
        _fill(merged, _MINUS_ZERO)
        for k in range(models):
            _add(deltas[k, :count], elected)
        _signs(elected, share)
        for k in range(models):
            _add_majority(deltas[k, :count], elected, weights[k], merged, share)
        _from_base_divided(merged, origin, share)
        bad |= _store(merged, out[start:stop])
    return bad


@_kernel
def _importance(row, base, divergence, scores):
    for i in range(row.size):
        scores[i] = abs(row[i] - base[i]) * divergence


@_kernel
def importance(raw, n, columns, divergences, work, scores):
    """Write the magnitude of each element's change, times its row's divergence, to ``scores`` (n,).

    ``raw`` holds the model and the base. The block consists of whole rows of the tensor, and
    ``divergences`` (rows,) has one value for each of them.
    """
    model = work[0]
    base = work[1]
    for row in range(n // columns):
        last = (row + 1) * columns
        for start in range(row * columns, last, TILE):
            stop = min(start + TILE, last)
            count = stop - start
            _load(raw[0, start:stop], model[:count])
            _load(raw[1, start:stop], base[:count])
            _importance(model[:count], base[:count], divergences[row], scores[start:stop])
    return False


@_kernel
def _pick(row, base, scores, threshold):
    for i in range(row.size):
        row[i] = row[i] if scores[i] >= threshold else base[i]


@_kernel
def pick_important(raw, n, scores, threshold, work, out):
    """Write the model's element if its score is at least ``threshold``, else the base's element."""
    bad = False
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        model = work[0, : stop - start]
        base = work[1, : stop - start]
        _load(raw[0, start:stop], model)
        _load(raw[1, start:stop], base)
        _pick(model, base, scores[start:stop], threshold)
        bad |= _store(model, out[start:stop])
    return bad


def compile_kernel(name: str, kinds: tuple[Kind, ...], machine: Any) -> tuple[str, bytes]:
    """Compile a kernel for arguments of the given kinds.

    Args:
        name: The kernel's name.
        kinds: The dtype and the number of dimensions of each argument.
        machine: LLVM's target machine.

    Returns:
        The name of the C function, and its object code. The function takes each array as a
        pointer and its sizes.
    """
    names: list[str] = []
    arguments: list[str] = []
    signature: list[Any] = []
    for place, (dtype, dimensions) in enumerate(kinds):
        number = from_dtype(np.dtype(dtype))
        names.append(f"a{place}")
        if not dimensions:
            signature.append(number)
            arguments.append(f"a{place}")
            continue
        sizes = [f"a{place}_{dimension}" for dimension in range(dimensions)]
        names += sizes
        signature += [types.CPointer(number), *[types.int64] * dimensions]
        arguments.append(f"carray(a{place}, ({', '.join(sizes)},))")
    # numba cannot compile a variable number of arguments here, so the source is generated
    text = f"def entry({', '.join(names)}):\n    return kernel({', '.join(arguments)})\n"
    space = {"carray": carray, "kernel": globals()[name]}
    exec(text, space)
    # ctypes can call a C function later, without numba
    function = cfunc(types.boolean(*signature), error_model="numpy")(space["entry"])
    module = binding.parse_assembly(function.inspect_llvm())
    return function.native_name, machine.emit_object(module)
