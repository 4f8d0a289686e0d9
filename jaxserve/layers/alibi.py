"""ALiBi (Press et al. 2021, arXiv:2108.12409): positions as a bias of the scores, that falls with the distance."""


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return by how much a score of each head falls for every token further back.

    For a power of two these are 2^(-8 / num_heads), its square, its third power and so on; for another number those of
    the power of two below, then every second one of the power of two above.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-8 * (2 * i + 1) / (2 * power)) for i in range(num_heads - power)]
    return (*slopes, *between)
