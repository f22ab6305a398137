"""The parts of the ``packed`` policy: kinds, filling of bins, buckets, the beam over buckets, dealing to ranks."""
