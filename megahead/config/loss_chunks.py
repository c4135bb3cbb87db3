"""How many scores the chunked softmax holds at once: `objectives` obeys these limits, `estimate` counts with them."""

CHUNK_BYTES = 8 * 2**20
"""Scores held at once: small beside the gradients, large enough that each chunk's products run at full speed (measured
on one core, 16,384 x 4,300 x 512: the same from 2 to 32 MiB, and no slower than the three products alone)."""

MIN_CHUNK_OUTPUTS = 256
"""Outputs in a chunk, however many candidates there are: each chunk adds to the gradient of all rows (measured with
50,304 candidates: 256 outputs are 1.7 times as fast as 41)."""
