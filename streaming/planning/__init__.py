"""Plans how a matrix is streamed before any byte moves; needs no GPU."""
