"""A store of one's own: subdivisions are kept compressed in memory, and decompressed into the slots that ask for them."""

import zlib

import numpy as np


class CompressedStore:
    def __init__(self, store):
        self.index, self._pieces = store.index, []
        for number, subdivision in enumerate(self.index.subdivisions):
            buffer = np.zeros(subdivision.nbytes, np.uint8)
            store.read_into(number, buffer)
            self._pieces.append(zlib.compress(buffer))

    def read_into(self, number, buffer, part="whole"):
        place = self.index.subdivisions[number].bytes_of(part)
        read = np.frombuffer(zlib.decompress(self._pieces[number]), np.uint8)[place]
        buffer[: read.size] = read


if __name__ == "__main__":
    import penstock
    from penstock.fem import Cantilever
    from penstock.streaming import HostStore

    beam = Cantilever(nodes=(17, 5, 5), dof=3)
    plain = HostStore.create(beam.subdivisions(6))
    store = CompressedStore(plain)
    print(penstock.solve(store, beam.load(), memory=plain.index.nbytes // 2, device="cpu").explain())
