"""What the warps of a Hopper program share, and what a warpgroup knows of its tile, as aggregates.

The annotations of an aggregate are read as types, so that no `annotations` come from the future.
"""

from sage_plugin.kernels.attention.backends.hopper.gluon_compat import (
    aggregate,
    async_load,
    gl,
    gluon,
    mbarrier,
)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage of a ring after another, and the phase of its barriers."""
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@aggregate
class Ring:
    """Stages in shared memory, each a tile with a "full" and an "empty" barrier."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty):
        self.tiles = tiles
        self.full = full
        self.empty = empty

    @gluon.jit
    def init(self, stage, READERS: gl.constexpr):
        """Set up the barriers of a stage that so many warpgroups read."""
        mbarrier.init(self.full.index(stage), count=1)
        mbarrier.init(self.empty.index(stage), count=READERS)

    @gluon.jit
    def reserve(self, desc, stage, phase):
        """Wait until the readers of a stage have released it, and announce a tile there."""
        mbarrier.wait(self.empty.index(stage), phase)
        mbarrier.expect(self.full.index(stage), desc.block_type.nbytes)

    @gluon.jit
    def load(self, desc, row, column, stage):
        """Start a copy to a reserved stage."""
        async_load(desc, [row, column], self.full.index(stage), self.tiles.index(stage))

    @gluon.jit
    def acquire(self, stage, phase, pred=True):
        """Wait until a tile is in a stage."""
        mbarrier.wait(self.full.index(stage), phase, pred=pred)

    @gluon.jit
    def release(self, stage, pred=True):
        """Leave a stage to the next load."""
        mbarrier.arrive(self.empty.index(stage), count=1, pred=pred)


@gluon.jit
def new_ring(tiles, STAGES: gl.constexpr):
    """A ring of tiles that are there; its barriers have to be set up."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    return Ring(tiles, full, empty)


@aggregate
class Memory:
    """Shared memory of a program.

    The order of its fields is that in which warps are handed them, and so part of the machine code.

    Attributes:
        q: ring of Q: a stage a warpgroup.
        totals: fp32 totals, `(GROUPS, 64, HEAD_DIM)`.
        ones: `(8, BLOCK_N)`, which row sums are products with.
    """

    q: Ring
    totals: gl.shared_memory_descriptor
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    ones: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, totals, k, v, ones):
        self.q = q
        self.totals = totals
        self.k_tiles = k.tiles
        self.v_tiles = v.tiles
        self.ones = ones
        self.k_full = k.full
        self.k_empty = k.empty
        self.v_full = v.full
        self.v_empty = v.empty

    @gluon.jit
    def keys(self):
        """The ring of K."""
        return Ring(self.k_tiles, self.k_full, self.k_empty)

    @gluon.jit
    def values(self):
        """The ring of V."""
        return Ring(self.v_tiles, self.v_full, self.v_empty)


@aggregate
class QueryTile:
    """A tile of queries, as one warpgroup sees it.

    Attributes:
        q: its 64 rows in shared memory.
        offs_m: their positions.
        row_scale: `(64, 4)` of each thread and row: log2 units of an INT8 or FP8 score.
        term: pointer to what keys add to scores.
        low: first key block.
        seq_q: queries.
        seq_k: keys.
    """

    q: gl.shared_memory_descriptor
    offs_m: gl.tensor
    row_scale: gl.tensor
    term: gl.tensor
    low: gl.tensor
    seq_q: gl.tensor
    seq_k: gl.tensor

    @gluon.constexpr_function
    def __init__(self, q, offs_m, row_scale, term, low, seq_q, seq_k):
        self.q = q
        self.offs_m = offs_m
        self.row_scale = row_scale
        self.term = term
        self.low = low
        self.seq_q = seq_q
        self.seq_k = seq_k
